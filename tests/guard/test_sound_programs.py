"""tests/guard/sound: programs as a careful engineer writes them, on which no detector reports anything.

Programs whose first lines have `# runs: process` get a process of their own, and `# args: WORDS` gives arguments.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_kinds import header, in_process

HERE = Path(__file__).parent / "sound"
PROGRAMS = sorted(HERE.rglob("*.py"))
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")


def programs() -> list[object]:
    """Return the programs, those with a process of their own marked so."""
    marks = {path: [pytest.mark.process] if header(path, "runs") == "process" else [] for path in PROGRAMS}
    return [pytest.param(path, id=path.relative_to(HERE).as_posix(), marks=marks[path]) for path in PROGRAMS]


@pytest.mark.parametrize("path", programs())
def test_a_sound_program_gives_no_report(san_file, tmp_path, path):
    if header(path, "runs") == "process":
        code, report, said = in_process(path, tmp_path)
        out = said
    else:
        code, report, printed = san_file(path, "--device-tensors", "cuda", args=tuple(header(path, "args").split()))
        out, said = printed.out, printed.out + printed.err
    assert (code, report["reports"], report["incomplete"]) == (0, 0, ""), said
    assert out.strip(), "it prints its result"
    watched = report["watched"]
    assert watched["device_tensors"] and watched["streams"] > ("Stream(" in path.read_text()), watched
