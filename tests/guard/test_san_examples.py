"""examples/san: each bad program is caught in its marked line; its good twin gives no report and the same output."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from gapless.guard import run

ROOT = Path(__file__).resolve().parents[2]
BAD = sorted((ROOT / "examples" / "san").glob("*_bad.py"))

RULES = {
    "01_scalar_assign": "scalar-assign",
    "02_mask_index": "mask-index",
    "03_list_to_tensor": "list-to-device",
    "04_size_from_device": "host-size",
    "05_repeat_interleave": "repeat-interleave",
}
SYNC = [path for path in BAD if path.stem.removesuffix("_bad") in RULES]


@pytest.fixture
def san(tmp_path, capsys, monkeypatch):
    """Runs a program in this process; gives its exit code, its report and what it printed."""

    def started(path: Path):
        monkeypatch.setattr(sys, "argv", list(sys.argv))
        monkeypatch.setattr(sys, "path", list(sys.path))
        out = tmp_path / "report.json"
        code = run.main(["--json", str(out), str(path)])
        return code, json.loads(out.read_text()), capsys.readouterr().out

    return started


def test_five_programs_of_this_kind_are_here():
    assert len(SYNC) == len(RULES) == 5


@pytest.mark.parametrize("path", SYNC, ids=lambda path: path.stem)
def test_the_bad_program_is_caught(san, path):
    code, report, _ = san(path)
    assert code == 1
    assert {found["rule"] for found in report["findings"]} == {RULES[path.stem.removesuffix("_bad")]}
    for found in report["findings"]:
        assert found["file"] == str(path)
        assert path.read_text().splitlines()[found["line"] - 1].endswith("# waits")


@pytest.mark.parametrize("path", SYNC, ids=lambda path: path.stem)
def test_the_good_twin_gives_no_report_and_the_same_answer(san, path):
    code, report, answer = san(path.with_name(path.name.replace("_bad", "_good")))
    assert (code, report["reports"], report["findings"]) == (0, 0, [])
    assert answer and answer == san(path)[2]
