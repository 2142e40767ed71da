"""The interface between a step and a model: bounds on the host, actual values on the device.

The host has exact counts for prefill chunks and upper bounds for decode rows. True positions and lengths
live in device tables; no implementation may ask the device for one.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
import torch
from torch import Tensor

from gapless.device.facts import on_host
from gapless.kernels.views import LayerRows, RowBatch
from gapless.memory.groups import PageGroup
from gapless.model.adapters import AdapterTables
from gapless.model.config import ModelConfig


class BatchShape(NamedTuple):
    """Host integers about one step's batch.

    The first `decode` rows have one query token each; then one row per entry of `chunks`, each (start, count):
    exactly `count` query tokens from position `start`. `bound` is an upper bound of any decode row's KV length.
    With `places` above 1 a request that decodes has as many of these rows, for consecutive tokens: all first tokens
    come first.
    """

    decode: int
    chunks: tuple[tuple[int, int], ...]
    bound: int
    places: int = 1

    @property
    def rows(self) -> int:
        return self.decode + len(self.chunks)

    @property
    def tokens(self) -> int:
        return self.decode + self.prompt

    @property
    def prompt(self) -> int:
        """Query tokens of the chunks."""
        return sum([count for _, count in self.chunks]) if self.chunks else 0


class GroupInputs(NamedTuple):
    """The inputs of one step that differ from page group to page group."""

    slots: Tensor
    """int64 [T] where this token's KV goes in the group's cache"""
    page_table: Tensor
    """[R, W] int32, the group's part of the device's own table"""


class StepInputs(NamedTuple):
    """Device tensors of one step: T query tokens of B rows, in batch order. All int64 but the page table.

    Inert rows (finished before this step, still in the batch) have slots in the null page 0 and a KV length of 1.
    Slots and page table are the model's first page group's; `group` gives the same for another.
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
    """The first `columns` entries of a line cover every bound of the step."""
    starts: Tensor | None = None
    """[B + 1] where each row's query tokens begin in the batch, and T; None when each row has one"""
    others: tuple[GroupInputs, ...] = ()
    """Inputs of the page groups after the first, in the model's order"""
    adapters: Tensor | None = None
    """[T] slot of each token's adapter, 0 for none; None where no row has one"""
    places: int = 1
    """Rows of one token that a request has which decodes. Above 1, they read KV that others of the batch write."""

    def group(self, index: int) -> StepInputs:
        """The inputs of layers whose KV is in the page group `index`."""
        if index == 0:
            return self
        other = self.others[index - 1]
        return self._replace(slots=other.slots, page_table=other.page_table)

    def layer_rows(self, cache: KVCache) -> LayerRows:
        """Return the rows as layers read them."""
        batch = RowBatch(self.rows, self.kv_lens, self.starts)
        return LayerRows(self.slots, batch, cache.data, self.page_table, self.adapters, self.places == 1, cache.scales)

    @property
    def pages(self) -> Tensor:
        """[B, columns] int64: the batch's lines of the page table. Gathered at each call."""
        return self.page_table[:, : self.columns].index_select(0, self.rows).long()


class KVCache(NamedTuple):
    """The whole KV memory of one model on one device, page-major: all layers of a page are contiguous."""

    data: Tensor
    """[pages, layers, 2, page_size, kv_heads, head_dim] of the first page group; page 0 is the null page, which no
    request owns"""
    others: tuple[Tensor, ...] = ()
    """The memory of the page groups after the first, in the model's order: as many pages of as many tokens each, with
    layers and heads of their own"""
    scales: Tensor | None = None
    """float32 [layers, 2] of the first page group: see `KV`"""

    def group(self, index: int) -> KVCache:
        """The memory of the page group `index` alone."""
        return KVCache(self.others[index - 1] if index else self.data, scales=None if index else self.scales)

    @classmethod
    def zeros(
        cls,
        pages: int,
        layers: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> KVCache:
        return cls.of((pages, layers, 2, page_size, kv_heads, head_dim), dtype, device)

    @classmethod
    def of(
        cls, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, scales: Tensor | None = None
    ) -> KVCache:
        """Return a zeroed memory of one page group."""
        if not on_host(torch.empty(0, device=device)):
            return cls(torch.zeros(shape, dtype=dtype, device=device), scales=scales)
        # numpy leaves zeroing to the operating system: a page costs memory and time only when it is first used.
        raw = np.zeros(math.prod(shape) * dtype.itemsize, np.uint8)
        return cls(torch.from_numpy(raw).view(dtype).view(shape), scales=scales)

    @property
    def pages(self) -> int:
        return self.data.shape[0]

    @property
    def page_size(self) -> int:
        return self.data.shape[3]


class Model(Protocol):
    """A model, as a step uses it. `plan` runs on the host and sees integers; the rest runs on the device."""

    vocab_size: int
    dtype: torch.dtype
    """Data type of the logits"""
    max_model_len: int
    bounded: bool
    """Whether shapes on the device depend on a batch's bound of KV lengths."""

    def groups(self) -> tuple[PageGroup, ...]:
        """The model's page groups: each has a pool of pages, a part of the page table, and a rule of its own."""
        ...

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one KV page, of all groups together."""
        ...

    def new_cache(self, pages: int, page_size: int, device: torch.device) -> KVCache:
        """A zeroed cache of `pages` pages in each group, the null page included."""
        ...

    def plan(self, shape: BatchShape) -> Any:
        """Host decisions for this batch (kernel choice, split counts), from bounds alone."""
        ...

    def forward(self, inputs: StepInputs, plan: Any, cache: KVCache) -> Tensor:
        """Hidden states [T, hidden]; writes the KV of all T tokens."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocab], in the model's dtype."""
        ...

    def write_logits(self, hidden: Tensor, out: Tensor) -> None:
        """Write `logits(hidden)` to `out` [N, vocab]."""
        ...

    def first_layers(self) -> Self:
        """The model cut down to its first layers, whose forwards launch every kernel that the whole one's do."""
        ...


class LoadedModel(Model, Protocol):
    """A model, as an engine holds it."""

    config: ModelConfig
    spare_layers: int
    """Layers of its KV memory that it leaves to others"""
    adapters: AdapterTables | None
