"""The table of tuning constants."""

from __future__ import annotations

import json
import re

from gapless.cli.main import main
from gapless.pace import chunk_limit, depth, draft_gate, load_gate
from gapless.pace.constants import PACKAGE, Constant, constants

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


def test_the_table_has_every_number_of_every_controller():
    named = {(one.module, name) for one in constants() for name in one.name.split(", ")}
    for module in CONTROLLERS:
        path = f"pace/{module.__name__.rpartition('.')[2]}.py"
        assigned = re.findall(r"^([A-Z][A-Z_, ]*) = ", (PACKAGE / path).read_text(encoding="utf-8"), re.MULTILINE)
        own = {name for names in assigned for name in names.split(", ")} - {"HOST_SOURCE"}
        numbers = {(path, name) for name in own if type(vars(module)[name]) in (int, float, tuple)}
        assert numbers and numbers <= named, numbers - named


def test_doctor_prints_the_table_when_asked_for_pace(capsys):
    assert main(["doctor", "--pace"]) == 0
    assert f"pace/depth.py: MAX_CHAIN = {depth.MAX_CHAIN} [steps]\n" in capsys.readouterr().out
    assert main(["doctor", "--pace", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["constants"]) == len(list(constants()))
