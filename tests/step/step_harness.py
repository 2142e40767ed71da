"""Rows of sampler settings, written down without the packet; and a step program driven by hand."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from gapless.base.params import MAX_STOP_IDS, SamplingParams
from gapless.base.records import Admission, Chunk, PageWrite, Request, StepPlan
from gapless.kernels import plain
from gapless.kernels.layout import NO_TOKEN
from gapless.memory.ledger import Ledger
from gapless.memory.rows import RowTable
from gapless.model.seam import BatchShape
from gapless.step.asked import Asking
from gapless.step.launcher import _mode, _union
from gapless.step.logprobs import LogprobLines
from gapless.step.outbox import Outbox, slot_bytes, table_words
from gapless.step.packet import Packer
from gapless.step.program import StepKey, StepProgram
from gapless.step.tables import RowParams, Tables


def request(params=None, seed=0, stop_ids=(), min_len=0, max_len=64, tokens=(1,), key=0, **sampling):
    params = params or SamplingParams(**{"max_tokens": None, **sampling})
    return Request(key, np.array(tokens, np.int32), params, seed, tuple(stop_ids), min_len, max_len)


def row_params(requests):
    """RowParams of requests, field by field."""

    def column(values, dtype):
        return torch.tensor(values, dtype=dtype)[:, None]

    settings = [r.params for r in requests]
    padded = [list(r.stop_ids) + [NO_TOKEN] * (MAX_STOP_IDS - len(r.stop_ids)) for r in requests]
    return RowParams(
        min_len=torch.tensor([r.min_len for r in requests], dtype=torch.int32),
        max_len=torch.tensor([r.max_len for r in requests], dtype=torch.int32),
        temperature=column([s.temperature for s in settings], torch.float32),
        top_k=column([s.top_k for s in settings], torch.int32),
        top_p=column([s.top_p for s in settings], torch.float32),
        min_p=column([s.min_p for s in settings], torch.float32),
        seed=torch.tensor([r.seed for r in requests]).view(torch.int32).view(-1, 2),
        stop_ids=torch.tensor(padded, dtype=torch.int32),
    )


def mode_of(requests):
    """The narrowest mode that serves all of them, as a step would choose it."""
    return _union([_mode(r) for r in requests])


class ScoreLine(NamedTuple):
    """One line of log-probabilities, in Python's own numbers."""

    row: int
    generation: int
    position: int
    logprob: float
    rank: int
    ids: list[int]
    tops: list[float]


def score_lines(words, shape):
    """All lines of a step."""
    if not shape.lines:
        assert not len(words)
        return []
    columns = (column.tolist() for column in LogprobLines.of(words, shape))
    return [ScoreLine(*line) for line in zip(*columns, strict=True)]


class Bench:
    """A step program over a model, driven by hand: rows are admitted, chunks and decode steps run one at a time."""

    def __init__(self, model, rows=4, max_len=32, pages=60, size=4, kernels=plain.KERNELS):
        self.size, self.model = size, model
        self.table = RowTable(rows, max_len, Ledger())
        self.max_pages = -(-max_len // size)
        cpu = torch.device("cpu")
        cache = model.new_cache(pages, size, cpu)
        self.program = StepProgram(model, Tables.new(rows, max_len, self.max_pages, cpu), cache, kernels)
        self.packer = Packer(self.table, self.max_pages)
        self.asking = Asking(self.table)
        self.requests = {}
        self.lines = []
        """Log-probabilities of the last step."""
        self.step = 0
        self.next_page = 1

    @property
    def tables(self):
        return self.program.tables

    def admit(self, asked):
        """A row with all the pages it can need, its whole prompt run in one chunk; returns (row, outbox)."""
        row, count = self.table.take(asked.key, asked.tokens), len(asked.tokens)
        entries = range(-(-asked.max_len // self.size))
        writes = tuple(PageWrite(row, entry, self.next_page + entry) for entry in entries)
        self.next_page += len(entries)
        admission = Admission(row, int(self.table.generation[row]), asked.key, 0, count)
        self.requests[row] = asked
        return row, self.run((), (Chunk(row, 0, count, True),), (admission,), writes)

    def run(self, decode=(), chunks=(), admissions=(), writes=(), wanted=None):
        """One step; its outbox. Filled up to the bucket `wanted`, a GraphKey, if that is given."""
        self.step += 1
        bound = self.max_pages * self.size
        plan = StepPlan(self.step, tuple(decode), tuple(chunks), tuple(admissions), tuple(writes), bound)
        for admission in admissions:
            self.asking.admit(admission.row, self.requests[admission.row])
        asked = self.asking.of(plan)
        shape = wanted.packet if wanted else self.packer.shape(plan, asked)
        words = np.full(shape.words, -99, np.int32)
        self.packer.write(plan, shape, [self.requests[admission.row] for admission in admissions], words, 1)
        if asked is not None:
            asked.write(words)
        sampling = [*decode, *(chunk.row for chunk in chunks if chunk.last)]
        batch = BatchShape(len(plan.decode), tuple((c.start, c.size) for c in plan.chunks), bound)
        mode = mode_of([self.requests[row] for row in sampling])
        samples = wanted.rows if wanted else len(sampling)
        key = wanted.step(self.model) if wanted else StepKey(batch, shape, samples, mode, self.model.plan(batch))
        size = slot_bytes(self.table.size, sum(chunk.size for chunk in plan.chunks)) // 4
        outboxes = np.full((2, size), -99, np.int32)
        with torch.inference_mode():
            self.program.run(key, torch.from_numpy(words), torch.from_numpy(outboxes))
        slot, first = outboxes[1], table_words(samples)
        end = first + shape.logprobs.words
        assert (outboxes[0] == -99).all() and (slot[end:] == -99).all(), "written outside the packet's slot"
        self.lines = score_lines(slot[first:end], shape.logprobs)
        return Outbox.of(slot, samples)
