"""Child processes under `gapless san`: forked and spawned ones stay emulated and checked, and nothing hangs."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from gapless import guard
from gapless.guard import child_commands, forks
from gapless.guard.detectors import Detectors

ROOT = Path(__file__).resolve().parents[2]
TORCHS = torch.__file__
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
EMULATED = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")


def checked(folder: Path, source: str, code: int | None = None) -> tuple[dict, str]:
    """Run a program in a process of its own, which leaves no folder; returns the report and what was printed."""
    program, out = folder / "program.py", folder / "report.json"
    program.write_text(textwrap.dedent(source))
    command = [sys.executable, "-m", "gapless.guard.run", "--device-tensors", "cuda", "--json", str(out)]
    # The name of a socket there may have a hundred letters.
    with tempfile.TemporaryDirectory(dir="/tmp") as temporary:
        done = subprocess.run(
            [*command, str(program)], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": temporary},
            capture_output=True, text=True, timeout=250, check=False,
        )  # fmt: skip
        assert out.exists(), done.stderr
        assert not list(Path(temporary).glob("gapless-san-*"))
    assert code is None or done.returncode == code, done.stdout + done.stderr
    return json.loads(out.read_text()), done.stdout + done.stderr


def counted(report: dict) -> dict[tuple[str, int], int]:
    return {(found["rule"], found["line"]): found["count"] for found in report["findings"]}


FORKED = """
    import multiprocessing, os, threading
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Rows(Dataset):
        def __len__(self):
            return 8
        def __getitem__(self, at):
            return torch.ones(2, device="cuda").tolist()

    def work(n):
        with threading.Lock():
            return float(torch.ones(2, device="cuda").sum())

    if __name__ == "__main__":
        side = threading.Thread(target=lambda: threading.Event().wait(), daemon=True)
        side.start()
        batches = list(DataLoader(Rows(), batch_size=2, num_workers=2, pin_memory=True))
        fork = multiprocessing.get_context("fork")
        both = fork.Barrier(2)  # a worker that is ended before it has begun has nothing to report
        with fork.Pool(2, initializer=both.wait) as pool:
            print(pool.map(work, range(4), chunksize=1))
        one = os.fork()
        if one == 0:
            os._exit(int(work(0)) + 5)
        print(os.waitstatus_to_exitcode(os.waitpid(one, 0)[1]))
        other = os.fork()
        if other == 0:
            torch.ones(2, device="cuda").cpu()
            raise SystemExit(9)
        print(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]), len(batches))
"""


@EMULATED
@pytest.mark.process
def test_forked_children_are_checked_and_end(tmp_path):
    """Workers of a DataLoader, a pool whose workers are terminated, plain forks that exit at once or at the end."""
    report, out = checked(tmp_path, FORKED)
    assert "[2.0, 2.0, 2.0, 2.0]\n7\n9 4\n" in out, out
    # The pool's own workers may share the calls in any way; the fork makes one more.
    assert counted(report) == {("host-read", 10): 8, ("host-read", 14): 5, ("copy-to-host", 30): 1}, out
    assert report["watched"]["children"] == 6 and report["watched"]["lost"] == 0, out
    assert out.count("gapless san: watched") == 1 and "incomplete" not in out


ANEW = """
    import multiprocessing
    import torch

    there = torch.ones(2, device="cuda")

    def work(n):
        side = torch.cuda.Stream()
        x = torch.zeros(4, device="cuda")
        with torch.cuda.stream(side):
            x.add_(1)
        return torch.cuda.is_available(), str(there.cpu().device)

    if __name__ == "__main__":
        for way in ("spawn", "forkserver"):
            context = multiprocessing.get_context(way)
            with context.Pool(1) as pool:
                print(way, pool.apply(work, (1,)))
