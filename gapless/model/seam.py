"""The seam between a step and a model: bounds on the host, truth on the device.

The host knows exact counts for prefill chunks and upper bounds for decode rows. True positions and lengths
live in device tables; nothing behind this seam may ask the device for one.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor


class BatchShape(NamedTuple):
    """Host integers about one step's batch.

    The first `decode` rows have one query token each; then one row per entry of `chunks`, each (start, count):
    exactly `count` query tokens from position `start`. `bound` is an upper bound of any decode row's KV length.
    """

    decode: int
    chunks: tuple[tuple[int, int], ...]
    bound: int

    @property
    def rows(self) -> int:
        return self.decode + len(self.chunks)

    @property
    def tokens(self) -> int:
        return self.decode + sum(count for _, count in self.chunks)


class StepInputs(NamedTuple):
    """Device tensors of one step: T query tokens of B rows, in batch order. All int64 but the page table.

    Inert rows (finished before this step, still in the batch) have slots in the null page 0 and a KV length of 1.
    """

    ids: Tensor
    """[T] token ids"""
    positions: Tensor
    """[T] position of each token in its sequence"""
    slots: Tensor
    """[T] page * page_size + offset: where this token's KV goes"""
    kv_lens: Tensor
    """[B] KV entries that the row's last query token may read, its own included"""
    rows: Tensor
    """[B] each row's line in the page table"""
    page_table: Tensor
    """[R, W] int32, the device's own table; entry i of a line holds positions i * page_size and on"""
    columns: int
    """The first so many entries of a line cover every bound of the step."""
    starts: Tensor | None = None
    """[B + 1] where each row's query tokens begin in the batch, and T; None when each row has one"""

    @property
    def pages(self) -> Tensor:
        """[B, columns] int64: the batch's lines of the page table. A gather, made anew at each call."""
        return self.page_table[:, : self.columns].index_select(0, self.rows).long()


class KVCache(NamedTuple):
    """The whole KV memory of one model on one device, page-major: all layers of a page lie together."""

    data: Tensor
    """[pages, layers, 2, page_size, kv_heads, head_dim]; page 0 is the null page and belongs to nobody"""

    @classmethod
    def zeros(
        cls, pages: int, layers: int, page_size: int, kv_heads: int, head_dim: int, *, dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:  # fmt: skip
        """A zeroed cache."""
        shape = (pages, layers, 2, page_size, kv_heads, head_dim)
        if device.type != "cpu":
            return cls(torch.zeros(shape, dtype=dtype, device=device))
        # numpy leaves zeroing to the operating system: a page costs memory and time only when it is first used.
        raw = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
        return cls(torch.from_numpy(raw).view(dtype).view(shape))

    @property
    def pages(self) -> int:
        return self.data.shape[0]

    @property
    def page_size(self) -> int:
        return self.data.shape[3]


class Model(Protocol):
    """What a step needs of a model. `plan` runs on the host and sees integers; the rest runs on the device."""

    vocab_size: int
    max_model_len: int
    bounded: bool
    """Whether shapes on the device depend on a batch's bound of KV lengths."""

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one KV page."""
        ...

    def new_cache(self, pages: int, page_size: int, device: torch.device) -> KVCache: ...

    def plan(self, shape: BatchShape) -> Any:
        """Host decisions for this batch (kernel choice, split counts), from bounds alone."""
        ...

    def forward(self, inputs: StepInputs, plan: Any, cache: KVCache) -> Tensor:
        """Hidden states [T, hidden]; writes the KV of all T tokens."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, vocab]."""
        ...
