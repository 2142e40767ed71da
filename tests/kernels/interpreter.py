"""Runs cases of kernels in Triton's interpreter: those of a file in a fork of one process a worker, since Triton reads
the switch at import; their tests here fail as they failed there."""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# With what torch.testing, compiled regions and Triton import only when they are first called.
IMPORTED = ("torch", "quick_interpreter", "implementations", "gapless.kernels.all_triton", "torch.distributed.tensor",
            "torch._dynamo", "triton.experimental.gluon")  # fmt: skip
ALONE = ("--noconftest", "-p", "implementations", "-p", "no:cacheprovider", "-p", "no:xdist",
         "-p", "no:hypothesispytest", "-W", "ignore::pytest.PytestAssertRewriteWarning")  # fmt: skip
"""The package is a plug-in of pytest, and imported already."""

Outcomes = dict[str, tuple[str, str]]
"""By a test's id: passed, failed or skipped, and its words."""
_outcomes: dict[Path, Outcomes] = {}


def is_interpreted(item: pytest.Item) -> bool:
    """Whether the process of the interpreter runs the test."""
    chosen = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    return chosen.get("implementation") == "interpreter" and "TRITON_INTERPRET" not in os.environ


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Take a test's outcome from the interpreter's process, where all of its file that are selected run at once."""
    if not is_interpreted(pyfuncitem):
        return None
    path = pyfuncitem.path
    if path not in _outcomes:
        items = [item for item in pyfuncitem.session.items if item.path == path and is_interpreted(item)]
        _outcomes[path] = _run([_id(item) for item in items])
    outcome, words = _outcomes[path].get(_id(pyfuncitem), ("failed", _outcomes[path][""][1]))
    if outcome == "skipped":
        pytest.skip(words)
    if outcome == "failed":
        pytest.fail(words, pytrace=False)
    return True


def _id(item: pytest.Item) -> str:
    """The test's id without the group that xdist has put behind it."""
    groups = [str(mark.args[0]) for mark in item.iter_markers("xdist_group")]
    return item.nodeid.removesuffix(f"@{groups[0]}") if groups else item.nodeid


def _run(tests: list[str]) -> Outcomes:
    process = _imported()
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(f"{json.dumps(tests)}\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except BaseException:  # the time is over: what it answers then is not of the next file
        process.kill()
        _imported.cache_clear()
        raise
    assert answer, f"the process that runs interpreted tests has ended: {process.wait()}"
    outcomes: Outcomes = json.loads(answer)
    return outcomes


@functools.cache
def _imported() -> subprocess.Popen[str]:
    """The process that has imported Triton, as `main` does; it ends with this one."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(HERE.parent), str(HERE), env.get("PYTHONPATH", "")])
    command = [sys.executable, str(Path(__file__))]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.communicate)
    return process


def main() -> None:
    """For each list of tests that is read, write their outcomes, and all that was printed under "", as a line."""
    for name in IMPORTED:
        importlib.import_module(name)
    for line in sys.stdin:
        output = Path(os.environ.get("TMPDIR", "/tmp")) / f"interpreted-{os.getpid()}"
        told = output.with_suffix(".json")
        if not (child := os.fork()):
            _run_here(json.loads(line), output, told)
        os.waitpid(child, 0)
        outcomes = json.loads(told.read_text(encoding="utf-8")) if told.exists() else {}
        outcomes[""] = "failed", output.read_text(encoding="utf-8")[-12_000:]
        print(json.dumps(outcomes), flush=True)
        for path in (output, told):
            path.unlink(missing_ok=True)


class Outcome:
    """A plug-in that keeps what tests say."""

    def __init__(self) -> None:
        self.outcomes: Outcomes = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            words = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
            self.outcomes[report.nodeid] = report.outcome, words.removeprefix("Skipped: ")


def _run_here(tests: list[str], output: Path, told: Path) -> None:
    """Run the tests and leave the process, with all that is printed in `output`."""
    gc.freeze()  # what pytest collects at its end walks over nothing that is imported
    with output.open("w", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    seen = Outcome()
    pytest.main([*tests, *ALONE], plugins=[seen])
    told.write_text(json.dumps(seen.outcomes), encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
