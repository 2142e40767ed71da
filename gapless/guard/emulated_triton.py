"""Triton's kernels on an emulated device: its interpreter runs them, and the memory that they touch is followed.

Triton is not imported here: its modules are changed as a program imports them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import emulated_graphs as graphs
from . import emulated_streams as streams
from . import marks
from .arrivals import arriving
from .emulated_device import CAPABILITY
from .patches import Patches
from .refusals import refuse
from .watch import current

Runs = list[tuple[int, int]]
"""Bytes from an address to another, in order, with gaps between."""
KernelUses = list[tuple[Tensor, bool, Runs]]
"""Tensors over whole storages, whether a kernel writes them, and where."""

FOLLOWERS: list[Callable[[KernelUses], None]] = []
"""Functions that are called with the memory that each kernel touched."""


class _Marked:
    """A storage, and which of its bytes a kernel has read and written."""

    def __init__(self, storage: Any) -> None:
        self.start = storage.data_ptr()
        self.end = self.start + storage.nbytes()
        self.tensor = marks.whole(storage)
        self.bytes: dict[bool, Any] = {}

    def touch(self, addresses: Any, itemsize: int, writes: bool) -> None:
        marked = self.bytes.get(writes)
        if marked is None:
            marked = self.bytes[writes] = np.zeros(self.end - self.start, np.bool_)
        for byte in range(itemsize):
            marked[addresses - self.start + byte] = True

    def runs(self, writes: bool) -> Runs:
        edges = np.flatnonzero(np.diff(self.bytes[writes], prepend=False, append=False)) + self.start
        return [(int(low), int(high)) for low, high in edges.reshape(-1, 2)]


class _Launch(threading.local):
    """The kernel that the calling thread runs: the storages of its arguments, by address."""

    storages: list[_Marked] | None = None
    is_complete = False
    """Whether all storages of the device are among them, for pointers that are loaded from memory."""


_launch = _Launch()


def _touch(addresses: Any, mask: Any, itemsize: int, writes: bool) -> None:
    if _launch.storages is None:
        return
    flat = np.asarray(addresses)[np.asarray(mask, np.bool_)].ravel().astype(np.int64)
    for storage in _storages():
        inside = (flat >= storage.start) & (flat < storage.end)
        if inside.any():
            storage.touch(flat[inside], itemsize, writes)
            flat = flat[~inside]
            if not flat.size:
                return


def _storages() -> Iterator[_Marked]:
    """The storages of the arguments, and then all others of the device."""
    assert _launch.storages is not None
    yield from _launch.storages
    if _launch.is_complete:
        return
    _launch.is_complete = True
    known = {storage.start for storage in _launch.storages}
    owners = [ref() for ref in list(marks.DEVICE_TENSORS.refs.values())]
    for owner in owners:
        if isinstance(owner, torch.UntypedStorage) and owner.nbytes() and owner.data_ptr() not in known:
            _launch.storages.append(_Marked(owner))
            yield _launch.storages[-1]


class _Memory:
    """Stands for the part of Triton's interpreter that accesses memory, and notes each access."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        _touch(addresses, mask, np.dtype(dtype).itemsize, False)
        return self._own.load(addresses, mask, other, dtype)

    def store(self, addresses: Any, value: Any, mask: Any) -> Any:
        _touch(addresses, mask, value.dtype.itemsize, True)
        return self._own.store(addresses, value, mask)

    def atomic_rmw(self, kind: Any, addresses: Any, value: Any, mask: Any, order: Any) -> Any:
        _touch(addresses, mask, value.dtype.itemsize, True)
        return self._own.atomic_rmw(kind, addresses, value, mask, order)

    def atomic_cas(self, addresses: Any, before: Any, value: Any, order: Any) -> Any:
        _touch(addresses, np.ones_like(addresses, np.bool_), value.dtype.itemsize, True)
        return self._own.atomic_cas(addresses, before, value, order)


def _run(original: Any, kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
    """Replace a launch in the interpreter."""
    watch, launch = current(), partial(original, kernel, *args, grid=grid, warmup=warmup, **kwargs)
    if watch is None or warmup:
        return launch()
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.numel()]
    on_device = [watch.is_device(tensor) for tensor in tensors]
    if any(on_device) and not all(one or marks.is_pinned(t) for one, t in zip(on_device, tensors, strict=True)):
        watch.flag("host-operand", f"the Triton kernel {kernel.__name__}")
    graphs.replay_too(partial(_run, original, kernel, *args, grid=grid, **kwargs))
    with _disable_current_modes(), marks.FunctionsOff():
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        before, _launch.storages = _launch.storages, [_Marked(storage) for storage in storages.values()]
        _launch.is_complete = False
        try:
            result = launch()
        finally:
            touched, _launch.storages = _launch.storages, before
        uses = [(one.tensor, writes, one.runs(writes)) for one in touched for writes in one.bytes]
        for follow in FOLLOWERS:
            follow(uses)
    return result


def _refused(original: Any, kernel: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace a launch on a GPU."""
    name = getattr(kernel, "__name__", "")
    raise refuse(f"the Triton kernel {name}, unless it is interpreted: set TRITON_INTERPRET=1")


def _driver() -> Any:
    """Return what stands for Triton's driver, as far as programs ask it about the device."""
    properties = {"multiprocessor_count": 1, "warpSize": 32, "max_shared_mem": 96 << 10, "max_num_regs": 65536}
    target = SimpleNamespace(backend="cuda", arch=10 * CAPABILITY[0] + CAPABILITY[1], warp_size=32)
    return SimpleNamespace(
        get_current_target=lambda: target, get_current_device=lambda: 0,
        set_current_device=lambda device: None, get_device_capability=lambda device=None: CAPABILITY,
        get_current_stream=lambda device=None: streams.current_stream().cuda_stream,
        get_active_torch_device=lambda: streams.DEVICE, get_device_interface=lambda: torch.cuda,
        utils=SimpleNamespace(get_device_properties=lambda device=None: properties),
    )  # fmt: skip


def install(patches: Patches) -> None:
    """Change Triton's modules, now or as they are imported."""
    put, wrap = patches.put, patches.wrap
    patches.enter_context(
        arriving({
            "triton.runtime.driver": lambda module: put(module.driver, "_active", _driver()),
            "triton.runtime.jit": lambda module: wrap(module.JITFunction, "run", _refused),
            # The time of an interpreted kernel means nothing: the first configuration is taken.
            "triton.runtime.autotuner": lambda module: wrap(module.Autotuner, "_bench", lambda *_, **__: [0.0] * 3),
            "triton.runtime.interpreter": partial(_interpret, patches),
        })
    )  # fmt: skip


def _interpret(patches: Patches, module: Any) -> None:
    patches.wrap(module.InterpretedFunction, "run", _run)
    patches.put(module, "_interpreter", _Memory(module._interpreter))
