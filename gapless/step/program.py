"""The program of one step, as it runs on the compute stream: no host read, no address that changes.

apply packet -> inputs from tables -> forward -> logits -> sample -> score -> post-update -> publish
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapless.base.records import Flag
from gapless.model.seam import BatchShape, KVCache, Model
from gapless.step.inputs import Batch, apply_packet, build
from gapless.step.logprobs import Scored, lines, pieces
from gapless.step.outbox import assemble
from gapless.step.packet import Packet, PacketShape, to_score
from gapless.step.sampler import SampleMode, sample
from gapless.step.tables import ACTIVE, COMPUTED, GENERATION, LENGTH, NO_TOKEN, RowParams, Tables


class StepKey(NamedTuple):
    """The host integers that fix a step's shapes: what a captured graph would be keyed by."""

    batch: BatchShape
    packet: PacketShape
    samples: int
    """The first this many rows of the batch sample a token."""
    mode: SampleMode
    plan: Any
    """The model's own host decisions for this batch."""


class StepProgram:
    """The device state of an engine, and the function that advances it by one step."""

    def __init__(self, model: Model, tables: Tables, cache: KVCache) -> None:
        self.tables = tables
        self.cache = cache
        self._model = model

    def run(self, key: StepKey, words: Tensor) -> Tensor:
        """One step from the packet in `words` (int32, on the device); returns the outbox's words, in any shape."""
        packet = Packet.of(words, key.packet)
        apply_packet(packet, self.tables)
        batch = build(packet, self.tables, key.batch, self.cache.page_size)
        hidden = self._model.forward(batch.inputs, key.plan, self.cache)
        last = hidden if batch.last is None else hidden.index_select(0, batch.last[: key.samples])
        logits, wanted = self._model.logits(last), key.packet.logprobs
        raw = logits.clone() if wanted.samples and key.mode.bans else logits  # bans are written into the logits
        tokens, flags = self._sample(logits, batch, key)
        scored = [*self._score(words, hidden, raw, tokens, batch, key)] if wanted.lines else []
        self._advance(batch, tokens, flags)
        sampled = slice(0, key.samples)
        table = assemble(packet.header, batch.rows[sampled], batch.state[sampled, GENERATION], tokens, flags)
        return torch.cat([part.flatten() for part in (table, *scored)]) if scored else table

    def _sample(self, logits: Tensor, batch: Batch, key: StepKey) -> tuple[Tensor, Tensor]:
        """Tokens and flags, int32 [N]; inert and failed rows give NO_TOKEN."""
        state = batch.state[: key.samples]
        params = RowParams.of(self.tables.params.index_select(0, batch.rows[: key.samples]))
        finite = logits.amax(-1).isfinite()
        tokens = sample(logits, params, state[:, LENGTH], key.mode).int()
        length = state[:, LENGTH] + 1
        stops = (params.stop_ids == tokens[:, None]).any(-1)
        flags = torch.where(length >= params.max_len, int(Flag.LENGTH), int(Flag.LIVE))
        flags = torch.where(stops, int(Flag.STOP), flags)
        flags = torch.where(finite, flags, int(Flag.ERROR))
        active = state[:, ACTIVE].bool()
        flags = torch.where(active, flags, int(Flag.INERT)).int()
        return torch.where(active & finite, tokens, NO_TOKEN), flags

    def _score(
        self, words: Tensor, hidden: Tensor, logits: Tensor, tokens: Tensor, batch: Batch, key: StepKey
    ) -> Iterator[Tensor]:
        """Lines of prompt tokens that follow those of this step's chunks, then of sampled tokens, from raw logits."""
        samples, prompt = to_score(words, key.packet)
        width, generations = key.packet.logprobs.width, batch.state[:, GENERATION].long()
        for piece in pieces(prompt.shape[0], logits.shape[1]):
            index, row, target = prompt[piece].unbind(1)
            who = Scored(batch.rows[row], generations[row], batch.inputs.positions[index] + 1, target)
            yield lines(self._model.logits(hidden.index_select(0, index)), who, width)
        for piece in pieces(samples.shape[0], logits.shape[1]):
            row = samples[piece]
            who = Scored(batch.rows[row], generations[row], batch.state[:, LENGTH][row].long(), tokens[row].long())
            yield lines(logits.index_select(0, row), who, width)

    def _advance(self, batch: Batch, tokens: Tensor, flags: Tensor) -> None:
        """Append tokens, move lengths, and make finished rows inert."""
        samples, tables = tokens.shape[0], self.tables
        state, rows = batch.state, batch.rows
        active = state[:, ACTIVE]
        step = active if batch.sizes is None else active * batch.sizes.int()
        state[:, COMPUTED] += step
        length = state[:samples, LENGTH]
        written = tokens >= 0
        # A row without a token rewrites the null row's history, so that every index is in range.
        tables.history.index_put_(
            (torch.where(written, rows[:samples], 0), torch.where(written, length, 0).long()), tokens
        )
        length += written.int()
        active[:samples] *= (flags == int(Flag.LIVE)).int()
        tables.state.index_copy_(0, rows, state)