"""


@EMULATED
@pytest.mark.process
def test_children_that_start_anew_are_emulated_and_checked(tmp_path):
    """Without emulation a pool's workers fail when they import the program, and are started again for ever."""
    report, out = checked(tmp_path, ANEW)
    assert "spawn (True, 'cpu')" in out and "forkserver (True, 'cpu')" in out, out
    assert counted(report) == {("copy-to-host", 12): 2, ("race", 11): 2}, out
    assert report["watched"]["children"] >= 2 and report["watched"]["lost"] == 0, out


LATE = """
    import multiprocessing, threading
    import torch

    def slow():
        ended.wait(60)

    def late():
        waited_for.wait()
        one = fork.Process(target=work)
        one.start()
        one.join()
        ended.set()

    def work():
        float(torch.ones(2, device="cuda").sum())

    if __name__ == "__main__":
        fork = multiprocessing.get_context("fork")
        waited_for, ended = threading.Event(), fork.Event()
        torch.ones(2, device="cuda")
        first = fork.Process(target=slow)
        first.start()
        join = first.join
        first.join = lambda *seconds: (print("at most", seconds), waited_for.set(), join(*seconds))
        threading.Thread(target=late, daemon=True).start()
"""


@EMULATED
@pytest.mark.process
def test_a_child_that_begins_while_others_are_waited_for_is_not_lost(tmp_path):
    report, out = checked(tmp_path, LATE)
    assert report["watched"]["children"] == 2 and report["watched"]["lost"] == 0, out
    assert "at most ()" in out, "multiprocessing waits without a limit"


HELD = """
    import multiprocessing, os, subprocess, threading
    from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
    import torch
    from torch.utils.data import DataLoader

    def work(n=0):
        return float(torch.ones(2, device="cuda").sum())

    def serve(begun):
        work()
        begun.set()
        while True:
            threading.Event().wait(1)

    class Engine:
        def __init__(self):
            self.me = self  # never collected
            fork = multiprocessing.get_context("fork")
            self.loader = DataLoader(range(8), num_workers=2, persistent_workers=True)
            self.manager = fork.Manager()
            self.pool = fork.Pool(1)
            self.executors = ProcessPoolExecutor(1, mp_context=fork), ThreadPoolExecutor(1)
            begun = fork.Event()
            fork.Process(target=serve, args=(begun,), daemon=True).start()
            begun.wait()

    if __name__ == "__main__":
        engine = Engine()
        print(len(list(engine.loader)), engine.pool.apply(work, (1,)))
        print([executor.submit(work, 1).result() for executor in engine.executors])
        subprocess.run(["true"], preexec_fn=os.setsid)
"""


@EMULATED
@pytest.mark.process
def test_nothing_is_lost_or_waited_for_that_a_program_leaves_to_pythons_end(tmp_path):
    """Pools, executors, a manager, a daemon and workers of a DataLoader; and a function that runs before a program."""
    report, out = checked(tmp_path, HELD)
    assert "8 2.0\n[2.0, 2.0]\n" in out, out
    assert counted(report) == {("host-read", 8): 4}, out
    assert report["watched"]["lost"] == 0 and report["incomplete"] == "", out
    assert report["watched"]["children"] == 6 and "of 7 processes started by it 6 watched, 0 lost" in out


UNABLE = """
    import os, resource, signal
    import torch

    x = torch.ones(2, device="cuda")
    killed = os.fork()
    if killed == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(killed, 0)
    full = os.fork()
    if full == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # a write fails as on a full disk
        try:
            os._exit(7)
        finally:
            print("still here")
    print("ended with", os.waitstatus_to_exitcode(os.waitpid(full, 0)[1]))
"""


@EMULATED
@pytest.mark.process
def test_a_run_that_lost_children_is_not_called_clean(tmp_path):
    report, out = checked(tmp_path, UNABLE, code=3)
    assert "ended with 7" in out and "still here" not in out and "Traceback" not in out, out
    assert "of 2 processes started by it 0 watched, 2 lost" in out
    assert report["incomplete"] == "2 child processes ended without a report", out
    assert f"incomplete: {report['incomplete']}; 0 reports" in out and "cannot be written: File too large" in out


