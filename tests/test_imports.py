"""The command line answers at once: nothing heavy is imported before it is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEAVY = (
    *("torch", "numpy", "transformers", "tokenizers", "msgspec", "zmq", "starlette", "uvicorn", "rich", "jinja2"),
    *("huggingface_hub", "prometheus_client"),
)
ASKED = (
    *("", "--version", "--help", "serve --help", "run --help", "chat --help", "complete --help", "doctor --help"),
    *("ab --help", "san --help", "top --help", "trace --help", "trace record --help", "trace convert --help"),
    *("trace summary --help", "bench --help", "bench serve --help", "bench throughput --help", "bench startup --help"),
)
RUN = f"""
import contextlib, io, json, sys
from gapless.cli.main import main
for line in {ASKED!r}:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            code = main(line.split())
        except SystemExit as stop:
            code = stop.code
    print(json.dumps([line, code, "gapless" in out.getvalue(), sorted(set({HEAVY!r}) & set(sys.modules))]))
"""


def answers(before: str = "") -> list[list[object]]:
    """Ask for all of it in one process: whatever a line imports shows from there on."""
    command = [sys.executable, "-c", f"{before}\n{RUN}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_help_and_version_import_nothing_heavy() -> None:
    assert answers() == [[line, 0 if line else 2, True, []] for line in ASKED]


def test_a_heavy_import_is_found() -> None:
    assert answers("import msgspec")[0][3] == ["msgspec"]
