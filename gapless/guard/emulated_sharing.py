"""Tensors of an emulated device that go to other processes: the same memory there, on the device again."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from . import marks
from .patches import Patches


def install(patches: Patches) -> None:
    """Put what stands for CUDA's sharing of memory in the place of the CPU's."""
    kind = torch.UntypedStorage
    for name in ("_share_fd_cpu_", "_share_filename_cpu_", "share_memory_"):
        patches.wrap(kind, name, _shared)
    patches.wrap(kind, "is_shared", lambda original, storage: marks.has(storage) or original(storage))
    # torch has loaded it, and has registered its own way, if there are processes at all.
    loaded: Any = sys.modules.get("multiprocessing.reduction")
    ways: dict[Any, Any] = vars(loaded.ForkingPickler)["_extra_reducers"] if loaded is not None else {}
    for way, around in ((kind, _reduced), (torch.Tensor, _reduced_tensor), (torch.nn.Parameter, _reduced_tensor)):
        if way in ways:
            patches.callback(ways.__setitem__, way, ways[way])
            ways[way] = partial(around, ways[way])


def _shared(original: Any, storage: Any, *args: Any, **kwargs: Any) -> Any:
    """Move a storage to shared memory. A device's need not move, so for the program nothing is copied."""
    if not marks.has(storage):
        return original(storage, *args, **kwargs)
    with _disable_current_modes():
        return original(storage, *args, **kwargs)


def _reduced(original: Any, storage: Any) -> Any:
    rebuild, args = _reduced_tensor(original, storage)
    return (_rebuilt, (rebuild, *args)) if marks.has(storage) else (rebuild, args)


def _reduced_tensor(original: Any, tensor: Any) -> Any:
    with _disable_current_modes():  # so that torch shares it as the CPU's
        return original(tensor)


def _rebuilt(rebuild: Any, *args: Any) -> Any:
    storage = rebuild(*args)
    marks.device_tensor(marks.whole(storage))
    return storage
