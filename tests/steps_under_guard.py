"""Puts the launch path of every engine under no_sync, with an empty allow list. tests/conftest.py does it for all.

Two halves: the host's (`Loop.plan` and `Loop.launch`: plan, pack, enqueue) and the device's (the programs that it
enqueues: packet in, step, tokens out). Of a captured step, the device's half is checked when it is recorded, of
another the first time that its engine runs a program with such a key: what a program asks for depends on the key
alone, since to depend on a value it would have to read one. Sizes count as alike up to the next power of two, at which
kernels change. The tables, the KV cache, the weights and the device's own buffers are device tensors, the slots of the
rings are pinned memory.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor
from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from gapless import guard
from gapless.base import observe
from gapless.device.record import Tape
from gapless.guard import watch
from gapless.guard.patches import Patches
from gapless.guard.race_device import Scheduled
from gapless.guard.race_mode import RaceMode
from gapless.guard.report import SyncReport
from gapless.guard.sync import listening
from gapless.guard.sync_ops import SyncOps
from gapless.loop.loop import Loop
from gapless.step.executor import Executor
from gapless.step.leader import Leader
from gapless.step.program import Buffers, StepProgram
from gapless.testing.sim import SimDevice

PROGRAMS = ("forward", "mask", "adjust", "cut", "sample", "reply", "score")
PLAIN = {
    place: getattr(*place)
    for place in (
        (Loop, "plan"), (Loop, "launch"), (Leader, "decide"), (Executor, "launch"), (Executor, "copy_lines"),
        (SimDevice, "call"), *((StepProgram, name) for name in PROGRAMS), (StepProgram, "begin"),
        (StepProgram, "draw"), (Executor, "capture"), (Executor, "compile"),
    )
}  # fmt: skip


class _Known(threading.local):
    """Whether the thread is in a program that was checked before."""

    running = False


class StepGuard:
    """What was found on the launch paths, and how often they were run."""

    def __init__(self) -> None:
        # A call takes as long as it takes on a busy machine, so `slow_ms` is off; nothing else is.
        self.region = guard.no_sync(slow_ms=0)
        self.steps = 0
        self.unguarded: set[str] = set()
        """Halves of steps that ran outside of the region."""
        self._capturing = 0
        self._resting = False
        self._known = _Known()

    def trouble(self) -> list[str]:
        """All of it since the last call, as text."""
        report, self.region.report = self.region.report, SyncReport()
        missed, self.unguarded = sorted(self.unguarded), set()
        # An excuse is trouble too: the allow list is empty.
        found = [entry.finding.text() for entry in report.entries()]
        return [*found, *(f"{half} ran without no_sync" for half in missed)]

    def install(self, patches: Patches) -> None:
        """From now on, every engine of this process is checked."""
        around = {
            (Loop, "plan"): self._host_half, (Loop, "launch"): self._host_half, (Leader, "decide"): self._host_seen,
            (Executor, "launch"): self._launched, (Executor, "copy_lines"): self._device_half,
            (StepProgram, "begin"): self._device_seen, (StepProgram, "draw"): self._device_seen,
            (SimDevice, "call"): self._elsewhere, (Executor, "capture"): self._capture,
            (Executor, "compile"): self._capture,
            **{(StepProgram, name): self._program for name in PROGRAMS},
        }  # fmt: skip
        for place, function in around.items():
            patches.put(*place, _wrapped(PLAIN[place], function))

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Check no step meanwhile, and no capture, where others like it are checked: that doubles what they take."""
        before, self._resting = self._resting, True
        check = observe.capture_check
        observe.check_captures(lambda name: nullcontext())
        try:
            yield
        finally:
            self._resting = before
            observe.check_captures(check)

    @contextmanager
    def checked(self) -> Iterator[None]:
        """Enter the region; within one that is silent, its findings are reported all the same."""
        with self.region, listening():
            yield

    def _inside(self) -> bool:
        here = watch.current()
        return here is not None and here.quiet == 0 and self.region in here.scopes

    def _host_half(self, plain: Callable[..., Any], loop: Loop, *args: Any) -> Any:
        if self._resting:
            return plain(loop, *args)
        _mark(loop.launcher)
        with self.checked():
            return plain(loop, *args)

    def _launched(self, plain: Callable[..., Any], executor: Executor, *args: Any) -> Any:
        """An executor that follows has no loop around it."""
        if self._resting or self._inside():
            return plain(executor, *args)
        _mark_executor(executor)
        with self.checked():
            return plain(executor, *args)

    def _device_half(self, plain: Callable[..., Any], executor: Executor, *args: Any) -> Any:
        if self._resting:
            return plain(executor, *args)
        _mark_executor(executor)
        with self.checked():
            return plain(executor, *args)

    def _program(self, plain: Callable[..., Any], program: StepProgram, key: Any, at: Buffers) -> Any:
        """Run one program of a step, launched by the leader's executor or another."""
        if self._capturing or self._resting or self._inside():
            return plain(program, key, at)
        checked = vars(program).setdefault("checked", set())
        if (kind := _kind(key)) in checked and _watched_by_guards():
            return self._again(plain, program, key, at)
        if "executor" not in vars(program):
            guard.device_tensor(list(at))
        _mark_once(program)
        with self.checked():
            result = plain(program, key, at)
        checked.add(kind)
        return result

    def _again(self, plain: Callable[..., Any], *args: Any) -> Any:
        """What was checked when it ran first."""
        self._known.running = True
        try:
            return _unseen(plain, *args)
        finally:
            self._known.running = False

    def _capture(self, plain: Callable[..., Any], *args: Any) -> Any:
        """A capture watches its program itself, and is no step; nor is a compilation, which comes before the first."""
        self._capturing += 1
        try:
            return plain(*args)
        finally:
            self._capturing -= 1

    def _elsewhere(self, plain: Callable[..., Any], device: SimDevice, program: Any, *args: Any) -> Any:
        """SimDevice runs its programs within calls of the host: the host's region does not see them, their own does."""
        here = watch.current()
        if here is None or self._resting:  # then the checker that is here is another
            return plain(device, program, *args)
        with here.silence():
            started = program.program if isinstance(program, Scheduled) else program
            replays = isinstance(getattr(started, "__self__", None), Tape)
            return _unseen(plain, device, program, *args) if replays else plain(device, program, *args)

    def _device_seen(self, plain: Callable[..., Any], *args: Any) -> Any:
        return self._seen("the device's half of a step", plain, *args)

    def _host_seen(self, plain: Callable[..., Any], *args: Any) -> Any:
        self.steps += 1
        return self._seen("the host's half of a step", plain, *args)

    def _seen(self, half: str, plain: Callable[..., Any], *args: Any) -> Any:
        """Something that every step does, even where a test has replaced what is around it."""
        if not (self._capturing or self._resting or self._known.running or self._inside()):
            self.unguarded.add(half)
        return plain(*args)


