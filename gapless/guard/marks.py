"""Which tensors count as device tensors: marked ones, and all on a real accelerator.

Without an accelerator a program marks tensors, or asks for `device="cuda"`: such tensors live on the CPU and are
treated as if they lay on a device. What is marked is the storage, so a view is what its base is. Marks are weak: they
keep nothing alive and mean nothing outside a checked region.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import forks
from .backends import HOST_TYPES
from .present import accelerator

T = TypeVar("T")

FunctionsOff: Any = torch._C.DisableTorchFunction
"""Switches function modes and overriding classes off. Regions replace torch's name of it, for programs."""
_DispatchOff: Any = torch._C._DisableTorchDispatch

emulated = torch.device("cpu", 0)
"""The `.device` of a marked tensor inside a region: of type cpu, yet not equal to torch.device("cpu")."""


class _Default(threading.local):
    device: torch.device | None = None


default = _Default()
"""A thread's emulated default device, set by `torch.set_default_device`."""


def has_accelerator() -> bool:
    """Return whether there is a real accelerator: torch's own answer may be emulated."""
    return emulated.type == "cpu" and accelerator() != ""


_MARKS_BEFORE_SWEEP = 4096
"""The number of marks that has dead storages' marks dropped."""
_STRIDED = torch.strided
_transforms: Any = torch._C._functorch
_is_wrapped, _unwrapped = _transforms.is_functorch_wrapped_tensor, _transforms.get_unwrapped


def owner_of(tensor: Tensor) -> Any:
    """Return the storage of a tensor, or the object that is marked if it has none."""
    try:
        return tensor.untyped_storage() if tensor.layout is _STRIDED else tensor
    except (NotImplementedError, RuntimeError):
        return _inner(tensor)


def _inner(tensor: Tensor) -> Any:
    """Return the owner of the tensor that a transform of functions has wrapped; of others the tensor itself."""
    return owner_of(_unwrapped(tensor)) if _is_wrapped(tensor) else tensor


class Marks:
    """A weak set of storages. A tensor without storage (an opaque layout) is marked itself."""

    def __init__(self) -> None:
        self.refs: dict[int, weakref.ref[Any]] = {}
        """The storages by id, which may be used again: what the reference returns must be the storage."""
        self.registered: dict[int, Any] = {}
        """Storages that stand for memory by its address, which a program has registered and not yet unregistered."""
        self._most = _MARKS_BEFORE_SWEEP
        self._counter = itertools.count(1)
        self.added = 0
        """The number of storages that were ever added."""
        self._lock = forks.lock()

    def add(self, tensor: Tensor) -> None:
        # Other layouts are not asked for a storage: that would raise, which costs a hundred microseconds.
        try:
            owner = tensor.untyped_storage() if tensor.layout is _STRIDED else tensor
        except (NotImplementedError, RuntimeError):
            owner = _inner(tensor)
        key = id(owner)
        ref = self.refs.get(key)
        if ref is not None and ref() is owner:
            return
        # Without a callback, which would cost as much as all the rest: an id that is used again is seen as such.
        self.refs[key] = weakref.ref(owner)
        self.added = next(self._counter)
        if len(self.refs) > self._most:
            with self._lock:
                # Another thread may add meanwhile.
                for dead in [key for key, ref in list(self.refs.items()) if ref() is None]:
                    self.refs.pop(dead, None)
                self._most = max(_MARKS_BEFORE_SWEEP, 2 * len(self.refs))

    def __contains__(self, tensor: Tensor) -> bool:
        # As in `add`, not by a function for both: it runs for every argument of every operation.
        try:
            owner = tensor.untyped_storage() if tensor.layout is _STRIDED else tensor
        except (NotImplementedError, RuntimeError):
            owner = _inner(tensor)
        ref = self.refs.get(id(owner))
        return ref is not None and ref() is owner

    def covering(self, storage: Any) -> Any:
        """Return the marked storage whose memory holds that of this one, or None."""
        # Memory of the storage's own can be registered, but is no part of another's.
        own = storage.resizable()
        if own and not self.registered:
            return None
        low, high = storage.data_ptr(), _end(storage)
        for owner in list(self.registered.values()) if own else [ref() for ref in list(self.refs.values())]:
            if isinstance(owner, torch.UntypedStorage) and owner.data_ptr() <= low < high <= _end(owner):
                return owner
        return None


