"""The CUDA half of no_sync: torch's sync debug mode for one thread at a time, and hooks for what that misses.

Torch's debug mode is process-wide and either warns or raises on every thread. Here it is set to warn while any region
is open, and a hook on the warning turns it into a finding of the thread that synchronised, if that one is checked.
Waits for events, streams and the device, collectives and graph capture are wrapped for as long as a region is open.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from .patches import Patches, SharedPatches
from .sync_rules import COLLECTIVES, CUDA_WAITS
from .watch import ThreadState, current, make_finding

_cuda: Any = torch.cuda

TORCH_WARNING = "called a synchronizing CUDA operation"
POLLS_ALLOWED = 50
"""The queries of events from one line, in one region, that do not yet count as a polling loop."""


def install(watch: ThreadState) -> None:
    """Install what one thread needs while it is checked: nothing without CUDA, process groups and a time limit."""
    if torch.cuda.is_available():
        watch.modes.enter_context(_shared.held())
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        watch.modes.enter_context(_collectives.held())
    collector = _collector(watch)
    gc.callbacks.append(collector)
    watch.modes.callback(gc.callbacks.remove, collector)


def entered(watch: ThreadState) -> None:
    """Note that a region has begun on this thread."""
    if torch.cuda.is_available():
        _hook_warnings()
    watch.grown.append(_allocations())


def leaving(watch: ThreadState, quietly: bool) -> None:
    """Report what shows only at the end of a region; `quietly`, without raising, when an exception is under way."""
    before, now = watch.grown.pop(), _allocations()
    late, watch.late = watch.late, []
    if now != before:
        text = f"{now[0] - before[0]} device and {now[1] - before[1]} pinned allocations or frees"
        late.append(make_finding("allocator-growth", "within this region", text))
    for finding in late:
        watch.deliver(finding, quietly)


def _allocations() -> tuple[int, int]:
    """Count the calls of the driver by the caching allocators so far: for device memory, for pinned memory."""
    if not (_cuda.is_initialized() and torch.cuda.is_available()):
        return 0, 0
    device, host = _cuda.memory_stats(), _cuda.host_memory_stats()
    return (
        device.get("num_device_alloc", 0) + device.get("num_device_free", 0),
        host.get("num_host_alloc", 0) + host.get("num_host_free", 0),
    )


def _install_cuda(stack: Patches) -> None:
    stack.enter_context(warnings.catch_warnings())
    # Taken now: a thread that outlives the run would find the real one of a machine without CUDA.
    before, set_mode = _cuda.get_sync_debug_mode(), _cuda.set_sync_debug_mode
    with warnings.catch_warnings():
        # Torch warns once that the mode is a prototype.
        warnings.simplefilter("ignore")
        set_mode("warn")
    stack.callback(set_mode, before)
    _report_waits(stack, CUDA_WAITS)


_shared = SharedPatches(_install_cuda)
_collectives = SharedPatches(lambda patches: _report_waits(patches, COLLECTIVES))


def _hook_warnings() -> None:
    """Put the warning hook in front, again at each region: test runners and libraries reset warning filters."""
    with _shared.lock:
        warnings.filterwarnings("always", message=TORCH_WARNING)
        if not isinstance(warnings.showwarning, _Show):
            warnings.showwarning = _Show(warnings.showwarning)


class _Show:
    """Replaces warnings.showwarning: torch's sync warnings end here, all others are shown as before."""

    def __init__(self, before: Callable[..., None]) -> None:
        self._before = before

    def __call__(self, message: Any, *args: Any, **kwargs: Any) -> None:
        if TORCH_WARNING not in str(message):
            self._before(message, *args, **kwargs)
            return
        watch = current()
        if watch is not None and not (watch.call and watch.reported):
            watch.flag("device-sync")


def owner_of(path: str) -> Any:
    """The torch module or class of this name, as it is now."""
    return attrgetter(path.removeprefix("torch."))(torch)


def _report_waits(patches: Patches, waits: Iterable[tuple[str, str, str]]) -> None:
    """Have each of these functions, by module or class and name, report its rule when a checked thread calls it."""
    for path, name, rule in waits:
        if hasattr(owner_of(path), name):
            patches.wrap(owner_of(path), name, partial(_reported, rule, f"{path}.{name}"))


def _reported(rule: str, what: str, original: Any, *args: Any, **kwargs: Any) -> Any:
    watch = current()
    if watch is None:
        return original(*args, **kwargs)
    if rule != "event-poll" or watch.polled(POLLS_ALLOWED):
        watch.flag(rule, what)
    with watch.silence():
        return original(*args, **kwargs)


def _collector(watch: ThreadState) -> Callable[[str, dict[str, int]], None]:
    """Return a callback that finds long garbage collections of this thread. It may not raise: it reports at the end."""
    started = 0

    def seen(phase: str, info: dict[str, int]) -> None:
        nonlocal started
        slow = watch.slow_ns
        if not slow or current() is not watch:
            return
        if phase == "start":
            started = time.perf_counter_ns()
        elif started and (took := time.perf_counter_ns() - started) > slow:
            text = f"generation {info['generation']} took {took / 1e6:.1f} ms"
            watch.late.append(make_finding("gc-pause", "gc", text))

    return seen