@contextmanager
def steps_under_no_sync() -> Iterator[StepGuard]:
    """Every launch path inside, on whatever thread, is checked. A finding raises in the program, or the loop's turn."""
    checked = StepGuard()
    with Patches() as patches:
        checked.install(patches)
        yield checked


class InChild(StepGuard):
    """The same in a process that a test started: what it finds is written to files of a folder, for `filed`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._files = 0

    @contextmanager
    def checked(self) -> Iterator[None]:
        try:
            with super().checked():
                yield
        finally:
            if self.steps == 1:
                (self._folder / f"{os.getpid()}.guarded").touch()
            if trouble := self.trouble():
                self._files += 1
                file = self._folder / f"{os.getpid()}-{self._files}"
                file.write_text(f"in process {os.getpid()}, {' '.join(sys.orig_argv)}:\n" + "\n".join(trouble))
                file.rename(file.with_suffix(".found"))


def filed(folder: Path) -> list[str]:
    """What children have found since the last call."""
    files = sorted(folder.glob("*.found"))
    found = [file.read_text() for file in files]
    for file in files:
        file.unlink()
    return found


def plant_a_sync() -> None:
    """Make every step of this process read a value on the host. After `install`: that wraps what was there first."""
    sample = StepProgram.draw

    def asking(*args: Any) -> Any:
        tokens, flags = sample(*args)
        assert int(tokens.max()) >= -1
        return tokens, flags

    StepProgram.draw = asking  # type: ignore[method-assign]


def tensors_of(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor that an object of ours holds, however deep."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    if isinstance(value, functools.partial):
        parts = (*value.args, *value.keywords.values())
    for part in (*parts, *getattr(value, "__dict__", {}).values()):
        yield from tensors_of(part, seen)


def _wrapped(plain: Callable[..., Any], around: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(plain)
    def wrapper(*args: Any) -> Any:
        return around(plain, *args)

    return wrapper


def _kind(key: Any) -> Any:
    """The key with its sizes rounded up to powers of two."""
    if not isinstance(key, tuple):
        return key if isinstance(key, bool) or not isinstance(key, int) or key < 2 else 1 << (key - 1).bit_length()
    parts = map(_kind, key)
    return type(key), (tuple(parts) if hasattr(key, "_fields") else frozenset(parts))


def _watched_by_guards() -> bool:
    """Whether no other mode, such as a recorder's, sees this thread's operators."""
    return all(isinstance(mode, (SyncOps, RaceMode)) for mode in _get_current_dispatch_mode_stack())


def _unseen(plain: Callable[..., Any], *args: Any) -> Any:
    """A call that this thread's region does not see; no_race and any other mode still do."""
    modes = _get_current_dispatch_mode_stack()
    # A mode of the region may have no_race in it.
    if not modes or not isinstance(modes[-1], SyncOps) or modes[-1].around:
        return plain(*args)
    with DisableTorchFunction(), left(modes[-1]):
        return plain(*args)


@contextmanager
def left(innermost: TorchDispatchMode) -> Iterator[None]:
    """Without a mode that was entered last."""
    innermost.__exit__(None, None, None)
    try:
        yield
    finally:
        innermost.__enter__()


def _mark(launcher: Any) -> None:
    """What is the device's, and what is pinned. Tests give launchers other buffers."""
    if hasattr(launcher, "executor"):  # or a stand-in without device memory
        _mark_executor(launcher.executor)


def _mark_executor(executor: Executor) -> None:
    program = executor.program
    has = program, executor.buffers, executor.packets, executor.outboxes
    known = vars(executor).get("marked")
    if known is not None and all(map(operator.is_, known, has)):
        return
    vars(executor)["marked"] = has
    vars(program)["executor"] = True
    _mark_once(program)
    guard.device_tensor(list(tensors_of(executor.buffers)))
    guard.pinned_tensor([ring.slots[0].tensor for ring in (executor.packets, executor.outboxes)])


def _mark_once(program: StepProgram) -> None:
    if "marked" not in vars(program):
        guard.device_tensor(list(tensors_of(program)))
        vars(program)["marked"] = True
