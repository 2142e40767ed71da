"""The programs of one step on the compute stream: no host reads, and fixed addresses.

load:    fill the slots of new rows with adjusted logits, histories, and page tables beyond the packet
forward: apply the packet -> inputs from the tables -> layers -> logits, and scores of prompt tokens
mask:    fetch the masks of rows with matchers
adjust:  biases, penalties and processors, for rows with any, and the cuts of their filters
cut:     the cuts of other rows with filters
sample:  draw -> finish: advance the tables, publish
reply:   the tokens of masked rows, and their drafts, to the mask makers
score:   log-probabilities of sampled tokens, for rows that want them

They share only memory at fixed places: the packet, the tables, `Buffers`. So each is captured for its own shapes, and a
step is a chain of graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from gapless.kernels.layout import GENERATION, HEADER_WORDS, PACKET_SLOT, PAGE_WORDS
from gapless.kernels.scores import Scored, lines, pieces, publish
from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Adjustments, Tables
from gapless.model.seam import KVCache, Model, StepInputs
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
from gapless.step.keys import AdjustKey, CutKey, ForwardKey, LoadKey, MaskKey, ProgramKey, ReplyKey, SampleKey, ScoreKey
from gapless.step.outbox import OutboxShape
from gapless.step.packet import Packet, prompts_to_score
from gapless.step.processors import Processor, process
from gapless.step.speculation import Speculation


class Buffers(NamedTuple):
    """Memory shared by the programs of a step besides the tables, for up to R rows."""

    words: Tensor
    """int32, the packet from its header on"""
    loads: Tensor
    """int32, the fill of new rows outside the packet, right-aligned"""
    cut: Tensor
    """int32 [R * W], the list of that lane, as are `score`, `mask` and `adjust`"""
    score: Tensor
    mask: Tensor
    adjust: Tensor
    slots: Tensor
    """int32 [R * W], the slots in `Adjustments` of the rows in `adjust`, place after place"""
    logits: Tensor
    """[S, vocab] in the model's dtype, of the first rows of the batch, place after place"""
    tokens: Tensor
    """int32 [R, W], their tokens"""
    lines: Tensor
    """int32 [slots, M], the published outboxes"""
    scores: Tensor
    """int32 [slots, M], scores of prompt tokens: `lines`, or device memory if `lines` is the host's"""
    mail: Tensor
    """int32 [rows, words], host memory: the mail of each row of the tables"""


