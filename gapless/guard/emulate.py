"""Emulates CUDA on a machine without it, as far as a program's set-up and its streams use it. Time is not emulated:
every operation runs at once, on the CPU, in the order of the calls."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from . import emulated_device as device
from . import emulated_groups as groups
from . import emulated_sharing, emulated_triton, marks
from . import emulated_streams as streams
from .emulated_cudart import CudaRuntime
from .emulated_progress import StreamProgress
from .patches import Patches, holding
from .refusals import refuse
from .sites import torchs_caller, user_stack
from .watch import ON_WAIT, current

_PARTS = ("memory", "random", "streams", "graphs")
"""Modules in torch.cuda and torch.accelerator that hold some of their functions too."""

_REFUSED = (
    "temperature", "power_draw", "clock_rate", "utilization", "memory_usage", "device_memory_used",
    "list_gpu_processes", "MemPool", "GreenContext", "CUDAPluggableAllocator", "change_current_allocator",
    "caching_allocator_alloc", "caching_allocator_delete", "current_blas_handle", "current_solver_handle",
    "make_graphed_callables",
)  # fmt: skip
"""Names of torch.cuda that would end in the driver with an unclear error."""


_modes: Any = torch.overrides._get_current_function_mode_stack


def _refused(name: str) -> type:
    """A class, so that what asks for instances of it gets an answer."""

    def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
        raise refuse(f"torch.cuda.{name}")

    return type(name, (), {"__new__": __new__})


_OF_CUDA = ("_cuda", "_nccl", "_scatter", "_gather", "_broadcast")
"""Prefixes of the names that torch's core has only in builds for CUDA."""


def _of_torch_c(name: str) -> Any:
    """Stands for the attributes that torch's core has only where it was built for CUDA."""
    if not name.startswith(_OF_CUDA):
        raise AttributeError(f"module 'torch._C' has no attribute {name!r}")
    raise refuse(torchs_caller() or f"torch._C.{name}")


def _start_device() -> None:
    """Stands for `torch.cuda._lazy_init`, which torch's core calls before it makes a tensor on a real device."""
    if current() is not None and torch._C._len_torch_dispatch_stack():
        return  # the operator that follows comes to the dispatch mode, which makes it on the CPU
    where = user_stack()
    place = f" at {where[0].where}" if where else ""
    raise refuse(torchs_caller() or f"a CUDA tensor that is made outside of the checked threads{place}")


def _place(storage: Any) -> Any:
    """Mark the memory of a storage as a device's."""
    marks.device_tensor(marks.whole(storage))
    return storage


def _restored(original: Any, storage: Any, location: str) -> Any:
    """Replace how torch.load places a storage: it reads it on the host, and copies it to the device."""
    if not str(location).startswith("cuda"):
        return original(storage, location)
    watch = current()
    if watch is not None:
        watch.flag("upload", "torch.load")
    return _place(storage)


def _location(original: Any, storage: Any) -> Any:
    """Replace how torch.save names the place of a storage."""
    if marks.whole(storage) not in marks.DEVICE_TENSORS:
        return original(storage)
    return "cuda:0"  # the copy to the host that follows is reported by itself


def _taken(original: Any, capsule: Any) -> Tensor:
    """Replace the import by dlpack: marked memory is the same as before, and no other storage over it."""
    made: Tensor = original(capsule)
    storage = made.untyped_storage()
    owner = marks.DEVICE_TENSORS.covering(storage) or marks.PINNED.covering(storage)
    if owner is None:
        return made
    offset = (made.data_ptr() - owner.data_ptr()) // made.itemsize
    return made.new_empty(0).set_(owner, offset, made.shape, made.stride())


def _to_numpy(original: Any, tensor: Any, /, **kwargs: Any) -> Any:
    """Replace `numpy.from_dlpack`, which takes no memory of a device."""
    if isinstance(tensor, Tensor) and tensor.is_cuda and kwargs.get("device") is None:
        raise BufferError("Unsupported device in DLTensor.")
    return original(tensor, **kwargs)