ENDING = """
    import os, signal, subprocess, sys
    import torch

    x = torch.ones(2, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        x.add_(1)
    x.tolist()
    def end():
        END
    BY
"""
OTHER = "os.execvp('true', ['true'])"
CHILD = (
    "if len(sys.argv) > 1:\n        end()\n    print(subprocess.run([sys.executable, __file__, 'child']).returncode)"
)
TERMINATED = "the program was terminated, and the rest of it was not seen"
REPLACED = "the program put another one in its place, which was not seen"


@EMULATED
@pytest.mark.process
@pytest.mark.parametrize(("end", "code", "incomplete"), [
    ("os._exit(0)", 1, ""), ("os._exit(5)", 5, ""), ("os.kill(os.getpid(), signal.SIGTERM)", 143, TERMINATED),
    (OTHER, 0, REPLACED),
])  # fmt: skip
def test_an_end_at_once_gives_the_report_and_leaves_no_folder(tmp_path, end, code, incomplete):
    report, out = checked(tmp_path, ENDING.replace("END", end).replace("BY", "end()"), code=code)
    assert report["incomplete"] == incomplete and out.count("gapless san: watched") == 1, out
    assert counted(report) == {("host-read", 9): 1, ("race", 8): 1, ("race", 9): 1}, out


@EMULATED
@pytest.mark.process
@pytest.mark.parametrize(("end", "code"), [("os.kill(os.getpid(), signal.SIGTERM)", -15), (OTHER, 0)])
def test_a_child_that_ends_at_once_leaves_its_report(tmp_path, end, code):
    report, out = checked(tmp_path, ENDING.replace("END", end).replace("BY", CHILD), code=1)
    assert report["watched"]["lost"] == 0 and f"{code}\n" in out, out
    assert counted(report)["host-read", 9] == 2, out


def test_a_program_that_is_not_there_ends_no_process():
    with Detectors(["sync"]), pytest.raises(FileNotFoundError):
        os.execvp("no-such-program", ["no-such-program"])


def test_a_child_that_begins_after_its_parents_report_runs(tmp_path, capfd):
    """A process that `subprocess` has started, and one that such a process forks."""
    before = signal.getsignal(signal.SIGTERM)
    with Detectors(["sync"], folder=str(tmp_path / "gone")):
        child = os.fork()
        if child == 0:
            os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 4
    assert signal.getsignal(signal.SIGTERM) == before
    said = [
        f"gapless san: process {pid} began after its parent's report, and is not watched"
        for pid in (os.getpid(), child)
    ]
    assert capfd.readouterr().err.splitlines() == said


LEAVING = """
    import multiprocessing, os, signal
    import torch
    from gapless.guard.race_report import Race

    def work():
        side = torch.cuda.Stream()
        x = torch.zeros(4, device="cuda")
        with torch.cuda.stream(side):
            x.add_(1)
        finding = Race.finding
        def terminated_meanwhile(race):
            os.kill(os.getpid(), signal.SIGTERM)
            return finding(race)
        Race.finding = terminated_meanwhile

    if __name__ == "__main__":
        one = multiprocessing.get_context("spawn").Process(target=work)
        one.start()
        one.join()
        print("ended with", one.exitcode)
"""


@EMULATED
@pytest.mark.process
def test_a_child_that_is_terminated_while_it_reports_reports_all(tmp_path):
    """A pool sends SIGTERM to workers that are already ending."""
    report, out = checked(tmp_path, LEAVING)
    assert "ended with 0" in out, out
    assert counted(report) == {("race", 10): 1}, out


def handlers_lock():
    """It has the method that `logging` and `concurrent.futures` call in the child."""
    with guard.no_race("record"):
        handler = logging.Handler()
    return handler, handler.lock


