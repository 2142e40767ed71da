"""Child processes under `gapless san`: forked and spawned ones stay emulated and checked, and nothing hangs."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
import torch

from gapless import guard
from gapless.guard import child_commands, forks

ROOT = Path(__file__).resolve().parents[2]
TORCHS = torch.__file__
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
EMULATED = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")


def checked(folder: Path, source: str) -> tuple[dict, str]:
    """Run a program in a process of its own; returns the report and what was printed."""
    program, out = folder / "program.py", folder / "report.json"
    program.write_text(textwrap.dedent(source))
    command = [sys.executable, "-m", "gapless.guard.run", "--device-tensors", "cuda", "--json", str(out)]
    done = subprocess.run(
        [*command, str(program)], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True,
        text=True, timeout=250, check=False,
    )  # fmt: skip
    assert out.exists(), done.stderr
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
        first.join = lambda *seconds: (waited_for.set(), join(*seconds))
        threading.Thread(target=late, daemon=True).start()
"""


@EMULATED
@pytest.mark.process
def test_a_child_that_begins_while_others_are_waited_for_is_not_lost(tmp_path):
    report, out = checked(tmp_path, LATE)
    assert report["watched"]["children"] == 2 and report["watched"]["lost"] == 0, out


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
    print(rank, x.device == device, torch.cuda.device_count(), x.sum().item())
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
