"""guarded(): every step of every engine of this process under no_sync, with an empty allow list.

    with guarded():
        llm.generate(prompts)

Two halves of a step are watched: the host's (plan, pack, enqueue) and the device's (its programs). The device's half of
a captured step is checked during its recording, that of another step at the first program with such a key: a program
depends on the key alone, since to depend on a value it would have to read one. Sizes count as alike up to the next
power of two, as for kernels. Tables, KV, weights and buffers are device tensors, slots of rings are pinned memory.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from torch import Tensor
from torch._C import DisableTorchFunction
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from gapless import guard
from gapless.base import observe
from gapless.base.observe import Program
from gapless.device.record import Tape
from gapless.guard import watch
from gapless.guard.race_device import Scheduled
from gapless.guard.race_mode import RaceMode
from gapless.guard.report import SyncReport
from gapless.guard.sync import listening
from gapless.guard.sync_ops import SyncOps
from gapless.step.executor import Executor


class StepGuard:
    """Findings on the launch paths. Implements `observe.LaunchWatcher`."""

    def __init__(self) -> None:
        # A call takes as long as it takes on a busy machine, so `slow_ms` is off; nothing else is.
        self.region = guard.no_sync(slow_ms=0)
        self.launched = 0
        """How often the host's half was run."""
        self._resting = False

    def trouble(self) -> list[str]:
        """Return all findings since the last call, as text. An excused one is among them: the allow list is empty."""
        report, self.region.report = self.region.report, SyncReport()
        return [entry.finding.text() for entry in report.entries()]

    @contextmanager
    def rest(self) -> Iterator[None]:
        """Check no step meanwhile, and no capture: a step takes twice as long under no_sync."""
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

    def launches(self, launcher: Any) -> AbstractContextManager[object]:
        if self._resting:
            return nullcontext()
        self.launched += 1
        executor = launcher if isinstance(launcher, Executor) else getattr(launcher, "executor", None)
        if executor is not None:  # a stand-in may have no device memory
            _mark(executor)
        return self.checked()

    def runs(self, executor: Executor, key: Any, program: Program) -> Program:
        kind = None if key is None else _kind(key)

        @functools.wraps(program)
        def run(*args: Any) -> None:
            if self._resting:
                return program(*args)
            known = vars(executor).setdefault("checked", set())
            if kind in known and _watched_by_guards():
                return _unseen(program, *args)
            _mark(executor)
            with self.checked():
                program(*args)
            if kind is not None:
                known.add(kind)

        return run

    def moves(self, program: Program) -> AbstractContextManager[object]:
        here = watch.current()
        if here is None or self._resting:  # then the checker that is here is another
            return nullcontext()
        started = program.program if isinstance(program, Scheduled) else program
        return _silent(here, isinstance(getattr(started, "__self__", None), Tape))


@contextmanager
def guarded(guard: StepGuard | None = None) -> Iterator[StepGuard]:
    """Check every step inside, on any thread; a finding raises in the program or in the loop's turn."""
    checked = guard or StepGuard()
    before = observe.watch_steps(checked)
    try:
        yield checked
    finally:
        observe.watch_steps(before)


def tensors_of(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Yield every tensor that an object of ours holds, however deep."""
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


@contextmanager
def left(innermost: TorchDispatchMode) -> Iterator[None]:
    """Leave a mode that was entered last."""
    innermost.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        innermost.__enter__()  # type: ignore[no-untyped-call]


def _kind(key: Any) -> Any:
    """Return the key with its sizes rounded up to powers of two."""
    if not isinstance(key, tuple):
        return key if isinstance(key, bool) or not isinstance(key, int) or key < 2 else 1 << (key - 1).bit_length()
    parts = map(_kind, key)
    return type(key), (tuple(parts) if hasattr(key, "_fields") else frozenset(parts))


def _watched_by_guards() -> bool:
    """Return whether no other mode, such as a recorder's, sees this thread's operators."""
    return all(isinstance(mode, (SyncOps, RaceMode)) for mode in _get_current_dispatch_mode_stack())


def _unseen(program: Callable[..., None], *args: Any) -> None:
    """Run a program that this thread's region does not see; no_race and any other mode still do."""
    with _region_left():
        program(*args)


@contextmanager
def _silent(here: watch.ThreadState, replays: bool) -> Iterator[None]:
    """A region that is the host's does not see what a simulated device runs; a program's own region does."""
    with here.silence(), _region_left() if replays else nullcontext():
        yield


@contextmanager
def _region_left() -> Iterator[None]:
    modes = _get_current_dispatch_mode_stack()
    # A mode of the region may have no_race in it.
    if not modes or not isinstance(modes[-1], SyncOps) or modes[-1].around:
        yield
        return
    with DisableTorchFunction(), left(modes[-1]):
        yield


def _mark(executor: Executor) -> None:
    """Note which tensors are the device's, and which are pinned. Tests give executors other buffers."""
    has = executor.program, executor.buffers, executor.packets, executor.outboxes
    known = vars(executor).get("marked")
    if known is not None and all(map(operator.is_, known, has)):
        return
    vars(executor)["marked"] = has
    guard.device_tensor([*tensors_of(executor.program), *tensors_of(executor.buffers)])
    guard.pinned_tensor([ring.slots[0].tensor for ring in (executor.packets, executor.outboxes)])
