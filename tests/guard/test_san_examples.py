"""examples/san under all detectors: each bad program is caught by its rule alone, a wait in its marked line; its good
twin gives no report, and the same output where the fault is only a wait."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BAD = sorted((ROOT / "examples" / "san").glob("*_bad.py"))

RULES = {
    "01_scalar_assign": "scalar-assign",
    "02_mask_index": "mask-index",
    "03_list_to_tensor": "list-to-device",
    "04_size_from_device": "host-size",
    "05_repeat_interleave": "repeat-interleave",
    "06_staging_reuse": "race",
    "07_event_rerecorded": "race",
    "08_offload_before_compute": "race",
    "09_freed_page": "race",
    "10_token_copy": "race",
    "11_side_stream": "race",
    "12_memory_reuse": "race",
}
STREAMS = ("11_side_stream", "12_memory_reuse")
"""Programs of plain torch.cuda. Emulated streams run in order, so that even the bad ones compute what they should."""
# A program that has just started loads kernels and takes its first memory, which no_sync says on a real GPU.
ON_STREAMS = ["--detect", "race"] if torch.cuda.is_available() else ["--device-tensors", "cuda"]


@pytest.fixture
def san(san_file):
    """Runs a program in this process; gives its exit code, its report and what it printed."""

    def started(path: Path):
        if torch.cuda.is_available() and path.name < "06":
            pytest.skip("a program that has just started is cold on a real GPU; tests/gpu holds these rules there")
        code, report, out = san_file(path, *(ON_STREAMS if path.stem.startswith(STREAMS) else []))
        return code, report, out.out

    return started


def test_twelve_programs_are_here_and_in_the_readme():
    assert [path.stem.removesuffix("_bad") for path in BAD] == list(RULES)
    readme = (BAD[0].parent / "README.md").read_text()
    rows = re.findall(r"^\| (\d\d) \| .* \| (\S+) \|$", readme, re.MULTILINE)
    assert rows == [(name[:2], rule) for name, rule in RULES.items()]


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_the_bad_program_is_caught(san, path):
    code, report, _ = san(path)
    assert code == 1
    assert {found["rule"] for found in report["findings"]} == {RULES[path.stem.removesuffix("_bad")]}
    for found in report["findings"]:
        assert found["file"] == str(path)
        line = path.read_text().splitlines()[found["line"] - 1]
        assert found["detector"] == "race" or line.endswith("# waits")


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_the_good_version_gives_no_report(san, path):
    code, report, answer = san(path.with_name(path.name.replace("_bad", "_good")))
    assert (code, report["reports"], report["findings"]) == (0, 0, [])
    name = path.stem.removesuffix("_bad")
    assert answer
    if not (name in STREAMS and torch.cuda.is_available()):  # on a real GPU the fault may go well or not
        assert (answer == san(path)[2]) == (RULES[name] != "race" or name in STREAMS)
