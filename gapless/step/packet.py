"""The packet: all bytes from host to device in one step, in one pinned slot, by one copy.

int32 words in consecutive sections. Their sizes are host integers, so the device finds them without reading. A steady
decode step is the header and the row numbers. The lists of the lanes have fixed places before the header, and travel
only if there are any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from torch import Tensor

from gapless.base.params import MAX_STOP_IDS, PARAMS, SLOT_LANE, Param, SamplingParams, Words
from gapless.base.records import NO_TOKEN, Admission, Int32s, Int64s, PageWrite, Request, StepPlan
from gapless.base.speculative import MAX_DRAFTS
from gapless.kernels import layout as L
from gapless.memory.rows import RowTable
from gapless.memory.slots import NO_SLOT
from gapless.model.drafting.suffixes import Tenants
from gapless.step.logprobs import PROMPT_WORDS

ADMISSION_WORDS = 1 + L.STATE_COLUMNS + L.PARAM_COLUMNS


class PacketShape(NamedTuple):
    """Counts that fix the layout of one packet."""

    rows: int
    page_writes: int
    admissions: int
    chunks: int
    chunk_tokens: int
    prompts: int = 0
    """Prompt positions to score."""

    @property
    def words(self) -> int:
        return offsets(self)[-1] + PROMPT_WORDS * self.prompts


@lru_cache(maxsize=256)
def offsets(shape: PacketShape) -> tuple[int, ...]:
    """Return the ends of sections: header, rows, sizes, pages, admissions, tokens. Prompt positions follow."""
    rows = L.HEADER_WORDS + shape.rows
    sizes = rows + (shape.rows if shape.chunks else 0)
    pages = sizes + L.PAGE_WORDS * shape.page_writes
    admissions = pages + ADMISSION_WORDS * shape.admissions
    return L.HEADER_WORDS, rows, sizes, pages, admissions, admissions + shape.chunk_tokens


class Packet(NamedTuple):
    """Views of one packet on the device. `sizes` is empty if every row has one token."""

    rows: Tensor
    sizes: Tensor
    pages: Tensor
    admissions: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, words: Tensor, shape: PacketShape) -> Packet:
        """Return the sections of `words`, int32 [at least shape.words]."""
        header, rows, sizes, pages, admissions, end = offsets(shape)
        return cls(
            words[header:rows],
            words[rows:sizes],
            words[sizes:pages].view(-1, L.PAGE_WORDS),
            words[pages:admissions].view(-1, ADMISSION_WORDS),
            words[admissions:end],
        )


def prompts_to_score(words: Tensor, shape: PacketShape) -> Tensor:
    """Return the prompt positions to score, int64 [prompts, PROMPT_WORDS]."""
    return words[offsets(shape)[-1] : shape.words].view(-1, PROMPT_WORDS).long()


def step_word(step: int) -> int:
    """Return a step's number as one int32: a fast engine passes 2**31 steps in a month."""
    return step & L.MAX_STEP_WORD


def max_words(rows: int, page_writes: int, tokens: int) -> int:
    return PacketShape(rows, page_writes, rows, rows, tokens, tokens).words


class DecodeRows(NamedTuple):
    """The decode rows of a plan, with their requests and generations."""

    rows: Int64s
    keys: Int64s
    generations: bytes
    """int32 each"""

    @classmethod
    def of(cls, decode: Sequence[int], table: RowTable) -> DecodeRows:
        """Return the table's record of these rows."""
        rows = np.array(decode, np.int64)
        keys = table.key[rows]
        rows.flags.writeable = keys.flags.writeable = False  # shared by several threads
        return cls(rows, keys, table.generation[rows].tobytes())