class StepProgram:
    """The device state of an engine, and the programs that advance it by one step."""

    least, width = 1, 1
    """Fewest and most tokens of a live row in a step."""

    def __init__(
        self, model: Model, tables: Tables, cache: KVCache, kernels: Kernels, outbox: OutboxShape, slots: int = 0,
        speculation: Speculation | None = None, processors: tuple[Processor, ...] = (),
    ) -> None:  # fmt: skip
        """`slots` is the most rows with adjusted logits."""
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
        self.processors = processors

    def of(self, key: ProgramKey) -> Callable[..., None]:
        """Return the program of a key."""
        programs: dict[type, Callable[..., None]] = {
            LoadKey: self.load, ForwardKey: self.forward, MaskKey: self.mask, AdjustKey: self.adjust, CutKey: self.cut,
            SampleKey: self.sample, ReplyKey: self.reply, ScoreKey: self.score,
        }  # fmt: skip
        return programs[type(key)]

    def load(self, key: LoadKey, at: Buffers) -> None:
        """Write the cached tokens and pages of new rows, and fill slots with their wishes. Nothing is counted yet."""
        slots, history = self.adjustments, self.tables.history
        words = at.loads[at.loads.shape[0] - key.words :]
        for row, slot, wishes, past in key.loads:
            if wishes:
                slots.wishes[slot, :wishes].copy_(words[:wishes])
                slots.counts[slot].zero_()
                slots.counted[slot].zero_()
                slots.owners[slot].fill_(row)
            history[row, :past].copy_(words[wishes : wishes + past])
            words = words[wishes + past :]
        if key.pages:
            apply_pages(words.view(-1, PAGE_WORDS), self.tables)

    def forward(self, key: ForwardKey, at: Buffers) -> None:
        """Compute logits from the packet."""
        if self.head is not None and key.batch.places > 1:
            rows = at.words[HEADER_WORDS : HEADER_WORDS + key.packet.rows - key.packet.chunks]
            self.head.ask(rows, self.tables, key.batch.places - 1)
        batch = split_groups(self.begin(key, at.words), self.cache)
        if key.adapters:
            batch = with_adapters(batch, self.tables)
        hidden = self.run(batch.inputs, self.model.plan(key.batch))
        sampled = sampled_tokens(batch, key.batch, key.samples)
        last = hidden if sampled is None else hidden.index_select(0, sampled)
        self.model.write_logits(last, at.logits[: key.samples * key.batch.places])
        if key.packet.prompts:
            self._score_prompts(key, at, batch, hidden)

    def run(self, inputs: StepInputs, plan: Any) -> Tensor:
        """Return the model's hidden states; a head drafts first, and verifies."""
        if self.head is not None:
            return self.head.forward(inputs, plan, self.tables, self.cache)
        return self.model.forward(inputs, plan, self.cache)

    def mask(self, key: MaskKey, at: Buffers) -> None:
        """Fetch the masks of the listed rows from their mail, or mark them as late."""
        batch, places = key.drafted
        self.kernels.mask(at.mask[: key.rows], self._rows(at, batch), self.tables, at.mail, places)

    def adjust(self, key: AdjustKey, at: Buffers) -> None:
        """Adjust the logits of the listed rows into their slots, and find the cuts of their filters."""
        slots = self.adjustments
        index, rows = at.adjust[: key.rows], self._rows(at, key.batch)
        self.kernels.adjust(at.logits[: len(rows) * key.places], index, rows, self.tables, slots)
        if key.processors:
            process(self.processors, key.processors, rows.index_select(0, index), self.tables, slots)
        if key.filters is not None:
            listed = at.slots[: key.rows * key.places]
            self.kernels.cut(slots.adjusted.flatten(0, 1), listed, slots.owners, self.tables, key.filters)

    def cut(self, key: CutKey, at: Buffers) -> None:
        """Find the cuts of the listed rows' filters."""
        self.kernels.cut(at.logits, at.cut[: key.rows], self._rows(at, key.batch), self.tables, key.filters)

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

    def reply(self, key: ReplyKey, at: Buffers) -> None:
        """Write the new tokens and next drafts of the listed rows to their mail."""
        index, drafts = at.mask[: key.rows], key.drafts or 0
        most = 0 if key.drafts is None else self.width - 1
        self.kernels.reply(index, self._rows(at), at.tokens, self.tables, at.mail, drafts, most)

    def score(self, key: ScoreKey, at: Buffers) -> None:
        """Score the new tokens of the listed rows from their raw logits."""
        index, start = at.score[: key.rows], self.outbox.scores
        tokens = at.tokens[: key.batch] if key.batch else at.tokens
        self.kernels.score(at.logits, index, at.words, tokens, self.tables, at.lines, start, key.width)

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

    def _rows(self, at: Buffers, batch: int = 0) -> Tensor:
        """Return the row numbers, int32 [batch]; without a size [R], undefined after the last row."""
        return at.words[HEADER_WORDS : HEADER_WORDS + (batch or at.logits.shape[0])]

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
        for piece in pieces(places.shape[0], at.logits.shape[1]):
            index, row, target = places[piece].unbind(1)
            who = Scored(batch.inputs.rows[row], generations[row], batch.inputs.positions[index] + 1, target)
            found.append(lines(self.model.logits(hidden.index_select(0, index)).float(), who, key.width))
        publish(found, at.scores, at.words[PACKET_SLOT : PACKET_SLOT + 1].long(), self.outbox.prompts)
