"""Emulates CUDA on a machine without it, as far as a program's set-up and its streams use it. Time is not emulated:
every operation runs at once, on the CPU, in the order of the calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from . import emulated_streams as streams
from . import marks
from .patches import Patches

_ANSWERS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "init": lambda: None,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    # What `with torch.cuda.device(...)` calls.
    "_exchange_device": lambda device: 0,
    "_maybe_exchange_device": lambda device: 0,
    "get_device_name": lambda device=None: "the CPU, emulating CUDA",
    "get_device_capability": lambda device=None: (0, 0),
    "is_bf16_supported": lambda including_emulation=True: True,
    # torch.manual_seed calls these after the CPU's generator, which is the one that is used here.
    "manual_seed": lambda seed: None,
    "manual_seed_all": lambda seed: None,
    "synchronize": lambda device=None: None,
    "empty_cache": lambda: None,
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "memory_stats": lambda device=None: {},
    "host_memory_stats": lambda: {},
    "get_sync_debug_mode": lambda: 0,
    "set_sync_debug_mode": lambda mode: None,
    "Stream": streams.EmulatedStream,
    "Event": streams.Event,
    "current_stream": streams.current_stream,
    "default_stream": streams.default_stream,
    "set_stream": streams.set_stream,
    "stream": streams.stream,
}


def _record_stream(original: Any, tensor: Tensor, stream: streams.EmulatedStream) -> None:
    """Replace `record_stream`, which takes real streams alone, so that a region's function mode still sees the call."""
    if has_torch_function((tensor,)):
        handle_torch_function(original, (tensor,), tensor, stream)


@contextmanager
def emulated_cuda() -> Iterator[None]:
    """Make torch.cuda answer as if there were one device. Inside regions its tensors are emulated on the CPU.

    Does nothing on a machine with CUDA.
    """
    if torch.cuda.is_available():
        yield
        return
    before = marks.emulated
    with Patches() as patches:
        for name, answer in _ANSWERS.items():
            patches.put(torch.cuda, name, answer)
        patches.put(torch, "Stream", streams.EmulatedStream)
        patches.put(torch, "Event", streams.AnyEvent)
        patches.stand_in(Tensor, "record_stream", _record_stream)
        # A program may leave another stream current than it found.
        patches.enter_context(streams.stream(streams.default_stream()))
        marks.emulated = streams.DEVICE
        try:
            yield
        finally:
            marks.emulated = before