class Packer:
    """Writes plans into packet slots. Apart from a few array copies, the work is proportional to the changes."""

    def __init__(self, rows: RowTable, max_pages: int, groups: int = 1) -> None:
        assert (rows.size + 1) * groups * max_pages < 2**31, "places in the page table are sent as int32"
        self._table = rows
        self._max_pages, self._groups = max_pages, groups
        self._tenants = Tenants()
        self._decode: tuple[int, ...] = ()
        self.decoded = DecodeRows.of((), rows)
        """Decode rows of the last written plan: the same record while the rows are the same."""

    def shape(self, plan: StepPlan, prompts: int = 0) -> PacketShape:
        """Return the narrowest shape of the plan, with `prompts` prompt positions to score."""
        rows = len(plan.decode) + len(plan.chunks)
        return PacketShape(rows, len(plan.pages), len(plan.admissions), len(plan.chunks), plan.chunk_tokens, prompts)

    def write(
        self, plan: StepPlan, shape: PacketShape, requests: list[Request], words: Int32s, slot: int,
        prompt: tuple[Int32s, ...] = (),
    ) -> None:  # fmt: skip
        """Fill `words` [shape.words]. `requests` belong to the plan's admissions, `prompt` has positions to score.

        `slot` is the outbox slot. A shape wider than the plan is padded: null rows after the decode rows and between
        sampling and other chunks; page writes that give the null row its null page; tokens of no row. Page writes
        beyond the shape are left out.
        """
        header, rows, sizes, pages, admissions, end = offsets(shape)
        words[L.PACKET_STEP], words[L.PACKET_SLOT] = step_word(plan.step), slot
        if plan.decode is not self._decode:
            self._decode, self.decoded = plan.decode, DecodeRows.of(plan.decode, self._table)
        first = rows - shape.chunks
        words[header : header + len(plan.decode)] = self.decoded.rows
        words[header + len(plan.decode) : first] = 0
        if shape.chunks:
            ends = sum([chunk.last for chunk in plan.chunks])
            lines = [(chunk.row, chunk.size) for chunk in plan.chunks]
            lines[ends:ends] = [(0, 0)] * (shape.chunks - len(lines))
            words[first:rows], words[sizes - shape.chunks : sizes] = zip(*lines, strict=True)
            # A null row among the decode rows has one token; one among the chunks has none.
            words[rows : sizes - shape.chunks] = 1
            self._write_tokens(plan, words[admissions:end])
        if shape.page_writes:
            self._write_pages(plan, words[sizes:pages])
        if shape.admissions:
            block = words[pages:admissions].reshape(-1, ADMISSION_WORDS)
            block[len(requests) :] = 0  # padding: the null row is admitted with zeros
            for line, admission, request in zip(block, plan.admissions, requests, strict=False):
                _write_admission(line, admission, request, self._table.leased.get(admission.row, {}))
                if request.most_drafts:
                    line[1 + L.STATE_COLUMNS + L.TENANT] = self._tenants.number(request.salt)
        if prompt:
            np.concatenate(prompt, out=words[end : shape.words].reshape(-1, PROMPT_WORDS))

    def page_words(self, pages: Sequence[PageWrite]) -> list[int]:
        """Return the page table place and the page of each."""
        width, groups = self._max_pages, self._groups
        return [n for row, entry, page, group in pages for n in ((row * groups + group) * width + entry, page)]

    def _write_pages(self, plan: StepPlan, words: Int32s) -> None:
        pages = plan.pages[: len(words) // L.PAGE_WORDS]
        count = L.PAGE_WORDS * len(pages)
        if count:
            words[:count] = self.page_words(pages)
        words[count:] = 0

    def _write_tokens(self, plan: StepPlan, words: Int32s) -> None:
        at = 0
        for chunk in plan.chunks:
            words[at : at + chunk.size] = self._table.tokens[chunk.row, chunk.start : chunk.start + chunk.size]
            at += chunk.size
        words[at:] = 0


def _write_admission(line: Int32s, admission: Admission, request: Request, leased: Mapping[str, int]) -> None:
    """Write the row number, the state columns and the parameter columns of a new row."""
    line[0] = admission.row
    line[1 : 1 + L.CUT_VALUE] = (admission.generation, 1, admission.length, admission.start, 0, 0)
    line[1 + L.CUT_VALUE : 1 + L.STATE_COLUMNS] = (L.KEEP_VALUE, L.KEEP_ID) * (1 + MAX_DRAFTS)
    params = line[1 + L.STATE_COLUMNS :]
    params[L.MIN_LEN], params[L.MAX_LEN] = request.min_len, request.max_len
    params[L.ADJUST_SLOT] = leased.get(SLOT_LANE, NO_SLOT)
    params[L.MASKED], params[L.DRAFTS], params[L.TENANT] = request.matcher is not None, request.most_drafts, 0
    params[L.ADAPTER_SLOT] = leased.get(request.adapter, NO_SLOT)
    write_params(params, PARAMS, L.PARAM_OF, request.params, leased)
    # A missing seed was drawn before.
    params[L.SEED_LOW : L.SEED_LOW + 2] = np.array([request.seed], np.int64).view(np.int32)
    assert len(request.stop_ids) <= MAX_STOP_IDS
    params[L.STOP_IDS : L.STOP_IDS + len(request.stop_ids)] = request.stop_ids
    params[L.STOP_IDS + len(request.stop_ids) : L.FIRST_PARAM] = NO_TOKEN


def write_params(
    line: Int32s, params: Sequence[Param], places: Mapping[str, int], settings: SamplingParams, slots: Mapping[str, int]
) -> None:
    """Write the sampling parameters of one row to their columns of `line`; `slots` are its leases."""
    reals = line.view(np.float32)
    for entry in params:
        if entry.words is Words.REAL:
            reals[places[entry.name]] = getattr(settings, entry.name)
        elif entry.words is Words.INT:
            line[places[entry.name]] = getattr(settings, entry.name)
        elif entry.words is Words.SLOT:
            line[places[entry.name]] = slots[entry.name] if entry.name in settings.leases else NO_SLOT
