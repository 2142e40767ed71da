"""A rank that ends, hangs or fails ends the whole engine, with its own last words, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from waiting import until

from gapless import LLM, ConfigError, EngineDeadError, SamplingParams, StalledError
from gapless.base.config import EngineConfig
from gapless.base.errors import RequestError
from gapless.demo import weights_dir
from gapless.engine import rank_process, ranks
from gapless.engine.build import build_core
from gapless.engine.process_backend import ProcessBackend

pytestmark = pytest.mark.process
HERE = Path(__file__).parent
NAMED_SECONDS = 2.0
"""Time in which a rank's end is named; tests allow a busy machine some more"""
SLACK = 8.0


@pytest.fixture
def faulty(monkeypatch):
    """Let ranks fail in this way."""

    def choose(fault):
        monkeypatch.setattr(rank_process, "FOLLOWER", "faulty_follower")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
        monkeypatch.setenv("RANK_FAULT", fault)

    return choose


@pytest.fixture(autouse=True)
def nothing_left(monkeypatch):
    """No process of a rank outlives a test, and neither do files of the ranks' memory."""
    started = []
    popen = subprocess.Popen

    def noted(*args, **options):
        process = popen(*args, **options)
        started.append(process)
        return process

    monkeypatch.setattr(rank_process.subprocess, "Popen", noted)
    yield started
    assert [process.pid for process in started if process.poll() is None] == []
    assert shared_files() == []


def shared_files() -> list[str]:
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{number}")
        except OSError:
            continue
        if "gapless-ranks" in name:
            found.append(name)
    return found


def engine(**options):
    return LLM("demo", tensor_parallel_size=2, dtype="float32", max_num_seqs=8, max_model_len=512, **options)


LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.mark.parametrize("place", ["import", "load", "build", "check", "capture"])
def test_a_rank_killed_in_its_start_ends_the_start_with_its_last_line(faulty, place):
    faulty(f"kill at {place}")
    config = EngineConfig(tensor_parallel_size=2, max_num_seqs=8, max_model_len=512)
    said = f"^rank 1 was killed by SIGKILL; .*: about to kill at {place}$"
    with pytest.raises(EngineDeadError, match=said) as raised:
        build_core(config)
    assert raised.value.__cause__ is None, "the first cause is looked for along the chain, which must end"


def test_graphs_that_one_rank_refuses_are_dropped_by_all_and_serving_goes_on(faulty):
    with engine() as llm:
        wanted = llm.generate(["Once", "Twice"], LONG)
    faulty("refuse at capture")
    with engine() as llm:
        found = llm.generate(["Once", "Twice"], LONG)
        assert llm.stats().steps.captures_refused == 2
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in wanted]


def test_new_weights_that_one_rank_cannot_read_are_refused_and_the_old_ones_serve(faulty):
    faulty("raise at update")
    with engine() as llm:
        before = llm.generate("Once", LONG)[0].outputs[0].token_ids
        with pytest.raises(RequestError, match="rank 1 cannot take it: MemoryError: no room on this rank"):
            llm.update_weights(str(weights_dir()))
        assert llm.generate("Once", LONG)[0].outputs[0].token_ids == before


@pytest.mark.parametrize("place", ["check", "capture"])
def test_a_rank_stopped_in_its_start_is_named(faulty, place):
    faulty(f"stop at {place}")
    with pytest.raises(EngineDeadError, match=r"^rank 1 gave no sign of life for 1\.8 s"):
        engine()


async def test_a_stopped_rank_ends_with_a_start_that_is_given_up():
    backend = ProcessBackend(EngineConfig(tensor_parallel_size=2))
    start = asyncio.create_task(backend.start(None))
    async with asyncio.timeout(60):
        while not (stopped := children(backend.pid)):
            await asyncio.sleep(0.05)
        os.kill(stopped[0], signal.SIGSTOP)
        start.cancel()
        await asyncio.gather(start, return_exceptions=True)
        while state(stopped[0]) not in "ZX":
            await asyncio.sleep(0.05)