def _end(storage: torch.UntypedStorage) -> int:
    return storage.data_ptr() + storage.nbytes()


DEVICE_TENSORS = Marks()
HOST_COPIES = Marks()
"""Host copies of device tensors: a predicate does not apply to them."""
PINNED = Marks()
"""Pinned memory. Other storages over it, made from numpy's arrays, are pinned too."""


_STORAGE: Any = torch._C.StorageBase


def place_of(storage: Any) -> torch.device:
    """Return where a storage really is, also while it answers with an emulated device."""
    place: torch.device = _STORAGE.device.__get__(storage)
    return place


def whole(storage: Any) -> Tensor:
    """Return a tensor of the bytes of a storage, made past all modes."""
    storage = getattr(storage, "_untyped_storage", storage)
    with FunctionsOff(), _DispatchOff():
        return torch.empty(0, dtype=torch.uint8, device=place_of(storage)).set_(storage)


def has(storage: Any) -> bool:
    """Return whether a storage is marked as a device's."""
    ref = DEVICE_TENSORS.refs.get(id(storage))
    return ref is not None and ref() is storage


def device_tensor(value: T) -> T:
    """Mark a tensor, or all tensors of a module or container, as device tensors; returns `value`.

    Raises:
        TypeError: something in `value` is neither.
    """
    for tensor in tensors_in(value):
        DEVICE_TENSORS.add(tensor)
    return value


def pinned_tensor(value: T) -> T:
    """Mark host tensors as pinned, as a ring of staging buffers is; returns `value`. Raises as `device_tensor`."""
    for tensor in tensors_in(value):
        PINNED.add(tensor)
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a tensor, a module (parameters and buffers), or nested dicts, lists, tuples and sets."""
    if isinstance(value, Tensor):
        yield value
        if type(value) is not Tensor and is_traceable_wrapper_subclass(value):
            yield from inside(value)
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        for item in value:
            yield from tensors_in(item)
    elif value is not None:
        raise TypeError(f"expected tensors, modules or containers of them, got {type(value).__name__}")


def inside(wrapper: Any) -> Iterator[Tensor]:
    """The tensors that a wrapper, such as DTensor, is made of."""
    for name in wrapper.__tensor_flatten__()[0]:
        one = getattr(wrapper, name)
        if isinstance(one, Tensor):
            yield one


def on_accelerator(tensor: Tensor) -> bool:
    """Return whether the tensor really is on a device."""
    # Not asked through a function mode, which answers for the emulated device.
    with FunctionsOff():
        return tensor.device.type not in HOST_TYPES


def is_pinned(tensor: Tensor) -> bool:
    """Return whether copies from and to this host tensor can run beside the host."""
    if tensor in PINNED or (has_accelerator() and tensor.is_pinned()):
        return True
    return tensor.layout is _STRIDED and PINNED.covering(tensor.untyped_storage()) is not None


def is_dense(tensor: Tensor) -> bool:
    """Return whether the elements fill one stretch of memory, in any order."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return True
    span = 1 + sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return span == tensor.numel()


def names_device(device: Any) -> bool:
    """Return whether a `device=` argument names a device, real or emulated, and not the host."""
    if device is None:
        return False
    if isinstance(device, int):
        return True
    parsed = torch.device(device) if isinstance(device, str) else device
    return parsed.type not in HOST_TYPES or parsed.index is not None


def is_meta(device: Any) -> bool:
    """Return whether a `device=` argument names the one whose tensors have no memory."""
    return not isinstance(device, int) and torch.device(device).type == "meta"


def is_fake_type(kind: type) -> bool:
    """Return whether tensors of this type have no memory. Its module is imported where a program has them."""
    return kind.__name__ == "FakeTensor"


def must_emulate(device: Any) -> bool:
    """Return whether `device`, which names one, has to be emulated on the CPU."""
    is_emulated = not isinstance(device, int) and torch.device(device).type in HOST_TYPES
    return is_emulated or not has_accelerator()
