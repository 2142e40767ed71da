"""The engine in a real child process running the test double: life, death and what is left behind."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest

from gapless.base import progress
from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError, EngineDeadError, EngineError, RequestError
from gapless.base.params import SamplingParams
from gapless.base.records import Flag, Request
from gapless.engine import child, life, messages, process_backend, wire
from gapless.engine.process_backend import ProcessBackend
from gapless.testing.core import FakeCore, next_token

ROOT = Path(__file__).resolve().parents[2]
CONFIG = EngineConfig()
VOCAB = 100
FAKE = ("gapless.testing.worker", str(VOCAB))
pytestmark = pytest.mark.process


class Recorder:
    """A Sink that keeps everything, and wakes the task that waits for something to be true."""

    def __init__(self):
        self.tokens_of = {}
        self.flags_of = {}
        self.began = []
        self.refusals = {}
        self.deaths = []
        self.deliveries = []
        self._news = asyncio.Event()

    def started(self, key, cached):
        self.began.append(key)
        self._news.set()

    def tokens(self, *steps):
        self.deliveries.append(len(steps))
        for item in steps:
            self._note(item)
        self._news.set()

    def _note(self, item):
        for key, token, flag in item.entries():
            self.tokens_of.setdefault(key, []).append(token)
            self.flags_of[key] = flag

    def refused(self, key, error):
        self.refusals[key] = error
        self._news.set()

    def died(self, error, *_):
        self.deaths.append(error)
        self._news.set()

    broke = died

    def came_up(self):
        """Its requests are submitted by hand."""

    async def until(self, truth, seconds=60.0):
        async with asyncio.timeout(seconds):
            while not truth():
                self._news.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._news.wait(), 0.05)


def request(key, length=5, tokens=(3, 4), max_len=None):
    prompt = np.array(tokens, np.int32)
    return Request(key, prompt, SamplingParams(), 0, (), 0, max_len or len(tokens) + length)


@contextlib.asynccontextmanager
async def running(pace=0.0, fail_at=(), **options):
    sink = Recorder()
    backend = ProcessBackend(CONFIG, worker=(*FAKE, str(pace), *map(str, fail_at)), **options)
    await backend.start(sink)
    try:
        yield backend, sink
    finally:
        await backend.close()


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


async def test_tokens_come_back_as_the_core_made_them():
    async with running() as (backend, sink):
        assert backend.ready()
        assert backend.info.vocab_size == VOCAB
        asked = [request(key, length=4 + key, tokens=range(key)) for key in range(1, 9)]
        for item in asked:
            backend.submit(item)
        await sink.until(lambda: len(sink.flags_of) == 8 and set(sink.flags_of.values()) == {Flag.LENGTH})
        for item in asked:
            expected = [next_token(item, count, VOCAB) for count in range(4 + item.key)]
            assert sink.tokens_of[item.key] == expected
        assert sorted(sink.began) == list(range(1, 9))
        await sink.until(lambda: backend.stats().steps.generation_tokens == sum(4 + key for key in range(1, 9)))
        await sink.until(lambda: backend.stats().queue.running == 0)


def sockets_left_to_children(pid: int) -> list[str]:
    """The sockets of a process that those it starts would have too, by their numbers."""
    folder = Path(f"/proc/{pid}")
    sockets = [fd.name for fd in (folder / "fd").iterdir() if "socket" in os.readlink(fd)]
    assert sockets
    flags = {fd: int(re.search(r"flags:\s+(\d+)", (folder / "fdinfo" / fd).read_text())[1], 8) for fd in sockets}
    return [fd for fd, flag in flags.items() if not flag & os.O_CLOEXEC]


async def test_close_leaves_no_process_and_no_file(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    async with running() as (backend, sink):
        pid = backend.pid
        assert tempfile.gettempdir() == str(tmp_path) and not list(tmp_path.iterdir())
        assert sockets_left_to_children(pid) == []
    assert not alive(pid)
    assert not backend.ready()
    backend.submit(request(1))
    await sink.until(lambda: type(sink.refusals.get(1)) is EngineDeadError)


async def test_kill_nine_ends_everything_and_the_engine_comes_back():
    async with running(pace=0.01) as (backend, sink):
        for key in range(1, 17):
            backend.submit(request(key, length=1000))
        await sink.until(lambda: len(sink.tokens_of) == 16 and backend.stats().steps.generation_tokens > 0)
        counted, pid = backend.stats().steps.generation_tokens, backend.pid
        os.kill(pid, signal.SIGKILL)
        await sink.until(lambda: sink.deaths)
        (error,) = sink.deaths
        assert type(error) is EngineDeadError
        assert "SIGKILL" in str(error)
        assert not backend.ready()
        assert backend.stats().queue.running == 0
        backend.submit(request(50))
        await sink.until(lambda: type(sink.refusals.get(50)) is EngineDeadError)
        await sink.until(backend.ready)
        assert backend.pid != pid
        backend.submit(request(99))
        await sink.until(lambda: sink.flags_of.get(99) == Flag.LENGTH)
        await sink.until(lambda: backend.stats().steps.generation_tokens >= counted + 5)
        assert len(sink.deaths) == 1


async def test_an_engine_serves_whose_parent_has_more_descriptors_than_select_takes():
    with contextlib.ExitStack() as stack:
        for _ in range(1100):
            stack.callback(os.close, os.open("/dev/null", os.O_RDONLY))
        async with running() as (backend, sink):
            backend.submit(request(1))
            await sink.until(lambda: sink.flags_of.get(1) == Flag.LENGTH or sink.deaths)
            assert not sink.deaths


async def test_a_failed_step_ends_the_engine_in_its_own_words(caplog):
    async with running(fail_at=(5,)) as (backend, sink):
        backend.submit(request(1, length=100))
        await sink.until(lambda: sink.deaths)
        assert str(sink.deaths[0]) == "the engine died: step 5 failed on purpose"
        assert len(sink.tokens_of[1]) == 4  # what was sent before is not lost
        await sink.until(backend.ready)
    lines = [entry.message for entry in caplog.records if entry.name == "gapless.engine.process"]
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].endswith("DeviceError: step 5 failed on purpose")


STUCK = """
import time
from gapless.engine import life
life.WATCHDOG_GRACE_SECONDS = 0.1
pulse = life.Pulse(life.Control())
pulse.arm(0.1)
pulse.turn_began = time.monotonic()
print("not on the control pipe", flush=True)
time.sleep(90)
"""


def test_a_turn_that_never_comes_back_ends_the_process():
    done = subprocess.run([sys.executable, "-c", STUCK], cwd=ROOT, capture_output=True, timeout=60, check=False)
    assert done.returncode == life.EXIT_STALLED
    *beats, last = done.stdout.split(b"\n")[:-1]
    assert beats and not any(beats)
    assert msgspec.json.decode(last, type=messages.Died).kind == "StalledError"
    assert b"not on the control pipe" in done.stderr and b"most recent call first" in done.stderr


async def test_a_stopped_process_is_noticed(monkeypatch):
    monkeypatch.setattr("gapless.engine.child.SILENCE_SECONDS", 1.5)
    async with running() as (backend, sink):
        os.kill(backend.pid, signal.SIGSTOP)
        await sink.until(lambda: sink.deaths)
        assert "no sign of life" in str(sink.deaths[0])


async def test_signals_for_the_group_do_not_reach_the_child():
    async with running() as (backend, sink):
        os.kill(backend.pid, signal.SIGTERM)
        os.kill(backend.pid, signal.SIGINT)
        backend.submit(request(1))
        await sink.until(lambda: sink.flags_of.get(1) == Flag.LENGTH)
        assert not sink.deaths


async def test_three_crashes_are_enough(monkeypatch):
    monkeypatch.setattr(process_backend, "MAX_BACKOFF", 0.05)
    given_up = []
    async with running(on_give_up=given_up.append) as (backend, sink):
        for crash in range(1, 4):
            await sink.until(backend.ready)
            os.kill(backend.pid, signal.SIGKILL)
            await sink.until(lambda crash=crash: len(sink.deaths) >= crash)
        await sink.until(lambda: given_up)
        assert not backend.ready()
        await sink.until(lambda: backend.pid is None)
        assert "SIGKILL" in str(given_up[0])


async def test_a_process_that_cannot_load_the_weights_of_the_one_before_it_serves_nothing(monkeypatch):
    monkeypatch.setattr(process_backend, "MAX_BACKOFF", 0.05)
    given_up = []
    async with running(on_give_up=given_up.append) as (backend, sink):
        backend.weights = "weights that are gone"
        os.kill(backend.pid, signal.SIGKILL)
        await sink.until(lambda: sink.deaths)
        while not given_up:
            assert not backend.ready(), "it has other weights than the one before it"
            await asyncio.sleep(0.005)
        assert "the weights in use cannot be loaded again: this core has no weights" in str(given_up[0])


async def test_weights_are_in_use_when_the_core_says_so_whether_their_caller_waits_or_not():
    backend = ProcessBackend(CONFIG)
    backend.info = FakeCore(VOCAB).info
    backend.sink = Recorder()
    for number, refusal, known in ((1, RequestError("no", "model_path"), None), (2, None, "weights 2")):
        asking = asyncio.create_task(backend.ask(partial(messages.UpdateWeights, path=f"weights {number}")))
        await asyncio.sleep(0)
        asking.cancel()
        backend.receive([messages.Changed(number, (), refusal)])
        assert backend.weights == known
    backend.receive([messages.Changed(3, (), None)])
    assert backend.weights == "weights 2", "that was a change of adapters"


async def test_a_start_that_fails_says_why_in_its_own_words(tmp_path):
    backend = ProcessBackend(EngineConfig(model=str(tmp_path / "nowhere"), device="cpu"))
    with pytest.raises(ConfigError, match="nowhere"):
        await backend.start(Recorder())
    assert not backend.ready()
    await backend.close()


async def test_a_process_that_cannot_even_boot_is_reported_by_its_exit(monkeypatch):
    monkeypatch.setenv("PYTHONHOME", "/nonexistent")
    backend = ProcessBackend(CONFIG, worker=(*FAKE, "0"))
    with pytest.raises(EngineError, match="exited with code 1"):
        await backend.start(Recorder())
    await backend.close()


async def test_a_phase_that_comes_after_the_start_is_not_shown(monkeypatch):
    shown = []
    monkeypatch.setattr(progress, "show", shown.append)
    engine = child.Child(print)
    engine.take_control(messages.Doing(progress.Phase("early", 1, 2)))
    engine.watch_silence()
    engine.take_control(messages.Doing(progress.Phase("late")))
    await engine.close()
    assert shown == [progress.Phase("early", 1, 2)]


async def test_giving_up_on_a_start_leaves_no_process():
    backend = ProcessBackend(CONFIG, worker=(*FAKE, "0"))
    task = asyncio.create_task(backend.start(Recorder()))
    while backend.pid is None:
        await asyncio.sleep(0.01)
    pid = backend.pid
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not alive(pid)
    await backend.close()


async def test_a_message_outside_the_protocol_drops_the_peer(monkeypatch):
    async with running() as (backend, sink):
        monkeypatch.setattr(process_backend.m, "decode_from_core", lambda frame: (_ for _ in ()).throw(ValueError("x")))
        backend.submit(request(1))
        await sink.until(lambda: sink.deaths)
        monkeypatch.undo()
        assert "breaks the protocol" in str(sink.deaths[0])


async def test_more_than_a_frame_holds_goes_out_in_several(monkeypatch):
    monkeypatch.setattr(child, "MAX_TOGETHER", 3)
    async with running() as (backend, sink):
        for key in range(1, 21):
            backend.submit(request(key))
        await sink.until(lambda: len(sink.flags_of) == 20 and set(sink.flags_of.values()) == {Flag.LENGTH})
        assert not sink.refusals and sink.began == sorted(sink.began)


async def test_a_frame_without_bound_drops_the_peer(monkeypatch):
    async with running() as (_, sink):
        monkeypatch.setattr(wire, "MAX_FRAME_BYTES", 8)  # its next report of numbers is longer
        await sink.until(lambda: sink.deaths)
        monkeypatch.undo()
        assert "broke the protocol: a frame of" in str(sink.deaths[0])


async def test_steps_that_waited_are_delivered_together():
    async with running(pace=0.005) as (backend, sink):
        item = request(1, length=1000)
        backend.submit(item)
        while max(sink.deliveries, default=0) <= 5:
            assert not sink.refusals and sink.flags_of.get(1, Flag.LIVE) == Flag.LIVE
            time.sleep(0.2)  # noqa: ASYNC251 (the front is busy with something else)
            await asyncio.sleep(0.001)
        count = sum(sink.deliveries)
        assert sink.tokens_of[1] == [next_token(item, place, VOCAB) for place in range(count)]


async def test_a_fault_in_delivering_ends_every_request(monkeypatch, caplog):
    async with running() as (backend, sink):
        monkeypatch.setattr(sink, "tokens", lambda *steps: 1 // 0)
        backend.submit(request(1))
        await sink.until(lambda: sink.deaths)
        assert "ZeroDivisionError" in str(sink.deaths[0])
        assert "could not be delivered" in caplog.text
        monkeypatch.undo()


ORPHAN = """
import asyncio, sys
from gapless.base.config import EngineConfig
from gapless.engine.process_backend import ProcessBackend
class Sink:
    started = tokens = refused = died = broke = came_up = lambda *a: None
