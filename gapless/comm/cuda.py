"""The group of ranks on GPUs of one host, several on one of them or each on its own: `native/sums.cu` over memory that
the ranks map of each other."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapless.base.errors import ConfigError, EngineError
from gapless.base.share import Share
from gapless.comm.shared import LINE_BYTES, STOP_AT, WAITED_AT, Commons
from gapless.device import CudaDevice
from gapless.device.driver import HANDLE_BYTES, Driver
from gapless.device.facts import mps_runs

log = logging.getLogger("gapless.comm")

MOST_CUDA_RANKS, MOST_BLOCKS, THREADS = 8, 64, 512
MOST_SENT = 2 << 20
"""Bytes that a rank sends for a sum in one turn; larger sums take two, and send less"""
LARGE_PIECE = 8 << 20
"""Most bytes of a launch of a large sum"""
TELL_WORDS = 64 << 10
KEPT_CELLS = 8 * THREADS
"""Most cells of a row that is summed and normed in one launch"""
CHANNEL_BYTES = 2 * (16 << 10)
SUM_KINDS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32", torch.int64: "i64"}
_FLOATS = ("bf16", "f16", "f32")
SUM_KERNELS = (
    "tell", "give", "take", *(f"{what}_{kind}" for what in ("add", "add_large") for kind in SUM_KINDS.values()),
    *(f"{what}_{kind}" for what in ("add_norm", "norm") for kind in _FLOATS),
)  # fmt: skip
SUMS_SOURCE = Path(__file__).with_name("native") / "sums.cu"
_PLACES = ("sums", "tells", "acks", "flags", "inbox", "outbox", "slots", "lines", "mail", "receipts")
_MUTED, _STATE_BYTES = 32, 4096
"""The offset of a State's word `muted`, and room for a State"""
_RECORD = struct.Struct(f"<QQ16sQ{HANDLE_BYTES}s")
HANDLES_BYTES = _RECORD.size
"""Bytes of `CudaGroup.handles`"""

_Address, _Word, _Long = ctypes.c_void_p, ctypes.c_uint32, ctypes.c_uint64


class CallWords(ctypes.Structure):
    """The argument of every kernel: `Call` of sums.cu."""

    _fields_ = [
        ("arena", _Address * MOST_CUDA_RANKS), *((place, _Long) for place in _PLACES), ("state", _Address),
        *((name, _Address) for name in ("stop", "board", "x", "y", "out", "weight")),
        ("eps", ctypes.c_float), *((name, _Word) for name in ("rank", "cells", "half", "part", "early")),
        *((name, _Word) for name in ("count", "rows", "width", "pitch")),
    ]  # fmt: skip


