"""GPUs that the host plays: a driver for `CudaGroup` whose kernels are sums.cu, compiled for the host."""

from __future__ import annotations

import ctypes
import shutil
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gapless.base.share import Share
from gapless.comm import cuda
from gapless.comm.cuda import CudaGroup, HostWords
from gapless.device import build
from gapless.device.driver import HANDLE_BYTES
from gapless.device.fault import Fault

STREAM = 7


def library(folder: Path, world: int) -> ctypes.CDLL:
    """Return the kernels for so many ranks."""
    for source in (
        cuda.SUMS_SOURCE,
        *(Path(__file__).with_name(name) for name in ("emulated_cuda.h", "emulated_sums.cpp")),
    ):
        shutil.copy(source, folder)
    text = (folder / "emulated_sums.cpp").read_text()
    (folder / "emulated_sums.cpp").write_text(f"#define WORLD {world}\n{text}")
    outcome = build.build(f"sums_emulated_{world}", sorted(folder.iterdir()))
    if outcome.library is None:
        pytest.skip(f"no C++ here: {outcome.reason}")
    return ctypes.CDLL(str(outcome.library))


class PlayedDriver:
    """One GPU's, or an equal one's. Memory of all is the host's, and a handle names it."""

    def __init__(self, kernels: ctypes.CDLL, processors: int = 2) -> None:
        self.loaded, self.processors = kernels, processors
        self.memory: dict[int, np.ndarray] = {}
        self.open_handles: list[int] = []
        self.launches: list[tuple[int, int]] = []
        """Kernels, and their blocks"""
        self.refuses = False

    def stream(self) -> int:
        return STREAM

    def device(self) -> tuple[bytes, int]:
        return b"a played GPU    ", self.processors

    def take(self, nbytes: int) -> int:
        memory = np.zeros(nbytes + 256, np.uint8)
        address = -(-memory.ctypes.data // 256) * 256
        self.memory[address] = memory
        return address

    def free(self, address: int) -> None:
        del self.memory[address]

    def export(self, address: int) -> bytes:
        return address.to_bytes(8, "little").ljust(HANDLE_BYTES, b"\0")

    def open(self, handle: bytes) -> int:
        if self.refuses:
            raise RuntimeError("CUDA error: peer access is not supported between these two devices")
        self.open_handles.append(int.from_bytes(handle[:8], "little"))
        return self.open_handles[-1]

    def close(self, address: int) -> None:
        self.open_handles.remove(address)

    def on_device(self, address: int) -> int:
        return address

    def fill(self, address: int, byte: int, nbytes: int, stream: int) -> None:
        assert stream == STREAM
        ctypes.memset(address, byte, nbytes)

    def kernels(self, name: str, text: str, defines: dict[str, int], names: tuple[str, ...]) -> dict[str, int]:
        found = {one: ctypes.cast(getattr(self.loaded, one), ctypes.c_void_p).value for one in names}
        return {one: address or 0 for one, address in found.items()}

    def launch(self, kernel: int, blocks: int, threads: int, argument: ctypes.Structure, stream: int) -> None:
        self.launches.append((kernel, blocks))
        self.loaded.launch_named(ctypes.c_void_p(kernel), blocks, ctypes.byref(argument))


def fake_device() -> SimpleNamespace:
    raw = SimpleNamespace(cuda_stream=STREAM)
    return SimpleNamespace(compute=SimpleNamespace(raw=raw), fault=Fault())


def groups_of(drivers: list[PlayedDriver]) -> list[CudaGroup]:
    """Return ranks that share a page of the host's memory, one for each driver."""
    memory, world = torch.zeros(4096, dtype=torch.uint8), len(drivers)
    end = partial(memory[64:68].fill_, 1)
    words = [HostWords(memory, 64, 128 * (1 + rank), end) for rank in range(world)]
    return [
        CudaGroup(Share(rank, world), fake_device(), words[rank], driver)  # type: ignore[arg-type]
        for rank, driver in enumerate(drivers)
    ]


def ranks_of(kernels: ctypes.CDLL, world: int, processors: int = 2) -> list[CudaGroup]:
    """Return connected ranks of one process."""
    drivers = [PlayedDriver(kernels, world * processors) for _ in range(world)]
    groups = groups_of(drivers)
    handles = [group.handles() for group in groups]
    for group in groups:
        group.connect(handles)
    return groups


def together(*programs: object) -> list[object]:
    """Run a program a rank, each on a thread of its own; return what they return."""
    found: list[object] = [None] * len(programs)

    def run(rank: int) -> None:
        try:
            with torch.inference_mode():
                found[rank] = programs[rank]()  # type: ignore[operator]
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(240)
        assert not thread.is_alive(), "a rank waits for ever"
    for one in found:
        if isinstance(one, BaseException):
            raise one
    return found
