"""Process groups of an emulated CUDA: gloo stands for nccl, and collects what nccl would start together."""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from .patches import Patches
from .watch import current

IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "recv", "recv_anysource", "reduce", "send")
BETWEEN = (
    "allgather", "_allgather_base", "all_gather_single", "allgather_coalesced", "allgather_into_tensor_coalesced",
    "all_gather_single_coalesced", "gather", "scatter", "reduce_scatter", "_reduce_scatter_base",
    "reduce_scatter_single", "reduce_scatter_tensor_coalesced", "reduce_scatter_single_coalesced", "alltoall",
    "alltoall_base", "all_to_all_single",
)  # fmt: skip
"""Methods of process groups that return a work. Their first argument is all of their memory, or the results."""


def install(patches: Patches) -> None:
    """Put what stands for nccl in the place of torch's own."""
    groups = torch.distributed
    if not groups.is_available():
        return
    asked: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
    for owner in (groups, groups.distributed_c10d):
        patches.wrap(owner, "init_process_group", partial(_make_group, asked))
        patches.wrap(owner, "new_group", partial(_make_group, asked))
        patches.wrap(owner, "get_backend", partial(_name, asked, groups.Backend))
        patches.wrap(owner, "get_backend_config", partial(_name, asked, groups.distributed_c10d.BackendConfig))
        patches.put(owner, "is_nccl_available", lambda: True)
    patches.put(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    core: Any = torch._C._distributed_c10d
    patches.put(core.Backend, "supports_coalescing", True)
    started: dict[str, list[Any]] = {}
    on_device: weakref.WeakSet[Any] = weakref.WeakSet()
    lazy: weakref.WeakSet[Any] = weakref.WeakSet()
    patches.put(core.ProcessGroup, "_start_coalescing", lambda group, device: _begin(started, group))
    patches.put(core.ProcessGroup, "_end_coalescing", lambda group, device=None: _end(started, group))
    for name in (*IN_PLACE, *BETWEEN):
        if hasattr(core.ProcessGroup, name):
            kept = lazy if "reduce_scatter" in name else None
            patches.wrap(core.ProcessGroup, name, partial(_collected, started, kept))
    for name in ("wait", "synchronize"):
        patches.wrap(core.Work, name, _unseen)
    patches.wrap(core.Work, "is_completed", partial(_asked, lazy))
    for name in ("__init__", "_rebuild_buckets"):
        patches.wrap(core.Reducer, name, partial(_with_buckets, on_device))


def _make_group(asked: weakref.WeakKeyDictionary[Any, str], original: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the makers of process groups: tensors of the device are on the CPU, so gloo takes them."""
    given = inspect.signature(original).bind(*args, **kwargs)
    name = given.arguments.get("backend")
    device = given.arguments.pop("device_id", None)
    if name is None and original.__name__ == "init_process_group":
        name = "undefined" if device is None else "nccl"
    given.arguments["backend"] = _backend(name)
    made = original(*given.args, **given.kwargs)
    group = torch.distributed.group.WORLD if made is None else made
    if name is not None and isinstance(group, torch.distributed.ProcessGroup):
        asked[group] = name
    return made


def _name(
    asked: weakref.WeakKeyDictionary[Any, str], kind: Callable[[Any], object], original: Any, group: Any = None
) -> Any:  # fmt: skip
    """Replace the questions for the backend's name; a group made without one has that of the first group."""
    name = original(group)
    world = torch.distributed.group.WORLD
    wanted = asked.get(group or world) or asked.get(world)
    return name if wanted is None else type(name)(kind(wanted))


def _backend(name: Any) -> Any:
    """Return the name of a backend, or None, with gloo in the place of nccl and of torch's own choice."""
    return name and re.sub(r"\b(nccl|undefined)\b", "gloo", name, flags=re.IGNORECASE)


def _unseen(original: Any, work: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace the waits of works: gloo copies results then, on the host, which nccl does not."""
    with _disable_current_modes():
        return original(work, *args, **kwargs)


def _asked(lazy: weakref.WeakSet[Any], original: Any, work: Any) -> Any:
    """Replace `is_completed`: some works of gloo end in their wait alone, and a program may ask until they have."""
    if work in lazy:
        work.wait()
        return True
    return original(work)


def _with_buckets(on_device: weakref.WeakSet[Any], original: Any, reducer: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace what makes the buckets of DistributedDataParallel: they are where its parameters are."""
    watch = current()
    if args and any(watch is not None and watch.is_device(tensor) for tensor in args[0]):
        on_device.add(reducer)
    with nullcontext() if watch is None or reducer not in on_device else watch.placing():
        return original(reducer, *args, **kwargs)


class _Together:
    """The works of a coalesced start: one work for the program."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def wait(self, *timeout: Any) -> bool:
        for work in self._works:
            work.wait(*timeout)
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        return all([work.is_completed() for work in self._works])

    is_success = is_completed


def _begin(started: dict[str, list[Any]], group: Any) -> None:
    started[group.group_name] = []


def _end(started: dict[str, list[Any]], group: Any) -> _Together:
    return _Together(started.pop(group.group_name, []))


def _collected(
    started: dict[str, list[Any]], lazy: weakref.WeakSet[Any] | None, original: Any, group: Any, *args: Any,
    **kwargs: Any,
) -> Any:  # fmt: skip
    work = original(group, *args, **kwargs)
    if work is not None and lazy is not None:
        lazy.add(work)
    if started and work is not None and group.group_name in started:
        started[group.group_name].append(work)
    return work
