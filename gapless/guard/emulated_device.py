"""Answers of an emulated CUDA device: its properties, memory and random numbers, in torch.cuda's words.

The device's memory is a part of the machine's, so that a program that takes most of it can. Random numbers come from
the CPU's generators: seeds and states hold, the numbers are not those of a GPU.
"""

from __future__ import annotations

import os
import struct
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from . import emulated_graphs as graphs
from . import emulated_streams as streams

PART_OF_MEMORY = 4
"""The device has a quarter of the machine's memory: tensors on it are touched only as far as the program does."""

CAPABILITY = (9, 0)
"""A data center's GPU of today: by its capability a program chooses its path, as grouped products for experts."""

_generator = torch.default_generator
_CPU_GENERATOR: Any = torch.Generator


def total_memory() -> int:
    """Return the bytes of the device's memory."""
    if not hasattr(os, "sysconf"):
        return 4 << 30
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // PART_OF_MEMORY


def properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name="the CPU, emulating CUDA", major=CAPABILITY[0], minor=CAPABILITY[1],
        total_memory=total_memory(), multi_processor_count=1, warp_size=32,
        max_threads_per_multi_processor=2048, max_threads_per_block=1024, regs_per_multiprocessor=65536,
        shared_memory_per_block=48 << 10, shared_memory_per_block_optin=96 << 10,
        shared_memory_per_multiprocessor=100 << 10, L2_cache_size=4 << 20, is_integrated=0, is_multi_gpu_board=0,
        gcnArchName="", uuid="emulated",
    )  # fmt: skip


class _States:
    """The generator's states in the form that a GPU gives them: 16 bytes, a seed and an offset. Libraries look inside.

    Under each pair the generator's whole state is kept, the newest of them; a pair that is not kept is a new seed.
    """

    _MOST = 1024

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], Tensor] = {}
        self._last = (0, 0)
        self._offset = 0
        """Largest offset given so far: no two states share one"""

    def get(self, device: Any = None) -> Tensor:
        with _disable_current_modes():
            state, before = _generator.get_state(), self._kept.get(self._last)
            if before is None or not torch.equal(before, state):
                self._keep((_generator.initial_seed(), self._offset + 4), state)
            return torch.tensor(list(struct.pack("=QQ", *self._last)), dtype=torch.uint8)

    def set(self, state: Tensor, device: Any = None) -> None:
        with _disable_current_modes():
            state = state.cpu()
            if state.numel() != 16:
                _generator.set_state(state)
                return
            seed, offset = struct.unpack("=QQ", bytes(state.tolist()))
            if (seed, offset) in self._kept:
                _generator.set_state(self._kept[seed, offset])
                self._last = seed, offset
            else:
                _generator.manual_seed(hash((seed, offset)) % (1 << 63))
                self._keep((seed, offset), _generator.get_state())

    def _keep(self, last: tuple[int, int], state: Tensor) -> None:
        self._last = last
        self._offset = max(self._offset, last[1])
        self._kept[last] = state
        if len(self._kept) > self._MOST:
            del self._kept[next(iter(self._kept))]


_states = _States()


class _AnyGenerator(type(_CPU_GENERATOR)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _CPU_GENERATOR)


class EmulatedGenerator(_CPU_GENERATOR, metaclass=_AnyGenerator):  # type: ignore[misc]
    """Stands for `torch.Generator`; one of a device draws by the CPU's algorithm."""

    def __new__(cls, device: Any = "cpu") -> EmulatedGenerator:
        made: EmulatedGenerator = super().__new__(cls, "cpu")
        made.given = torch.device(device) if not isinstance(device, int) else streams.DEVICE
        return made

    given: torch.device

    @property
    def device(self) -> torch.device:
        return streams.DEVICE if self.given.type == "cuda" else self.given


class Nvtx:
    """Stands for NVTX, whose ranges and marks no profiler reads here."""

    def __init__(self) -> None:
        self._depth = 0

    def rangePushA(self, message: str) -> int:
        self._depth += 1
        return self._depth - 1

    def rangePop(self) -> int:
        self._depth -= 1
        return self._depth

    def __getattr__(self, name: str) -> Any:
        return lambda *args: 0


