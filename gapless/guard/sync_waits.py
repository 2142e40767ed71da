"""The half of no_sync for functions that wait: events, streams, the device, collectives, graph capture.

They are wrapped for as long as a region is open, by the rows of the machine's kind of accelerator. Some kinds have
torch's sync debug mode too, which is process-wide and either warns or raises on every thread. It is set to warn
meanwhile, and a hook on the warning turns it into a finding of the thread that synchronised, if that one is checked.
"""

from __future__ import annotations

import gc
import re
import time
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from .backends import GENERIC, DeviceKind, Wait, backend
from .patches import Patches, SharedPatches
from .present import accelerator, allocator_stats, definer, module_of, owner_of
from .sync_ops import indexes_by_list
from .sync_rules import COLLECTIVES
from .watch import ThreadState, current, make_finding

TORCH_WARNING = r"called a synchronizing \w+ operation"
POLLS_ALLOWED = 50
"""The queries of events from one line, in one region, that do not yet count as a polling loop."""


def install(watch: ThreadState) -> None:
    """Install what one thread needs while it is checked: no more than is here to wait for."""
    watch.kinds = kinds_here()
    if watch.kinds:
        watch.modes.enter_context(_shared.held())
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        watch.modes.enter_context(_collectives.held())
    collector = _collector(watch)
    gc.callbacks.append(collector)
    watch.modes.callback(gc.callbacks.remove, collector)


def entered(watch: ThreadState) -> None:
    """Note that a region has begun on this thread."""
    if any(row.warns for row in watch.kinds):
        _hook_warnings()
    watch.grown.append(_allocations(watch.kinds))


def leaving(watch: ThreadState, quietly: bool) -> None:
    """Report what shows only at the end of a region; `quietly`, without raising, when an exception is under way."""
    before, now = watch.grown.pop(), _allocations(watch.kinds)
    late, watch.late = watch.late, []
    if now != before and not watch.scopes[-1].may_grow:
        text = f"{now[0] - before[0]} device and {now[1] - before[1]} pinned allocations or frees"
        late.append(make_finding("allocator-growth", "within this region", text))
    for finding in late:
        watch.deliver(finding, quietly)


def kinds_here() -> list[DeviceKind]:
    """Return the rows of the accelerators that are here: torch's own, and CUDA, emulated or real."""
    found = {"cuda"} if torch.cuda.is_available() else set()
    return [backend(kind) for kind in sorted(found | {accelerator()} - {""})]


def _allocations(kinds: Iterable[DeviceKind]) -> tuple[int, int]:
    """Count the calls of the driver by the caching allocators so far: for device memory, for pinned memory."""
    device = host = 0
    for row in kinds:
        stats, pinned = allocator_stats(row, "memory_stats"), allocator_stats(row, "host_memory_stats")
        device += stats.get("num_device_alloc", 0) + stats.get("num_device_free", 0)
        host += pinned.get("num_host_alloc", 0) + pinned.get("num_host_free", 0)
    return device, host


def _install_kinds(stack: Patches) -> None:
    rows = kinds_here()
    stack.enter_context(warnings.catch_warnings())
    for row in rows:
        if row.warns:
            _warn_of_waits(stack, module_of(row))
    waits = [wait for row in rows for wait in row.all_waits()]
    _report_waits(stack, (*waits, *GENERIC))


def _warn_of_waits(stack: Patches, module: Any) -> None:
    # Taken now: a thread that outlives the run would find the real one of a machine without CUDA.
    before, set_mode = module.get_sync_debug_mode(), module.set_sync_debug_mode
    with warnings.catch_warnings():
        # Torch warns once that the mode is a prototype.
        warnings.simplefilter("ignore")
        set_mode("warn")
    stack.callback(set_mode, before)


_shared = SharedPatches(_install_kinds)
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
        if not re.search(TORCH_WARNING, str(message)):
            self._before(message, *args, **kwargs)
            return
        watch = current()
        if watch is not None and not (watch.call and watch.reported):
            watch.flag("index-by-host" if indexes_by_list(watch.call) else "device-sync")


def _report_waits(patches: Patches, waits: Iterable[Wait]) -> None:
    """Have each of these functions report its rule when a checked thread calls it. What is not here is left out."""
    done: set[tuple[int, str]] = set()
    for path, name, rule in waits:
        owner = definer(owner_of(path), name)
        if owner is not None and (id(owner), name) not in done:
            done.add((id(owner), name))
            patches.wrap(owner, name, partial(_reported, rule, f"{path}.{name}"))


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
