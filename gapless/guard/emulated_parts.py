"""What torch has beside torch.cuda that depends on it, over an emulated device: types of tensors, autocast,
process groups, the copies of DataParallel."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import emulated_streams as streams
from . import marks
from .patches import Patches

_KINDS = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")


class _Kind(type):
    """The type of `torch.cuda.FloatTensor` and its like, which make tensors and are asked for instances."""

    dtype: torch.dtype

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Tensor) and instance.is_cuda and instance.dtype is cls.dtype

    def __call__(cls, *args: Any, **kwargs: Any) -> Tensor:
        if len(args) == 1 and isinstance(args[0], (list, tuple, np.ndarray, Tensor)):
            return torch.as_tensor(args[0], dtype=cls.dtype, device="cuda")  # san: ok(the program asks for it)
        return torch.empty(*args or (0,), dtype=cls.dtype, device="cuda")


def _set_default_type(original: Any, kind: Any) -> None:
    """Replace `torch.set_default_tensor_type`, which names a device too."""
    is_cuda = isinstance(kind, _Kind) or "cuda" in str(kind)
    marks.default.device = streams.DEVICE if is_cuda else None
    if is_cuda:
        torch.set_default_dtype(getattr(torch, str(getattr(kind, "__name__", kind)).rpartition(".")[2]).dtype)
    else:
        original(kind)


def _enter_autocast(original: Any, autocast: Any) -> Any:
    """Have autocast for the device hold on the CPU, where its tensors are."""
    entered = original(autocast)
    if autocast.device == "cuda":
        autocast._before = (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"))
        torch.set_autocast_enabled("cpu", autocast._enabled)
        torch.set_autocast_dtype("cpu", autocast.fast_dtype)
    return entered


def _exit_autocast(original: Any, autocast: Any, *error: Any) -> Any:
    if autocast.device == "cuda":
        enabled, dtype = autocast._before
        torch.set_autocast_enabled("cpu", enabled)
        torch.set_autocast_dtype("cpu", dtype)
    return original(autocast, *error)


def _join_group(original: Any, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Replace `init_process_group`: tensors of the device are on the CPU, where gloo takes them."""
    kwargs.pop("device_id", None)
    return original(_backend(backend), *args, **kwargs)


def _new_group(original: Any, *args: Any, **kwargs: Any) -> Any:
    if "backend" in kwargs:
        kwargs["backend"] = _backend(kwargs["backend"])
    kwargs.pop("device_id", None)
    return original(*args, **kwargs)


def _backend(name: Any) -> Any:
    return name.replace("nccl", "gloo") if isinstance(name, str) else name


def _scattered(tensor: Tensor, devices: Any, sizes: Any, dim: int, side: Any) -> tuple[Tensor, ...]:
    return (tensor.to("cuda", non_blocking=True),)


def install(patches: Patches) -> None:
    """Put these parts in place of torch's."""
    for name in _KINDS:
        kind = _Kind(f"{name}Tensor", (), {"dtype": getattr(torch, f"{name}Tensor").dtype, "__module__": "torch.cuda"})
        patches.put(torch.cuda, kind.__name__, kind)
    patches.wrap(torch, "set_default_tensor_type", _set_default_type)
    patches.wrap(torch.autocast, "__enter__", _enter_autocast)
    patches.wrap(torch.autocast, "__exit__", _exit_autocast)
    groups = torch.distributed
    if groups.is_available():
        for owner in (groups, groups.distributed_c10d):
            patches.wrap(owner, "init_process_group", _join_group)
            patches.wrap(owner, "new_group", _new_group)
            patches.put(owner, "is_nccl_available", lambda: True)
    patches.put(torch._C, "_scatter", _scattered)