def _own(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of its own that answers the same: torch's compiler tells functions apart by identity."""
    return lambda *args, **kwargs: answer(*args, **kwargs)


def _each(names: str, answer: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    return {name: _own(answer) for name in names.split()}


def _all(value: Any, names: str) -> dict[str, Callable[..., Any]]:
    """Return functions without parameters that answer this."""
    return _each(names, lambda: value)


def _of_device(value: Any, names: str) -> dict[str, Callable[..., Any]]:
    """Return functions that answer this for any device."""
    return _each(names, lambda device=None: value)


def device_count() -> int:
    """Return the number of devices that programs see: one, or one for each rank that a launcher started here."""
    return max(int(os.environ.get("LOCAL_WORLD_SIZE", 1)), streams.DEVICE.index + 1)


CUDA: dict[str, Any] = {
    **_all(True, "is_available is_initialized is_tf32_supported"),
    "is_bf16_supported": lambda including_emulation=True: True,
    "can_device_access_peer": lambda device, peer_device: False,
    "device_count": _own(device_count),
    "current_device": lambda: streams.DEVICE.index,
    **_all(0, "get_sync_debug_mode"),
    # The functions behind `with torch.cuda.device(...)`.
    **_each("_exchange_device _maybe_exchange_device", lambda device: streams.DEVICE.index),
    **_all(None, "init empty_cache ipc_collect reset_peak_host_memory_stats reset_accumulated_host_memory_stats"),
    **_each("synchronize", streams.synchronize),
    **_of_device(None, "reset_peak_memory_stats reset_accumulated_memory_stats"),
    "set_device": streams.use_device,
    "set_sync_debug_mode": lambda debug_mode: None,
    "set_per_process_memory_fraction": lambda fraction, device=None: None,
    "get_device_properties": properties,
    "mem_get_info": lambda device=None: (total_memory(), total_memory()),
    # torch derives its other figures of memory from these.
    **_each("memory_stats memory_stats_as_nested_dict host_memory_stats", lambda device=None: defaultdict(int)),
    "memory_snapshot": lambda *args, **kwargs: [],
    "get_arch_list": lambda: [],
    "memory_summary": lambda device=None, abbreviated=False: "an emulated device has no memory statistics",
    # torch.manual_seed calls these after the CPU's generator, which is the one that is used here.
    **_each("manual_seed manual_seed_all", _generator.manual_seed),
    **_each("seed seed_all", _generator.seed),
    "initial_seed": lambda: _generator.initial_seed(),
    "get_rng_state": _states.get,
    "set_rng_state": _states.set,
    "default_generators": (_generator,),
    "is_current_stream_capturing": streams.is_capturing,
    "CUDAGraph": graphs.EmulatedGraph,
    "graph_pool_handle": graphs.pool_handle,
    "Stream": streams.EmulatedStream,
    "ExternalStream": streams.ExternalStream,
    "Event": streams.Event,
    "current_stream": streams.current_stream,
    "default_stream": streams.default_stream,
    "set_stream": streams.set_stream,
    "stream": streams.stream,
}  # fmt: skip
"""Replacements in torch.cuda."""

ACCELERATOR: dict[str, Any] = {
    **_all(True, "is_available"),
    "device_count": _own(device_count),
    **_each("current_device_index current_device_idx", lambda: streams.DEVICE.index),
    **_all(None, "empty_host_cache empty_cache"),
    **_each("synchronize", streams.synchronize),
    **_of_device(None, "reset_peak_memory_stats reset_accumulated_memory_stats"),
    **_each("set_device_index set_device_idx", streams.use_device),
    "current_accelerator": lambda check_available=False: torch.device("cuda"),
    "device_index": nullcontext,
    "get_device_capability": lambda device=None: {
        "supported_dtypes": {kind for kind in vars(torch).values() if isinstance(kind, torch.dtype)}
    },
    "get_memory_info": CUDA["mem_get_info"],
    **{name: _own(CUDA[name]) for name in ("set_stream", "current_stream", "memory_stats")},
}  # fmt: skip
"""Replacements in torch.accelerator."""