@pytest.mark.parametrize("make", [handlers_lock, lambda: (None, forks.lock())])
def test_a_lock_that_a_thread_of_the_parent_holds_is_free_in_a_forked_child(make):
    _owner, held = make()
    thread = threading.Thread(target=held.acquire)
    thread.start()
    thread.join()
    child = os.fork()
    if child == 0:
        os._exit(0 if held.acquire(blocking=False) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


STARTED = """
    import subprocess, sys
    import torch

    if sys.argv[1:] == ["child"]:
        print(torch.ones(2, device="cuda").tolist())
        sys.exit(5)
    x = torch.ones(2, device="cuda")
    mine = [sys.executable, "-u", __file__, "child"]
    done = subprocess.run(mine, stdout=subprocess.PIPE, text=True)
    print(done.returncode, done.stdout.strip(), done.args == mine)
    print(subprocess.run([sys.executable, "-m", "program", "child"]).returncode)
    subprocess.run([sys.executable, "-c", "import sys; print(len(sys.argv))"])
    subprocess.run("true")
"""


@EMULATED
@pytest.mark.process
def test_children_of_subprocess_that_run_python_are_checked(tmp_path):
    report, out = checked(tmp_path, STARTED)
    assert "5 [1.0, 1.0] True\n" in out and "[1.0, 1.0]\n5\n" in out, out
    assert counted(report) == {("host-read", 6): 2}, out
    assert report["watched"]["processes"] == 4 and report["watched"]["children"] == 2, out


RANKS = """
    import os
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    model = torch.nn.Linear(2, 2, device=device)
    model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    model(torch.ones(2, 2, device=device)).sum().backward()
    x = torch.full((4,), float(rank), device=device)
    work = dist.all_reduce(x, async_op=True)
    y = x + 1
    work.wait()
    print(f"{rank} {x.device == device} {torch.cuda.device_count()} {x.sum().item()}\\n", end="")
    dist.destroy_process_group()
"""


@EMULATED
@pytest.mark.process
def test_ranks_of_torchrun_are_emulated_and_checked(tmp_path):
    """Each rank has a device of its own number. The launcher is a console script or a module."""
    (tmp_path / "ranks.py").write_text(textwrap.dedent(RANKS))
    start = f"runpy.run_path({TORCHRUN!r}, run_name='__main__')"
    source = f"""
        import runpy, sys
        sys.argv = ["torchrun", "--standalone", "--nproc-per-node=2", "ranks.py"]
        {start}
    """
    report, out = checked(tmp_path, source)
    assert "0 True 2 4.0" in out and "1 True 2 4.0" in out, out
    assert counted(report) == {("race", 15): 2, ("host-size", 17): 2}, out
    assert report["watched"]["children"] == 2 and report["watched"]["lost"] == 0, out


@pytest.mark.parametrize("command, at", [
    (["PYTHON", "train.py", "--lr", "1"], 1),
    (["PYTHON", "-u", "-X", "dev", "-Wd", "-m", "package.train"], 5),
    ([TORCHRUN, "train.py"], 1),
    (["PYTHON", "-c", "print()"], 0),
    (["PYTHON", "-I", "train.py"], 0),
    (["PYTHON", "-m", "venv", "there"], 0),
    (["PYTHON", TORCHS], 0),
    (["ls"], 0), ([], 0), ("python train.py", 0),
])  # fmt: skip
def test_a_command_is_followed_if_it_is_a_python_with_a_program(command, at):
    words = command if isinstance(command, str) else [word.replace("PYTHON", sys.executable) for word in command]
    found = child_commands.started(words, {"names": []})
    if not at:
        assert found is words
        return
    assert found[0] == sys.executable and found[at] == "-c" and "follow" in found[at + 1]
    assert found[at + 2 :] == (words if words[0] == TORCHRUN else words[at:])
