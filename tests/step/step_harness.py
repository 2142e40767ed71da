"""Requests, and a step program driven by hand."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch

from gapless.base.params import SamplingParams
from gapless.base.records import Admission, Chunk, PageWrite, Request, StepPlan
from gapless.device import Ring
from gapless.kernels import plain
from gapless.kernels.tables import Tables
from gapless.memory.ledger import Ledger
from gapless.memory.rows import RowTable
from gapless.memory.slots import Slots
from gapless.step.graphs import GraphShapes, StepGraphs
from gapless.step.keys import SampleKey
from gapless.step.lane import Buffers
from gapless.step.leader import Leader
from gapless.step.listing import Lanes
from gapless.step.mail import Mail, mail_bytes
from gapless.step.outbox import OutboxShape
from gapless.step.packet import Packer, max_words
from gapless.step.program import RowOptions, StepProgram


def request(params=None, seed=0, stop_ids=(), min_len=0, max_len=64, tokens=(1,), key=0, **sampling):
    params = params or SamplingParams(**{"max_tokens": None, **sampling})
    return Request(key, np.array(tokens, np.int32), params, seed, tuple(stop_ids), min_len, max_len)


SLOTS = 3


def rows_in(lists, lane):
    """The listed rows of a lane."""
    return next((one.samples for one in lists.lanes if one.lane.name == lane), ())


class ScoreLine(NamedTuple):
    """One line of log-probabilities, in Python's own numbers."""

    row: int
    generation: int
    position: int
    logprob: float
    rank: int
    ids: list[int]
    tops: list[float]


def score_lines(lines):
    """All lines of a step."""
    return [ScoreLine(*line) for line in zip(*(column.tolist() for column in lines), strict=True)]


class Bench:
    """A step program over a model, driven by hand: rows are admitted, chunks and decode steps run one at a time."""

    def __init__(self, model, rows=4, max_len=32, pages=60, size=4, kernels=plain.KERNELS, kind=StepProgram):
        self.size, self.model = size, model
        ledger = Ledger()
        self.table = RowTable(rows, max_len, ledger)
        self.table.slots["adjust"] = Slots(SLOTS, ledger)
        self.max_pages = len(model.groups()) * -(-max_len // size)
        cpu = torch.device("cpu")
        cache = model.new_cache(pages, size, cpu)
        self.shape = OutboxShape(max(rows, 16), 2 * max_len, kind.width)
        tables = Tables.new(rows, max_len, self.max_pages, cpu, model.vocab_size)
        self.program = kind(model, tables, cache, kernels, self.shape, RowOptions(SLOTS))
        graphs = StepGraphs(GraphShapes((), None, False, size, 0, 1, 1), lambda order: [], 1)
        self.leader = Leader(Packer(self.table, self.max_pages), Lanes(self.table), graphs)
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
        row, count = self.table.take(asked.key, asked.tokens, asked.params.leases), len(asked.tokens)
        entries = range(-(-asked.max_len // self.size))
        writes = tuple(PageWrite(row, entry, self.next_page + entry) for entry in entries)
        self.next_page += len(entries)
        admission = Admission(row, int(self.table.generation[row]), asked.key, 0, count)
        self.requests[row] = asked
        return row, self.run((), (Chunk(row, 0, count, True),), (admission,), writes)

    def run(self, decode=(), chunks=(), admissions=(), writes=(), wanted=None):
        """One step; its outbox. Filled up to the forward `wanted`, if that is given."""
        self.step += 1
        bound = self.max_pages * self.size
        plan = StepPlan(self.step, tuple(decode), tuple(chunks), tuple(admissions), tuple(writes), bound)
        requests = [self.requests[admission.row] for admission in admissions]
        self.leader.admit(plan, requests)
        decision = self.leader.decide(plan)
        if wanted:
            sample = SampleKey(wanted.batch.rows, wanted.samples, bool(wanted.batch.chunks))
            key = decision.key._replace(forward=wanted, sample=sample)
            decision = decision._replace(key=key, samples=wanted.samples)
        at, outboxes = self.buffers(decision)
        self.leader.write(plan, decision, requests, at.words.numpy(), 1)
        with torch.inference_mode():
            for one in decision.key.programs():
                self.program.of(one)(one, at)
        slot, used = outboxes[1], (1 + decision.samples) * self.shape.line
        assert (outboxes[0] == -99).all() and (slot[used : self.shape.scores] == -99).all(), "written somewhere else"
        self.lines = []
        if decision.logprobs:
            self.lines = score_lines(self.shape.read_scores(slot, decision.logprobs))
        else:
            assert (slot[self.shape.scores :] == -99).all(), "scores that were not asked for"
        outbox = self.shape.read(slot, decision.samples)
        return outbox if self.program.width > 1 else outbox._replace(tokens=outbox.tokens[:, 0])

    def buffers(self, decision):
        """Fresh ones, and the outboxes among them."""
        rows = self.shape.rows
        words = max_words(rows, 2 * self.max_pages * self.table.size, self.shape.tokens)
        outboxes = np.full((2, self.shape.words), -99, np.int32)
        lanes = [
            [torch.full((rows,), -99, dtype=torch.int32) for _ in range(lane.lists)] for lane in self.program.lanes
        ]
        lists = list(itertools.chain(*lanes))
        for number, given in decision.lists:
            lists[number][: len(given)] = torch.from_numpy(given)
        fill = decision.fill.words if decision.fill else [np.zeros(0, np.int32)]
        loads = torch.from_numpy(np.concatenate(([-99] * 3, *fill)).astype(np.int32))
        packet = torch.from_numpy(np.full(words, -99, np.int32))
        logits = torch.full((rows, self.model.vocab_size), torch.nan, dtype=self.model.dtype)
        tokens = torch.full((rows, self.program.width), -99, dtype=torch.int32)
        lines = torch.from_numpy(outboxes)
        vocab = self.model.vocab_size
        mail = Mail(Ring(len(self.tables.state), mail_bytes(vocab), pin=False), vocab)
        of_lanes = iter(lists)
        own = tuple([tuple(itertools.islice(of_lanes, lane.lists)) for lane in self.program.lanes])
        buffers = Buffers(packet, packet, loads, own, logits, tokens, lines, lines, mail)
        return buffers, outboxes
