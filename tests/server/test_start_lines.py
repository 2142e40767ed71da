"""What people see of a start: with and without a terminal, from before torch until requests are welcome."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
from terminal import shown_on_terminal

from gapless.base import progress
from gapless.base.config import EngineConfig
from gapless.device import cpu_native
from gapless.engine.build import build_core

ROOT = Path(__file__).resolve().parents[2]
PHASES = [
    "opening the device",
    "reading weights (6 MB)",
    "arranging weights for the kernels",
    "sizing KV memory",
    "warming up",
    "capturing graphs (54)",
]
SERVE = [sys.executable, "-m", "gapless", "serve", "--device", "cpu", "--port", "0"]
RUN = [sys.executable, "-m", "gapless", "run", "--device", "cpu", "--max-tokens", "2"]


@contextmanager
def torch_that_waits(folder):
    """An environment in which importing torch waits until a file is there, and then fails; yields it and that file."""
    (folder / "torch").mkdir()
    go = folder / "go"
    source = f"""
import os, time
end = time.monotonic() + 10
while not os.path.exists({str(go)!r}) and time.monotonic() < end:
    time.sleep(0.01)
raise ImportError("no torch")
"""
    (folder / "torch" / "__init__.py").write_text(source)
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    try:
        yield {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, go
    finally:
        go.touch()


def expected():
    """Without a compiler there are no graphs."""
    return PHASES if cpu_native.load() is not None else PHASES[:-1]


def built(phases):
    """The phases of a machine on which the C++ is built already."""
    return [phase for phase in phases if not phase.startswith("compiling C++")]


def until(stream, ending):
    """Lines up to the one that ends so."""
    lines = []
    while not lines or not lines[-1].endswith(ending):
        line = stream.readline()
        assert line, f"it ended: {lines}"
        lines.append(line.rstrip("\n"))
    return lines


def test_the_phases_come_in_order(caplog):
    caplog.set_level(progress.PROGRESS, "gapless.start")
    core = build_core(EngineConfig(device="cpu", threads=1))
    core.close()
    begun = [record.getMessage() for record in caplog.records if hasattr(record, "phase") and not record.phase.done]
    assert built(begun) == expected()
    assert re.fullmatch(r"ready in \d+\.\d s", caplog.messages[-1])


@pytest.mark.process
@pytest.mark.parametrize("form", ["text", "json"])
def test_serve_speaks_before_torch_is_there_and_a_failure_is_the_last_line(tmp_path, form):
    with torch_that_waits(tmp_path) as (environment, go):
        command = [*SERVE, "--log-format", form]
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, env=environment, text=True) as running:
            first = until(running.stderr, "loading torch" if form == "text" else '"phase":"loading torch"}')
            go.touch()
            *_, last = running.stderr.read().splitlines()
            assert running.wait(20) == 1
    if form == "json":
        assert [json.loads(line)["message"] for line in first] == ["starting the engine's process", "loading torch"]
        last = json.loads(last)["message"]
    assert len(first) == 2 and last.endswith("error: ImportError: no torch")


@pytest.mark.process
def test_a_quiet_start_prints_nothing(tmp_path):
    with torch_that_waits(tmp_path) as (environment, go):
        go.touch()
        command = [*SERVE, "--log-level", "error"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, env=environment, text=True, timeout=20)
    assert done.stderr == "gapless: error: ImportError: no torch\n"


@pytest.mark.process
def test_run_without_a_terminal_has_lines():
    done = subprocess.run([*RUN, "1 + 1"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.strip()
    *start, ready, summary = done.stderr.splitlines()
    assert start[0] == "gapless: loading torch"
    assert built([line.removeprefix("gapless: ") for line in start[1:]]) == expected()
    assert ready.startswith("gapless: ready in ") and " 2 out, " in summary


@pytest.mark.process
def test_on_a_terminal_serve_has_one_line_until_it_is_ready():
    shown = shown_on_terminal(SERVE, b"start-up, seconds", signal.SIGTERM, cwd=ROOT)
    start, _, rest = shown.partition("\r\n")
    # The log's thread and the announcement may both erase the line.
    *phases, announced = re.split(r"(?:\r\x1b\[K)+", start)[1:]
    assert all(re.fullmatch(r"gapless: [^\r\n]+\r", phase) for phase in phases)
    words = [phase.removeprefix("gapless: ").removesuffix("\r") for phase in phases]
    assert words[:3] == ["starting the engine's process", "loading torch", PHASES[0]]
    assert re.match(r"gapless \S+ serves demo|[\d:]{8} I gapless.server: settings", announced)
    assert "gapless: " not in rest and " serves demo" in shown
