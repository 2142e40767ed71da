"""no_sync(): inside it, everything that would make the host wait for the device raises, or is recorded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import callbacks, marks, operators, sync_waits
from .backends import backend
from .patches import holding
from .present import accelerator
from .sync_calls import SyncCalls, know_methods
from .sync_ops import SyncOps
from .watch import Mode, Scope, ThreadState, begin_allowance, current, local

F = TypeVar("F", bound=Callable[..., Any])

SLOW_MS = 1.0
"""A call that takes this long has done more than enqueue. By default it is checked on an accelerator alone."""


class Region(Scope, ContextDecorator):
    """A checked region; use it by `with`, or as a decorator. It may be entered again, and on several threads at once.

    `report` holds the findings of all of its uses.
    """

    def __enter__(self) -> Region:
        watch = current()
        if watch is None:
            watch = ThreadState()
            know_methods(accelerator())
            sync_waits.install(watch)
            ops = watch.modes.enter_context(SyncOps(watch))
            watch.modes.enter_context(callbacks.watched())
            watch.ops = ops
            watch.calls = watch.modes.enter_context(SyncCalls(watch, ops))
            watch.modes.enter_context(operators.registrations.held())
            local.watch = watch
        watch.scopes.append(self)
        watch.settle()
        sync_waits.entered(watch)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        watch = current()
        assert watch is not None and watch.scopes[-1] is self, "regions of one thread must be nested"
        try:
            sync_waits.leaving(watch, quietly=error is not None)
        finally:
            watch.scopes.pop()
            watch.settle()
            if not watch.scopes:
                local.watch = None
                watch.modes.close()

    def __call__(self, function: F) -> F:
        if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
            raise TypeError(
                "no_sync() cannot decorate a generator or coroutine: use `with` around its synchronous parts"
            )
        return super().__call__(function)


def no_sync(
    *,
    device_tensors: Any = (),
    pinned: Any = (),
    mode: Mode = "raise",
    slow_ms: float | None = None,
) -> Region:
    """A region in which nothing may make the host wait for the device.

    Tensors on a real accelerator count as device tensors by themselves. Without one, `device_tensors` names those that
    stand for them: tensors, modules or containers of them, or a function from a tensor to bool. What is computed from
    device tensors is a device tensor. `pinned` names host tensors that stand for pinned memory.

    `mode` "raise" raises SyncError at the first finding, before the wait where that can be known; "record" only fills
    the region's `report`. A call that takes longer than `slow_ms` is a finding too: 1 ms by default on an accelerator,
    not checked elsewhere; 0 turns it off.

    The region belongs to the thread that enters it. Raises ValueError for an unknown mode.

    Example:
        with no_sync(device_tensors=[model, x]) as region:
            y = model(x)
        print(region.report.text())
    """
    if mode not in ("raise", "record"):
        raise ValueError(f'mode must be "raise" or "record", got {mode!r}')
    predicate = None
    if callable(device_tensors) and not isinstance(device_tensors, (Tensor, torch.nn.Module, Iterable)):
        predicate = device_tensors
    else:
        marks.device_tensor(device_tensors)
    marks.pinned_tensor(pinned)
    if slow_ms is None:
        slow_ms = SLOW_MS if marks.has_accelerator() and backend(accelerator()).times else 0.0
    return Region(predicate, mode, round(slow_ms * 1e6))


def emulating() -> Region:
    """A region that reports nothing: without an accelerator, its tensors are emulated on the CPU inside."""
    return Region(None, "record", 0, reports=False)


def listening() -> AbstractContextManager[None]:
    """Report findings inside, also when a caller further out has silenced this thread's reports."""
    watch = current()
    assert watch is not None, "listening() is for the inside of a region"
    return holding(watch, quiet=0)


@contextmanager
def allow(reason: str) -> Iterator[None]:
    """Allow the host to wait inside, in a region, for the given reason. Findings are counted and do not raise.

    Outside of any region it does nothing. Raises ValueError without a reason.
    """
    if not reason.strip():
        raise ValueError("allow() needs a reason: say why the host may wait here")
    allowance = begin_allowance(reason)
    try:
        yield
    finally:
        # By the section itself: a generator may be closed in another context than the one that it was opened in.
        allowance.watch = None
