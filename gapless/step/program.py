"""The programs of one step on the compute stream: no host reads, and fixed addresses.

load:    fill the slots of new rows, histories, and page tables beyond the packet
forward: apply the packet -> inputs from the tables -> layers -> logits, and scores of prompt tokens
lanes:   for the rows that ask, before sampling: masks, adjusted logits, cuts
sample:  draw -> finish: advance the tables, publish
lanes:   for the rows that ask, after it: replies to mask makers, log-probabilities

They share only memory at fixed places: the packet, the tables, `Buffers`. So each is captured for its own shapes, and a
step is a chain of graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from gapless.comm.alone import ONE_RANK
from gapless.comm.seam import Group
from gapless.kernels.layout import CUT_VALUE, GENERATION, HEADER_WORDS, LENGTH, PACKET_SLOT, PAGE_WORDS
from gapless.kernels.scores import Scored, lines, pieces, publish
from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Adjustments, Tables
from gapless.model.seam import KVCache, Model, StepInputs
from gapless.step import lanes
from gapless.step.inputs import (
    Batch,
    apply_admissions,
    apply_pages,
    fused_batch,
    mixed_batch,
    sampled_tokens,
    split_groups,
    with_adapters,
)
from gapless.step.keys import ForwardKey, LaneKey, LoadKey, ProgramKey, SampleKey, StepKey
from gapless.step.lane import Buffers
from gapless.step.outbox import OutboxShape
from gapless.step.packet import Packet, prompts_to_score
from gapless.step.processors import Processor
from gapless.step.speculation import Speculation

NEWS = CUT_VALUE
"""[words] First words of a row's state: a leader broadcasts them to its ranks, and samples by the others"""


class RowOptions(NamedTuple):
    """Possible wishes of an engine's rows, and the ranks that compute them."""

    slots: int = 0
    """Most rows with adjusted logits"""
    speculation: Speculation | None = None
    processors: tuple[Processor, ...] = ()
    group: Group = ONE_RANK