async def main():
    backend = ProcessBackend(EngineConfig(), worker=("gapless.testing.worker", "100", "0"))
    if sys.argv[1] == "ready":
        await backend.start(Sink())
    else:
        task = asyncio.create_task(backend.start(Sink()))
        while backend.pid is None:
            await asyncio.sleep(0.005)
    print(backend.pid, flush=True)
    await asyncio.sleep(120)
asyncio.run(main())
"""


@pytest.mark.parametrize("when", ["ready", "booting"])
def test_the_child_follows_its_parent(when):
    parent = subprocess.Popen(
        [sys.executable, "-c", ORPHAN, when], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with parent:
        pid = int(parent.stdout.readline())
        assert alive(pid)
        parent.kill()
    end = time.monotonic() + 60
    while alive(pid):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_child_whose_socket_hangs_up_ends():
    """A parent that dies ends stdin and the socket, and the child may see either first."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", FAKE[0], str(theirs.fileno()), FAKE[1], "0"]
    options = {"cwd": ROOT, "stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "pass_fds": (theirs.fileno(),)}
    with theirs, subprocess.Popen(command, **options) as process:
        theirs.close()
        process.stdin.write(msgspec.json.encode(CONFIG) + b"\n")
        process.stdin.flush()
        assert ours.recv(1), "it is ready"
        ours.close()
        assert process.wait(60) == 0
