"""Runs files of tests in Triton's interpreter: in a process of their own, since Triton reads the switch at import.

One process a worker imports torch and Triton, and each file runs in a fork of it.
"""

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
IMPORTED = ("torch", "quick_interpreter", "gapless.kernels.all_triton", "torch.distributed.tensor", "torch._dynamo",
            "triton.experimental.gluon")  # fmt: skip


def run(name: str) -> None:
    """Fails as `tests/kernels/interpreted/NAME.py` fails, in its words."""
    pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")
    process = _imported()
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(f"{name}\n")
        process.stdin.flush()
        answer = process.stdout.readline()
    except BaseException:  # the time is over: what it answers then is not of the next file
        process.kill()
        _imported.cache_clear()
        raise
    assert answer, f"the process that runs interpreted tests has ended: {process.wait()}"
    code, printed = json.loads(answer)
    print(printed[-500:])
    assert code == 0, printed[-12_000:]


@functools.cache
def _imported() -> subprocess.Popen[str]:
    """The process that has imported Triton, as `main` does; it ends with this one."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(HERE), env.get("PYTHONPATH", "")])
    command = [sys.executable, str(Path(__file__))]
    process = subprocess.Popen(command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    atexit.register(process.communicate)
    return process


def main() -> None:
    """For each name that is read, write pytest's exit code and output as a line of JSON."""
    for name in IMPORTED:
        importlib.import_module(name)
    output = Path(os.environ.get("TMPDIR", "/tmp")) / f"interpreted-{os.getpid()}"
    for line in sys.stdin:
        child = os.fork()
        if not child:
            _run_here(line.strip(), output)
        _, status = os.waitpid(child, 0)
        print(json.dumps([os.waitstatus_to_exitcode(status), output.read_text(encoding="utf-8")]), flush=True)
        output.unlink()


def _run_here(name: str, output: Path) -> None:
    """Run the file and leave the process, with all that is printed in `output`."""
    gc.freeze()  # what pytest collects at its end walks over nothing that is imported
    with output.open("w", encoding="utf-8") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    words = [str(HERE / "interpreted" / f"{name}.py"), "--noconftest", "-x"]
    quiet = "ignore::pytest.PytestAssertRewriteWarning"  # the package is a plug-in of pytest, and imported already
    code = pytest.main([*words, "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:hypothesispytest", "-W", quiet])
    sys.stdout.flush()
    os._exit(int(code))


if __name__ == "__main__":
    main()
