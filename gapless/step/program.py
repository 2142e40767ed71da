"""The program of one step, as it runs on the compute stream: no host read, no address that changes.

apply packet -> inputs from tables -> forward -> logits -> sample -> finish: advance the tables, publish -> score
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapless.kernels.layout import GENERATION, LENGTH, PACKET_SLOT
from gapless.kernels.seam import Kernels
from gapless.model.seam import BatchShape, KVCache, Model
from gapless.step.inputs import Batch, apply_admissions, apply_pages, decode_batch, fused_mixed_batch, mixed_batch
from gapless.step.logprobs import Scored, lines, pieces
from gapless.step.outbox import table_words
from gapless.step.packet import Packet, PacketShape, to_score
from gapless.step.sampler import SampleMode, sample
from gapless.step.tables import RowParams, Tables


class StepKey(NamedTuple):
    """The host integers that fix a step's shapes. `graphs.GraphKey` makes one that is filled up to a bucket."""

    batch: BatchShape
    packet: PacketShape
    samples: int
    """The first this many rows of the batch sample a token."""
    mode: SampleMode
    plan: Any
    """The model's own host decisions for this batch."""


class StepProgram:
    """The device state of an engine, and the function that advances it by one step."""

    def __init__(self, model: Model, tables: Tables, cache: KVCache, kernels: Kernels) -> None:
        self.tables = tables
        self.cache = cache
        self.kernels = kernels
        self._model = model

    def run(self, key: StepKey, words: Tensor, outboxes: Tensor) -> None:
        """One step from the packet in `words` int32, published to the packet's slot of `outboxes` int32 [slots, M]."""
        tables, batch = self.tables, self._begin(key, words)
        hidden = self._model.forward(batch.inputs, key.plan, self.cache)
        last = hidden if batch.last is None else hidden.index_select(0, batch.last[: key.samples])
        logits, wanted = self._model.logits(last), key.packet.logprobs
        raw = logits.clone() if wanted.samples and key.mode.bans else logits  # bans are written into the logits
        before = tables.state.index_select(0, batch.rows) if wanted.lines else None
        slot = words[PACKET_SLOT : PACKET_SLOT + 1].long()  # `finish` moves it on
        tokens, finite = self._sample(logits, batch.rows[: key.samples], key.mode)
        tokens = self.kernels.finish(
            words, batch.rows, batch.sizes, tokens, finite, tables.state, tables.params, tables.history, outboxes
        )
        if before is not None:
            scored = [part.flatten() for part in self._score(words, hidden, raw, tokens, batch, before, key)]
            start = table_words(key.samples)
            outboxes[:, start : start + wanted.words].index_copy_(0, slot, torch.cat(scored)[None])

    def _begin(self, key: StepKey, words: Tensor) -> Batch:
        tables, size = self.tables, self.cache.page_size
        if not key.batch.chunks:
            return decode_batch(self.kernels, words, key.packet, tables, key.batch, size)
        if self.kernels.begin_mixed is not None:
            return fused_mixed_batch(self.kernels, words, key.packet, tables, key.batch, size)
        packet = Packet.of(words, key.packet)
        if key.packet.admissions:
            apply_admissions(packet, tables)
        if key.packet.page_writes:
            apply_pages(packet, tables)
        return mixed_batch(packet, tables, key.batch, size)

    def _sample(self, logits: Tensor, rows: Tensor, mode: SampleMode) -> tuple[Tensor, Tensor]:
        """Tokens int64 [N], and whether the row's logits are finite."""
        state, params = self.tables.state, self.tables.params
        if not mode.filters and not mode.bans:
            return self.kernels.sample(logits, rows, state, params, mode.random)
        logits = logits.float()
        finite = logits.amax(-1).isfinite()
        length = state[:, LENGTH].index_select(0, rows)
        return sample(logits, RowParams.of(params.index_select(0, rows)), length, mode), finite

    def _score(
        self, words: Tensor, hidden: Tensor, logits: Tensor, tokens: Tensor, batch: Batch, state: Tensor, key: StepKey
    ) -> Iterator[Tensor]:
        """Lines of prompt tokens that follow those of this step's chunks, then of sampled tokens, from raw logits."""
        samples, prompt = to_score(words, key.packet)
        width, generations = key.packet.logprobs.width, state[:, GENERATION].long()
        for piece in pieces(prompt.shape[0], logits.shape[1]):
            index, row, target = prompt[piece].unbind(1)
            who = Scored(batch.rows[row], generations[row], batch.inputs.positions[index] + 1, target)
            yield lines(self._model.logits(hidden.index_select(0, index)).float(), who, width)
        for piece in pieces(samples.shape[0], logits.shape[1]):
            row = samples[piece]
            who = Scored(batch.rows[row], generations[row], state[:, LENGTH][row].long(), tokens[row].long())
            yield lines(logits.index_select(0, row).float(), who, width)