def _export(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `torch.export.export`, which ends the process where torch has no device for its fake tensors."""
    tensors = [*module.parameters(), *module.buffers(), *tree_leaves((args, kwargs))]
    if any([isinstance(one, Tensor) and one in marks.DEVICE_TENSORS for one in tensors]):
        raise refuse("torch.export of tensors on the device")
    return original(module, *args, **kwargs)


def _moved(original: Any, storage: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `storage.cuda()`."""
    return storage if marks.has(storage) else _place(storage.clone())


def _storages_device(storage: Any) -> torch.device:
    """Return the emulated device of a storage where a mode can make tensors there: torch makes them by the answer."""
    is_asked = marks.has(storage) and current() is not None and torch._C._len_torch_dispatch_stack()
    return streams.DEVICE if is_asked else marks.place_of(storage)


def _cloned(original: Any, storage: Any) -> Any:
    if not marks.has(storage):
        return original(storage)
    return _place(type(storage)(storage.nbytes())).copy_(storage)


def _set_default(original: Any, device: Any) -> None:
    """Replace `torch.set_default_device`, whose mode comes after the checkers' modes."""
    cuda = marks.names_device(device)
    marks.default.device = streams.DEVICE if cuda else None
    original(None if cuda else device)


def _get_default(original: Any) -> torch.device:
    inside = any(isinstance(mode, DeviceContext) for mode in _modes())
    default = marks.default.device
    return original() if inside or default is None else default


def _record_stream(original: Any, tensor: Tensor, stream: streams.EmulatedStream) -> None:
    """Replace `record_stream`, which takes real streams alone, so that a region's function mode still sees the call."""
    if has_torch_function((tensor,)):
        handle_torch_function(original, (tensor,), tensor, stream)


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
    """Apply the device's autocast on the CPU: its tensors are there."""
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


def _scattered(tensor: Tensor, devices: Any, sizes: Any, dim: int, side: Any) -> tuple[Tensor, ...]:
    return (tensor.to("cuda", non_blocking=True),)


class _Shown(threading.local):
    """The tensor that a thread turns into text."""

    tensor: Tensor | None = None


def _show_devices(patches: Patches) -> None:
    """Have texts of tensors end with their device, as torch ends them for a device that is not the default one."""
    shown, texts = _Shown(), torch._tensor_str

    def text(original: Any, tensor: Tensor, **kwargs: Any) -> Any:
        with holding(shown, tensor=tensor):
            return original(tensor, **kwargs)

    def add(original: Any, begin: str, suffixes: list[str], *args: Any, **kwargs: Any) -> Any:
        watch, tensor = current(), shown.tensor
        if watch is not None and tensor is not None and tensor.device.type == "cpu" and watch.is_device(tensor):
            suffixes = [f"device='{marks.emulated}'", *suffixes]
        return original(begin, suffixes, *args, **kwargs)

    patches.wrap(texts, "_str_intern", text)
    patches.wrap(texts, "_add_suffixes", add)


def _trace(original: Any, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `torch.jit.trace`, which can neither be watched nor keep a device that torch does not have."""
    modules = [*func.parameters(), *func.buffers()] if isinstance(func, torch.nn.Module) else []
    tensors = (*modules, *tree_leaves((args, kwargs)))
    if any([isinstance(one, Tensor) and one in marks.DEVICE_TENSORS for one in tensors]):
        raise refuse("torch.jit.trace of tensors on the device")
    with _disable_current_modes(), marks.FunctionsOff():
        return original(func, *args, **kwargs)


@contextmanager
def emulated_cuda(seed: int = 0) -> Iterator[None]:
    """Make torch.cuda answer as if there were one device. Inside regions its tensors are emulated on the CPU.

    The seed decides how often `query` answers False before it answers True. Does nothing on a machine with CUDA.
    """
    if torch.cuda.is_available():
        yield
        return
    with Patches() as patches:
        _install(patches)
        _install_beside(patches)
        _show_devices(patches)
        patches.put(streams, "progress", StreamProgress(seed))
        ON_WAIT.append(streams.waited)
        patches.callback(ON_WAIT.remove, streams.waited)
        emulated_triton.install(patches)
        # A program may leave another stream current than it found.
        patches.enter_context(streams.stream(streams.default_stream()))
        patches.put(streams, "DEVICE", streams.DEVICE)
        patches.put(marks, "emulated", streams.DEVICE)
        streams.use_device(int(os.environ.get("LOCAL_RANK", 0)))
        yield


def _install(patches: Patches) -> None:
    """Put what stands for CUDA in the place of torch's own."""
    cuda: Any = torch.cuda
    refused = {name: _refused(name) for name in _REFUSED}
    for module, answers in ((cuda, {**device.CUDA, **refused}), (torch.accelerator, device.ACCELERATOR)):
        holders = [module, *(getattr(module, part) for part in _PARTS if hasattr(module, part))]
        for name, answer in answers.items():
            own = getattr(module, name, None)
            for holder in holders if own is not None else ():
                if getattr(holder, name, None) is own:
                    patches.put(holder, name, answer)
    patches.put(cuda, "_lazy_init", _start_device)
    patches.put(cuda.nvtx, "_nvtx", device.Nvtx())
    runtime = CudaRuntime()
    patches.put(cuda, "_cudart", runtime)
    patches.put(cuda, "cudart", lambda: runtime)
    patches.callback(marks.PINNED.registered.clear)
    # Its operators take tensors of real devices alone.
    patches.put(torch.backends.cudnn, "is_acceptable", lambda tensor: False)
    patches.put(torch.backends.cudnn, "version", lambda: None)
    for name in ("start", "stop"):
        patches.put(cuda.profiler, name, lambda: None)
    patches.put(cuda.graphs.graph, "default_capture_stream", None)


def _install_beside(patches: Patches) -> None:
    """Put what stands for it in the place of what torch has for CUDA beside torch.cuda."""
    patches.put(torch._C, "_host_emptyCache", lambda: None)
    patches.put(torch._C, "_get_accelerator", lambda check=None: torch.device("cuda"))
    # A build for CUDA has what would end in the driver: it answers as one without, but for settings of cuDNN.
    for name in [name for name in vars(torch._C) if name.startswith(_OF_CUDA) and "cudnn" not in name]:
        patches.hide(torch._C, name)
    patches.put(torch._C, "__getattr__", _of_torch_c)
    patches.put(torch._C, "_scatter", _scattered)
    patches.wrap(torch.export, "export", _export)
    patches.wrap(torch.jit, "trace", _trace)
    patches.wrap(torch.jit, "trace_module", _trace)
    patches.wrap(torch._C, "_from_dlpack", _taken)
    patches.wrap(np, "from_dlpack", _to_numpy)
    patches.put(torch, "Stream", streams.EmulatedStream)
    patches.put(torch, "Event", streams.AnyEvent)
    patches.put(torch, "Generator", device.EmulatedGenerator)
    patches.wrap(torch, "set_default_device", _set_default)
    patches.wrap(torch, "get_default_device", _get_default)
    patches.wrap(torch, "get_device_module", lambda ask, device=None: torch.cuda if device is None else ask(device))
    patches.wrap(torch.serialization, "default_restore_location", _restored)
    patches.wrap(torch.serialization, "location_tag", _location)
    patches.wrap(torch.UntypedStorage, "cuda", _moved)
    patches.wrap(torch.UntypedStorage, "clone", _cloned)
    patches.put(torch.UntypedStorage, "device", property(_storages_device))
    patches.stand_in(Tensor, "record_stream", _record_stream)
    for name in _KINDS:
        kind = _Kind(f"{name}Tensor", (), {"dtype": getattr(torch, f"{name}Tensor").dtype, "__module__": "torch.cuda"})
        patches.put(torch.cuda, kind.__name__, kind)
    patches.wrap(torch, "set_default_tensor_type", _set_default_type)
    patches.wrap(torch.autocast, "__enter__", _enter_autocast)
    patches.wrap(torch.autocast, "__exit__", _exit_autocast)
    groups.install(patches)
    emulated_sharing.install(patches)
    patches.callback(setattr, marks.default, "device", None)
