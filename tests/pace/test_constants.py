"""The table of tuning constants."""

from __future__ import annotations

import json

from gapless.cli.main import main
from gapless.pace import chunk_limit, depth, draft_gate, load_gate
from gapless.pace.constants import PACKAGE, Constant, constants
from gapless.pace.load_gate import HOST_SOURCE

CONTROLLERS = (chunk_limit, depth, draft_gate, load_gate)


def test_the_table_has_each_constant_of_a_module_with_its_value_unit_and_reason(tmp_path):
    (tmp_path / "pace").mkdir()
    (tmp_path / "a.py").write_text('MOST = 3\n"""[pages] Most pages."""\nrows = 1\n"""[rows] No constant."""\n')
    (tmp_path / "pace" / "b.py").write_text(
        'FEW, MANY = 1_000, 2 * 1_000\n"""[ns] Least and\nmost."""\nNAME = "b"\n"""Without a unit."""\nLAST = 4\n'
    )
    assert list(constants(tmp_path)) == [
        Constant("pace/b.py", "FEW, MANY", "1_000, 2 * 1_000", "ns", "Least and most."),
        Constant("a.py", "MOST", "3", "pages", "Most pages."),
    ]


def test_the_table_has_every_public_number_of_every_controller():
    named = {(one.module, name) for one in constants() for name in one.name.split(", ")}
    for module in CONTROLLERS:
        path = f"pace/{module.__name__.rpartition('.')[2]}.py"
        source = (PACKAGE / path).read_text(encoding="utf-8")
        tuned = (int, float, tuple)
        numbers = {name for name, value in vars(module).items() if isinstance(value, tuned) and value != HOST_SOURCE}
        own = {name for name in numbers if name.isupper() and (f"\n{name}" in source or f", {name} =" in source)}
        assert own and not {(path, name) for name in own} - named, path


def test_doctor_prints_the_table_when_asked_for_pace(capsys):
    assert main(["doctor", "--pace"]) == 0
    assert f"pace/depth.py: MAX_CHAIN = {depth.MAX_CHAIN} [steps]\n" in capsys.readouterr().out
    assert main(["doctor", "--pace", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["constants"]) == len(list(constants()))