class Arena(NamedTuple):
    """The places in the memory that a rank exports: the same for all ranks."""

    cells: int
    """8-byte cells of a small sum"""
    part: int
    """16-byte units of a rank's share of a large sum's piece"""
    offsets: dict[str, int]
    nbytes: int

    @classmethod
    def of(cls, world: int) -> Arena:
        cells, part = MOST_SENT // (world - 1) // 8, -(-LARGE_PIECE // 16 // world)
        blocks = world * MOST_BLOCKS
        sizes = {
            "sums": 2 * world * cells * 16, "tells": 2 * (TELL_WORDS // 2) * 16, "acks": 2 * world * 16,
            "flags": 2 * blocks * 4, "inbox": 2 * world * part * 16, "outbox": 2 * world * part * 16,
            "slots": blocks * CHANNEL_BYTES, "lines": 2 * blocks * 4, "mail": blocks * 4, "receipts": MOST_BLOCKS * 4,
            "state": _STATE_BYTES,
        }  # fmt: skip
        ends = list(accumulate(-(-size // 256) * 256 for size in sizes.values()))
        offsets = dict(zip(sizes, [0, *ends], strict=False))
        return cls(cells, part, offsets, -(-ends[-1] // (2 << 20)) * (2 << 20))


class HostWords(NamedTuple):
    """Words of the host that kernels of all ranks reach."""

    memory: Tensor
    """uint8, shared by all ranks, pinned by the device of this one"""
    stop: int
    """The offset of the word of 32 bits that ends all waits; the same memory for all ranks"""
    board: int
    """The offset of this rank's words of 64 bits: nanoseconds of waiting, another's word, launches. Written by `tell`,
    and during long waits"""
    end: Callable[[], None]
    """Sets the word that ends all waits"""


class CudaGroup:
    """Implements `Group` by kernels of one stream, which a capture records. Ranks exchange `handles`, then connect."""

    def __init__(self, share: Share, device: CudaDevice, words: HostWords, driver: Driver | None = None) -> None:
        """Raises ConfigError: there are more ranks than this serves, or a library is missing."""
        if not 2 <= share.world <= MOST_CUDA_RANKS:
            text = f"CUDA serves 2 to {MOST_CUDA_RANKS} ranks on one host, not {share.world}"
            raise ConfigError(f"tensor_parallel_size: {text}")
        self.share, self.device, self.driver = share, device, driver or Driver(device.torch_device)
        self._end = words.end
        self._stop = words.memory[words.stop : words.stop + 4].view(torch.int32).numpy()
        self._stream: int = device.compute.raw.cuda_stream
        self.arena = Arena.of(share.world)
        self._own = self.driver.take(self.arena.nbytes)
        self._mapped: list[int] = []
        self._blocks = 0
        self.apart = True
        """Whether each rank has a GPU of its own"""
        self.state = self._own + self.arena.offsets["state"]
        offsets, host = (
            [self.arena.offsets[place] for place in _PLACES],
            self.driver.on_device(words.memory.data_ptr()),
        )
        self.call = CallWords(
            (_Address * MOST_CUDA_RANKS)(), *offsets, self.state, host + words.stop, host + words.board,
            rank=share.rank, cells=self.arena.cells, half=TELL_WORDS // 2, part=self.arena.part,
        )  # fmt: skip
        defines = {"WORLD": share.world}
        self._kernels = self.driver.kernels("sums", SUMS_SOURCE.read_text(encoding="utf-8"), defines, SUM_KERNELS)
        self._number = next(_numbers)
        _groups[self._number] = self
        device.fault.wakes(self.stop)
        device.fault.asks(self._reason)

    def handles(self) -> bytes:
        """Return what the other ranks need to map this rank's memory, for `connect`."""
        uuid, processors = self.driver.device()
        return _RECORD.pack(os.getpid(), self._own, uuid, processors, self.driver.export(self._own))

    def connect(self, handles: Sequence[bytes]) -> None:
        """Map the memory of all ranks, whose `handles` come in their order.

        Raises:
            ConfigError: two of the GPUs cannot reach each other's memory, or have too many ranks.
        """
        records = [_RECORD.unpack(one) for one in handles]
        assert len(records) == self.share.world
        uuids = [uuid for _, _, uuid, _, _ in records]
        # Blocks of one launch wait for each other: all of them must fit a GPU beside the ones of its other ranks.
        rooms = [processors // uuids.count(uuid) for _, _, uuid, processors, _ in records]
        self._blocks = min(MOST_BLOCKS, *rooms)
        if not self._blocks:
            raise ConfigError("device_ids names one GPU for more ranks than it has multiprocessors: name other GPUs")
        self.apart = len({*uuids}) == len(uuids)
        self.call.early = int(self.apart)
        for rank, (process, address, _, _, handle) in enumerate(records):
            if process != os.getpid():
                address = self._open(rank, handle)
            self.call.arena[rank] = address

    def _open(self, rank: int, handle: bytes) -> int:
        try:
            address = self.driver.open(handle)
        except RuntimeError as error:
            raise ConfigError(
                f"rank {self.share.rank} cannot map the GPU memory of rank {rank} ({error}): name GPUs of one host that"
                " reach each other in device_ids, and give containers the same IPC namespace"
            ) from error
        self._mapped.append(address)
        return address

    def close(self) -> None:
        mapped, self._mapped = self._mapped, []
        own, self._own = self._own, 0
        for address in mapped:
            self.driver.close(address)
        if own:
            self.driver.free(own)

    def add(self, y: Tensor) -> Tensor:
        _add(y, self._number)
        return y

    def add_norm(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
        found: Tensor = _add_norm(x, y, weight, eps, self._number)
        return found

    def gather(self, part: Tensor, out: Tensor) -> Tensor:
        _gather(part, out, self._number)
        return out

    def tell(self, x: Tensor) -> Tensor:
        _tell(x, self._number)
        return x

    @contextmanager
    def muted(self) -> Iterator[None]:
        # In the order of the stream: earlier launches are not muted, and a graph captured here is not, once replayed.
        self.driver.fill(self.state + _MUTED, 1, 4, self._stream)
        try:
            yield
        finally:
            self.driver.fill(self.state + _MUTED, 0, 4, self._stream)

    def stop(self) -> None:
        self._end()

    def _reason(self) -> str:
        return "the ranks were stopped, and what programs leave is undefined" if self._stop[0] else ""

    def add_here(self, y: Tensor) -> None:
        """Launch `add`."""
        kind, nbytes, unit = SUM_KINDS[y.dtype], y.nbytes, 8 if y.nbytes <= 8 * self.arena.cells else 16
        assert y.is_contiguous()
        if nbytes % unit or y.data_ptr() % unit:
            return self._add_apart(y, unit)
        if unit == 8:
            self._launch(f"add_{kind}", -(-nbytes // 8 // THREADS), y=y.data_ptr(), count=nbytes // 8)
            return
        for at in range(0, nbytes, LARGE_PIECE):
            units = min(LARGE_PIECE, nbytes - at) // 16
            self._launch(f"add_large_{kind}", MOST_BLOCKS, y=y.data_ptr() + at, count=units)

    def _add_apart(self, y: Tensor, unit: int) -> None:
        """Add numbers that are no whole units where they are: in as many as ranks whose numbers are whole ones."""
        whole = y.new_zeros(-(-y.nbytes // unit) * unit // y.itemsize)
        whole[: y.numel()].copy_(y.view(-1))
        self.add_here(whole)
        y.view(-1).copy_(whole[: y.numel()])

    def add_norm_here(self, x: Tensor, y: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Launch `add_norm`."""
        assert x.is_contiguous() and y.is_contiguous() and x.shape == y.shape and x.dtype == y.dtype
        assert weight.dtype == torch.float32 and weight.is_contiguous()
        assert x.shape[1] * x.itemsize % 8 == 0 and y.data_ptr() % 8 == x.data_ptr() % 8 == 0
        rows, width = x.shape[0], x.shape[1] * x.itemsize // 8
        out = torch.empty_like(x)
        given: dict[str, Any] = {
            "x": x.data_ptr(),
            "y": y.data_ptr(),
            "out": out.data_ptr(),
            "weight": weight.data_ptr(),
            "eps": eps,
        }
        if y.nbytes <= 8 * self.arena.cells and width <= KEPT_CELLS:
            self._launch(f"add_norm_{SUM_KINDS[x.dtype]}", rows, rows=rows, width=width, **given)
        else:
            self.add_here(y)
            self._launch(f"norm_{SUM_KINDS[x.dtype]}", rows, True, width=width, **given)
        return out

    def gather_here(self, part: Tensor, out: Tensor) -> None:
        """Launch `gather`."""
        assert part.is_contiguous() and out.is_contiguous() and part.dtype == out.dtype and part.itemsize % 2 == 0
        rows, width = part.shape[0], part.shape[1] * part.itemsize
        name, pitch = ("take", out.shape[1] * out.itemsize) if self.share.leads else ("give", 0)
        places: dict[str, Any] = {"x": part.data_ptr(), "out": out.data_ptr()}
        self._launch(name, 16 * rows, rows=rows, width=width, pitch=pitch, **places)

    def tell_here(self, x: Tensor) -> None:
        """Launch `tell`."""
        assert x.dtype == torch.int32 and x.is_contiguous()
        for at in range(0, x.numel(), TELL_WORDS):
            words = min(TELL_WORDS, x.numel() - at)
            self._launch("tell", -(-words // 2 // THREADS), x=x.data_ptr() + 4 * at, count=words)

    def _launch(self, name: str, blocks: int, any_grid: bool = False, **given: Any) -> None:
        """Enqueue a kernel with as many blocks as suit the sizes: all ranks have the same."""
        if not blocks:
            return
        assert self._blocks, "connect first"
        assert self.driver.stream() == self._stream, "a group belongs to one stream"
        call = CallWords.from_buffer_copy(self.call)
        for field, value in given.items():
            setattr(call, field, value)
        grid = blocks if any_grid else min(blocks, self._blocks)
        self.driver.launch(self._kernels[name], grid, THREADS, call, self._stream)


def group_of_gpus(device: CudaDevice, commons: Commons) -> CudaGroup:
    """Return the group for a rank's tensors on its GPU. Every rank calls it, and waits for the others.

    Raises:
        ConfigError: see `CudaGroup`.
        EngineError: the ranks were stopped.
    """
    share, at = commons.share, commons.board_at
    memory = mmap.mmap(commons.fd, -(-(at + share.world * LINE_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE)
    pinned = device.host_memory(len(memory), torch.frombuffer(memory, dtype=torch.uint8))
    words = HostWords(pinned, STOP_AT, at + share.rank * LINE_BYTES + WAITED_AT, commons.group.stop)
    group = CudaGroup(share, device, words)
    # The host's group brings every rank's record to all.
    records = torch.zeros(share.world, HANDLES_BYTES, dtype=torch.uint8)
    records[share.rank] = torch.frombuffer(bytearray(group.handles()), dtype=torch.uint8)
    try:
        commons.group.add(records.view(torch.int64))
    except RuntimeError as error:
        raise EngineError(str(error)) from error
    group.connect([bytes(record.numpy()) for record in records])
    if share.leads and not group.apart and not mps_runs():
        log.warning(
            "device_ids: ranks share a GPU without NVIDIA's MPS, so they take turns, and each sum takes milliseconds: "
            "start nvidia-cuda-mps-control -d first, or name a GPU for each rank"
        )
    return group


_groups: weakref.WeakValueDictionary[int, CudaGroup] = weakref.WeakValueDictionary()
_numbers = count()
_LIBRARY: Any = torch.library.Library("gapless_comm", "FRAGMENT")  # type: ignore[no-untyped-call]


def _operator(name: str, arguments: str, run: Any) -> Any:
    """Register an operation as an operator of torch, so that dispatch modes see its reads and writes."""
    _LIBRARY.define(f"cuda_{name}({arguments}, int group)" + (" -> Tensor" if name == "add_norm" else " -> ()"))
    _LIBRARY.impl(f"cuda_{name}", lambda *args: run(_groups[args[-1]], *args[:-1]), "CompositeExplicitAutograd")
    return getattr(torch.ops.gapless_comm, f"cuda_{name}").default


_add = _operator("add", "Tensor(a!) y", CudaGroup.add_here)
_add_norm = _operator("add_norm", "Tensor(a!) x, Tensor(b!) y, Tensor weight, float eps", CudaGroup.add_norm_here)
_gather = _operator("gather", "Tensor part, Tensor(a!) out", CudaGroup.gather_here)
_tell = _operator("tell", "Tensor(a!) x", CudaGroup.tell_here)
