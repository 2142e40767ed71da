"""The fake accelerator: a third device for torch, neither CPU nor CUDA, that shows the faults of an engine.

Its streams are threads of the host and its operators run on the CPU's kernels; its memory cannot be read from the host,
copies are read when the stream gets there, and `delays` holds work back, so that a missing fence gives wrong bytes.
After `load()` this module is `torch.fake`; tensors are on `device="fake"`, and torch.accelerator is this device.
"""

from __future__ import annotations

import atexit
import os
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import generate_methods_for_privateuse1_backend, rename_privateuse1_backend

from gapless.base.errors import ConfigError
from gapless.device import build
from gapless.device.accelerator import AcceleratorDevice
from gapless.device.accelerator_stream import CurrentStream, torch_accelerator

FAKE = "fake"
EXTENSION = "gapless_fake"
FAKE_SOURCES = sorted((Path(__file__).parent / "native").glob("*.[ch]*"))
SEED_VARIABLE = "GAPLESS_FAKE_SEED"
"""Delays by this seed from the start: for child processes."""
MOST_US = 200

_loading = threading.Lock()
_native: Any = None


def load() -> Any:
    """Build the device at the first call on this machine, name it, and give it to torch.

    Raises: ConfigError: there is no compiler, or torch's place for such a device is taken.
    """
    global _native
    with _loading:
        if _native is None:
            _native = _loaded()
    return _native


def _loaded() -> Any:
    name = torch._C._get_privateuse1_backend_name()
    if name not in ("privateuseone", FAKE):
        raise ConfigError(f"device: fake needs torch's place for a private backend, which {name!r} has: load one only")
    native = build.module(EXTENSION, FAKE_SOURCES, warns=False)
    if native is None:
        raise ConfigError(f"device: fake is C++ that cannot be built here: {build.outcomes[EXTENSION].reason}")
    rename_privateuse1_backend(FAKE)
    if not native.pins():
        raise ConfigError("device: torch pins memory for CUDA here, not for fake: set CUDA_VISIBLE_DEVICES to nothing")
    import gapless.testing.fake as this

    torch._register_device_module(FAKE, this)  # type: ignore[no-untyped-call]
    generate_methods_for_privateuse1_backend()
    native.register_graphs()
    atexit.register(native.shut_down)
    if seed := os.environ.get(SEED_VARIABLE):
        native.delay(int(seed), MOST_US, 2)
    return native


def delays(seed: int | None, most_us: int = MOST_US, lazy: bool | None = None) -> None:
    """Let streams sleep up to `most_us` microseconds before some of their work, always the same by seed; None ends it.

    A lazy stream does nothing until its work is waited for, or was asked for some times: always (True), never (False),
    or at times (None).
    """
    mood = 2 if lazy is None else int(lazy)
    load().delay(seed or 0, 0 if seed is None else most_us, 0 if seed is None else mood)


def hold(held: bool) -> None:
    """Keep streams from work that is not waited for, or let them continue."""
    load().hold(held)


def reset() -> None:
    """Forget the error of the device. Raises RuntimeError while there is work."""
    load().reset()


def graph_pool_handle() -> tuple[int, int]:
    """Return the name of a new pool of memory for graphs."""
    pool: tuple[int, int] = load().graph_pool_handle()
    return pool


# What torch and programs expect of a device's module, as torch.cuda and torch.xpu have it.

_OF_TORCH = {"mem_get_info": "get_memory_info"}
"""Names of torch.accelerator for functions that it spells otherwise"""


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return _native is not None


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def set_device(device: Any) -> None:
    """Do nothing: there is one device. Raises: ConfigError: this is another one."""
    at = torch.device(FAKE, device) if isinstance(device, int) else torch.device(device)
    if at.type != FAKE or at.index:
        raise ConfigError(f"device: there is one fake device, fake:0, and no {at}")


class device(nullcontext[None]):  # as torch.cuda.device
    """Chooses the device for a block. Raises as `set_device`."""

    def __init__(self, device: Any) -> None:
        super().__init__()
        set_device(device)


def get_device_name(device: Any = None) -> str:
    return "the fake accelerator"


def get_device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(name=get_device_name(), total_memory=torch_accelerator.get_memory_info()[1])


def synchronize(device: Any = None) -> None:
    load().drain()


def default_stream(device: Any = None) -> Any:
    return load().default_stream()


def stream(stream: Any) -> AbstractContextManager[None]:
    """Make a stream the current one of this thread for a block; None changes nothing."""
    return nullcontext() if stream is None else CurrentStream(stream)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    return True


def manual_seed(seed: int) -> None:
    """Decide the random numbers that are drawn from now on; `torch.manual_seed` does so too."""
    load().generator().manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(device: Any = FAKE) -> Tensor:
    state: Tensor = load().generator().get_state()
    return state


def set_rng_state(new_state: Tensor, device: Any = FAKE) -> None:
    load().generator().set_state(new_state)


def _lazy_init() -> None:
    """Do nothing: `load` did all. Before torch 2.13, torch.accelerator waits for no device without this function."""


def _is_in_bad_fork() -> bool:
    return False


def __getattr__(name: str) -> Any:
    """Return what torch has for all devices: its classes, and torch.accelerator's functions."""
    if name == "Graph":
        return load().Graph
    owner, known = (torch, name) if name in ("Event", "Stream") else (torch_accelerator, _OF_TORCH.get(name, name))
    if name.startswith("_") or not hasattr(owner, known):
        raise AttributeError(f"torch.{FAKE} has no {name}, and torch.accelerator has none")
    return getattr(owner, known)


class FakeDevice(AcceleratorDevice):
    """The record of the fake accelerator."""

    kind = "fake"
    torch_type = FAKE
    caps = AcceleratorDevice.caps._replace(captures=True)
    graph = "Graph"
    has_run = True

    @classmethod
    def prepare(cls) -> None:
        load()