class StepProgram:
    """The device state of an engine, and the programs that advance it by one step."""

    least, width = 1, 1
    """Fewest and most tokens of a live row in a step."""
    samples_here = True
    """Whether this rank draws the tokens"""

    def __init__(
        self, model: Model, tables: Tables, cache: KVCache, kernels: Kernels, outbox: OutboxShape,
        options: RowOptions | None = None,
    ) -> None:  # fmt: skip
        slots, speculation, self.processors, self.group = options or RowOptions()
        self.lanes = lanes.LANES
        self.width = outbox.width
        self.drafter = speculation.drafter if speculation else None
        self.head = speculation.head if speculation else None
        self.learner = speculation.learner if speculation else None
        self.samples = max(outbox.rows, speculation.samples if speculation else 0)
        """Most sampled tokens of a step"""
        self.tables = tables
        places = speculation.places if speculation else 1
        self.adjustments = Adjustments.new(slots, model.vocab_size, tables.state.device, places)
        self.cache = cache
        self.kernels = kernels
        self.outbox = outbox
        self.model = model

    def own(self, key: StepKey) -> tuple[ProgramKey, ...]:
        """Return the programs of a step that this rank runs, in order."""
        return key.programs()

    def of(self, key: ProgramKey) -> Callable[..., None]:
        """Return the program of a key, called with the key and the buffers."""
        own: dict[type, Callable[..., None]] = {LoadKey: self.load, ForwardKey: self.forward, SampleKey: self.sample}
        if type(key) in own:
            return own[type(key)]
        number = next(number for number, lane in enumerate(self.lanes) if isinstance(key, lane.owns))

        @wraps(cast(LaneKey, key).run)
        def program(key: LaneKey, at: Buffers) -> None:
            key.run(self, at, *at.lists[number])

        return program

    def load(self, key: LoadKey, at: Buffers) -> None:
        """Write the cached tokens and pages of new rows, and fill their slots."""
        words = at.loads[at.loads.shape[0] - key.words :]
        for row, slots, past in key.loads:
            for name, slot, wishes in slots:
                self.fill(name, row, slot, words[:wishes])
                words = words[wishes:]
            self.tables.history[row, :past].copy_(words[:past])
            words = words[past:]
        if key.pages:
            apply_pages(words.view(-1, PAGE_WORDS), self.tables)

    def fill(self, name: str, row: int, slot: int, wishes: Tensor) -> None:
        """Fill the slot that a new row leases from the lane of this name."""
        next(lane for lane in self.lanes if lane.name == name).fill(self, row, slot, wishes)

    def forward(self, key: ForwardKey, at: Buffers) -> None:
        """Compute logits from the packet."""
        rows = at.words[HEADER_WORDS : HEADER_WORDS + key.packet.rows]
        if self.group.share.world > 1:
            self.tell(rows.long())
        if self.head is not None and key.batch.places > 1:
            self.head.ask(rows[: key.packet.rows - key.packet.chunks], self.tables, key.batch.places - 1)
        batch = split_groups(self.begin(key, at.words), self.cache)
        if key.adapters:
            batch = with_adapters(batch, self.tables)
        hidden = self.run(batch.inputs, self.model.plan(key.batch))
        sampled = sampled_tokens(batch, key.batch, key.samples)
        last = hidden if sampled is None else hidden.index_select(0, sampled)
        self.model.write_logits(last, at.logits[: key.samples * key.batch.places])
        if key.packet.prompts:
            self._score_prompts(key, at, batch, hidden)

    def tell(self, rows: Tensor) -> None:
        """Broadcast the state of these rows after the last step to the other ranks: it was decided here alone."""
        state, places = self._news(rows)
        news = self.tables.history[rows[:, None], places]
        self.group.tell(torch.cat((state, news), dim=1))

    def _news(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the words of the rows' state that a forward reads, int32 [B, NEWS], and the places of their newest
        tokens and drafts in their history, int64 [B, 2W - 1]."""
        state = self.tables.state[:, :NEWS].index_select(0, rows)
        return state, newest(state[:, LENGTH], self.width, self.tables.history.shape[1])

    def run(self, inputs: StepInputs, plan: Any) -> Tensor:
        """Return the model's hidden states; a head drafts first, and verifies."""
        if self.head is not None:
            return self.head.forward(inputs, plan, self.tables, self.cache)
        return self.model.forward(inputs, plan, self.cache)

    def sample(self, key: SampleKey, at: Buffers) -> None:
        """Draw tokens, and end the step."""
        end = HEADER_WORDS + key.rows
        rows, sizes = at.words[HEADER_WORDS:end], at.words[end : end + key.rows] if key.sized else None
        tokens, finite = self.draw(at.logits[: key.samples * key.places], rows[: key.samples])
        out = at.tokens[: key.samples]
        self.kernels.finish(at.words, rows, sizes, tokens, finite, self.tables, at.lines, out)
        if self.learner is not None:
            self.learner(self.kernels, rows[: key.samples], out, self.tables)
        if key.drafts and self.drafter is not None:
            self.drafter(self.kernels, rows[: key.samples], self.tables)

    def begin(self, key: ForwardKey, words: Tensor) -> Batch:
        tables, size = self.tables, self.cache.page_size
        if not key.batch.chunks or self.kernels.begin_mixed is not None:
            return fused_batch(self.kernels, words, key.packet, tables, key.batch, size)
        packet = Packet.of(words, key.packet)
        if key.packet.admissions:
            apply_admissions(packet, tables)
        if key.packet.page_writes:
            apply_pages(packet.pages, tables)
        return mixed_batch(packet, tables, key.batch, size)

    def draw(self, logits: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Draw the tokens of each row, int64 [N, W], and return whether its first logits are finite, bool [N]."""
        tokens, finite = self.kernels.sample(logits, rows, self.tables, self.adjustments.adjusted)
        if self.width == 1:
            return tokens[:, None], finite
        given = self.kernels.accept(tokens, finite, rows, self.tables, self.width)
        return given, finite[: len(rows)]

    def _score_prompts(self, key: ForwardKey, at: Buffers, batch: Batch, hidden: Tensor) -> None:
        """Score the prompt tokens that follow this step's chunk tokens."""
        places = prompts_to_score(at.words, key.packet)
        generations = self.tables.state[:, GENERATION].index_select(0, batch.inputs.rows).long()
        found = []
        for piece in pieces(places.shape[0], self.model.vocab_size):
            index, row, target = places[piece].unbind(1)
            who = Scored(batch.inputs.rows[row], generations[row], batch.inputs.positions[index] + 1, target)
            logits = self.model.logits(hidden.index_select(0, index))
            if self.samples_here:
                found.append(lines(logits.float(), who, key.width))
        if found:
            publish(found, at.scores, at.words[PACKET_SLOT : PACKET_SLOT + 1].long(), self.outbox.prompts)


def newest(length: Tensor, width: int, most: int) -> Tensor:
    """Return the places of the last `width` tokens and the next `width` - 1 drafts in histories of `most` places, by
    the rows' lengths [B]: int64 [B, 2 * width - 1]."""
    places = length.long()[:, None] + torch.arange(-width, width - 1, device=length.device)
    return places.clamp(0, most - 1)  # at either end some are listed twice