def children(parent: int | None) -> list[int]:
    return [int(one) for one in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()] if parent else []


def state(process: int) -> str:
    """Return the letter of a process's state, X for one that is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def test_a_rank_that_hangs_in_its_start_is_named(faulty, monkeypatch):
    monkeypatch.setattr(ranks, "STUCK_LOOKS", 30)
    faulty("hang at load")
    with pytest.raises(EngineDeadError, match=r"^rank 1 made no progress for 3 s: it is stopped or hangs"):
        engine()


@pytest.mark.parametrize("place", ["load", "build", "forward"])
def test_a_rank_that_fails_says_why(faulty, place):
    faulty(f"raise at {place}")
    said = r"^rank 1: .*MemoryError: no room on this rank"
    with pytest.raises(EngineDeadError, match=said), engine(enforce_eager=True) as llm:
        llm.generate("Once", LONG)


def test_other_files_on_a_rank_are_refused_with_both_values(faulty):
    faulty("other at facts")
    with pytest.raises(ConfigError, match=r"rank 1 differs from rank 0 in weights: 'others', not '[0-9a-f]{16}'$"):
        engine()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_or_stops_under_load_is_named_in_time(nothing_left, how):
    with engine() as llm:
        (rank,) = nothing_left
        found = []
        thread = threading.Thread(target=lambda: found.append(raised(llm)))
        thread.start()
        until(lambda: llm.stats().steps.steps > 20)
        began = time.monotonic()
        os.kill(rank.pid, how)
        thread.join(60)
        took = time.monotonic() - began
    said = "was killed by SIGKILL" if how == signal.SIGKILL else "gave no sign of life for 1.8 s"
    assert re.match(f"rank 1 {said}", str(found[0])), found
    assert took < NAMED_SECONDS + SLACK


def raised(llm):
    try:
        for _ in range(100):
            llm.generate(["Once", "Twice", "Thrice"], LONG)
    except EngineDeadError as error:
        return error
    return None


def test_a_rank_killed_at_rest_fails_the_next_request(nothing_left):
    with engine() as llm:
        os.kill(nothing_left[0].pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match=r"^rank 1 was killed by SIGKILL"):
            until(lambda: llm.generate("Once", SamplingParams(max_tokens=1)) and False)


@pytest.mark.parametrize("place", ["forward", "order"])
def test_a_program_or_host_that_hangs_on_one_rank_is_named_by_the_watchdog(faulty, capfd, place):
    faulty(f"hang at {place}")
    stalled = r"^no step completed for .* s .*; rank 1 is behind: took \d+ of \d+ orders, .* waits in none$"
    options = {"enforce_eager": True, "watchdog_seconds": 1.0, "max_num_batched_tokens": 64}
    with pytest.raises(StalledError, match=stalled), engine(**options) as llm:
        llm.generate("Once", LONG)
    log = capfd.readouterr().err
    assert re.search(r"rank 0: began \d+ sums, waits for \d", log)
    assert "the last orders:" in log and "ForwardKey" in log


def test_a_rank_ends_with_its_leader(tmp_path):
    script = tmp_path / "leader.py"
    script.write_text(
        "import time\nfrom gapless import LLM\n"
        "llm = LLM('demo', tensor_parallel_size=2, enforce_eager=True)\nprint('ready', flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True) as leader:
        assert leader.stdout.readline() == "ready\n"
        ranks = [pid for pid in running() if parent_of(pid) == leader.pid]
        leader.kill()
    assert len(ranks) == 1
    until(lambda: not set(ranks) & running(), 20)


def running() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdecimal() and state_of(int(name))[0] not in "ZX"}


def parent_of(pid: int) -> int:
    return int(state_of(pid)[1])


def state_of(pid: int) -> list[str]:
    """The state of a process, and its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return ["X", "0"]
