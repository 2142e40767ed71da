"""Runs programs of tests/guard/kinds on the fake accelerator, with what they spell for CUDA spelled for any device.

`python kinds_on_fake.py FOLDER PROGRAM...` prints one line of JSON for each: its name, exit code, findings and words.
A process of its own, since torch's accelerator stays the fake once that is loaded.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from pathlib import Path

from gapless.guard import run

KINDS = Path(__file__).parent / "kinds"
SPELLINGS = (
    (r"torch\.cuda\.stream\(([^()]*(?:\(\))?)\)", r"\1"),
    (r"torch\.cuda\.Stream\(\)", 'torch.Stream("fake")'),
    (r"torch\.cuda\.Event\(\w*(?:=True)?\)", 'torch.Event("fake")'),
    (r"torch\.cuda\.CUDAGraph\(\)", "torch.fake.Graph()"),
    (r"torch\.cuda\.(current_stream|synchronize)", r"torch.accelerator.\1"),
    (r"\.cuda\(\)", '.to("fake")'),
    (r'"cuda(:0)?"', '"fake"'),
)


def respelled(path: Path) -> str:
    """Return a program's text for the fake."""
    text = path.read_text(encoding="utf-8")
    for pattern, instead in SPELLINGS:
        text = re.sub(pattern, instead, text)
    return text


def main(folder: Path, names: list[str]) -> None:
    out = folder / "report.json"
    for name in names:
        program = folder / Path(name).name
        program.write_text(respelled(KINDS / name), encoding="utf-8")
        sys.argv, said = [str(program)], io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            code = run.main(["--device", "fake", "--json", str(out), str(program)])
        report = json.loads(out.read_text(encoding="utf-8"))
        found = sorted({(entry["line"], entry["rule"]) for entry in report["findings"]})
        print(json.dumps([name, code, found, report["incomplete"], said.getvalue()]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
