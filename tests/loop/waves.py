"""Loads on machines of given speeds: the planner's own plans, and steps that take what the machine's terms say."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from gapless.memory.ledger import Clock, Ledger
from gapless.memory.pages import PagePool
from gapless.memory.rows import RowTable
from gapless.plan.limits import Limits, most_page_writes
from gapless.plan.planner import Planner
from gapless.plan.row import RowSpec

MS = 1_000_000
ROWS, BUDGET, MAX_LEN, PAGE = 64, 1024, 2048, 16


class Machine(NamedTuple):
    """Times in ms. What steps of decoding rows alone save against others is in `eager`."""

    step: float
    row: float
    eager: float
    token: float

    def ns(self, rows: int, tokens: int) -> int:
        return int(MS * (self.step + self.row * rows + (self.eager if tokens else 0) + self.token * tokens))


class Played(NamedTuple):
    tokens_s: float
    itl_ms: list[float]
    """Times between two tokens of a request, in order."""
    ttft_ms: list[float]
    beside: list[tuple[int, int, int]]
    """Decoding rows, prompt tokens and ns of each step with both."""

    def itl(self, percent: float) -> float:
        return float(np.percentile(self.itl_ms, percent))


def plain(count: int) -> list[tuple[int, int]]:
    """Prompts and answers of 128 tokens."""
    return [(128, 128)] * count


def mixed(count: int) -> list[tuple[int, int]]:
    """Prompts of 10 to 1,792 tokens, answers of 16 to 256, both log-uniform."""
    draw = random.Random(1)
    ends = (10, 1792), (16, 256)
    return [tuple(round(math.exp(draw.uniform(math.log(a), math.log(b)))) for a, b in ends) for _ in range(count)]


def play(machine, requests, at_once, beside=None, noise: Callable[[int], float] = lambda step: 1.0) -> Played:
    """Run a closed loop of `at_once` requests, one step at a time. `beside` bounds chunks, and learns the times."""
    ledger = Ledger()
    pool, table = PagePool(ROWS * MAX_LEN // PAGE + 1, PAGE, ledger), RowTable(ROWS, MAX_LEN, ledger)
    limits = Limits(
        BUDGET,
        most_page_writes(ROWS, MAX_LEN // PAGE, PAGE, BUDGET),
        10_000,
        False,
        chunk_limit=beside and beside.tokens,
    )
    planner = Planner(limits, [pool], table, ledger)
    now, got, came, last, played = 0, 0, {}, {}, Played(0, [], [], [])
    todo = list(enumerate(requests))[::-1]

    def arrive(count: int) -> None:
        for key, (prompt, answer) in [todo.pop() for _ in range(min(count, len(todo)))]:
            planner.add(RowSpec(key, prompt, prompt + answer, 0, key), np.zeros(prompt, np.int32))
            came[key] = now

    arrive(at_once)
    while (plan := planner.plan()) is not None:
        rows, tokens = len(plan.decode), plan.chunk_tokens
        ns = int(machine.ns(rows, tokens) * noise(plan.step))
        now += ns
        if rows and tokens:
            played.beside.append((rows, tokens, ns))
        if beside is not None:
            beside.learn(rows, tokens, ns)
        sampled = np.array([*plan.decode, *(chunk.row for chunk in plan.chunks if chunk.last)], np.int64)
        table.append(sampled, np.zeros(len(sampled), np.int32))
        planner.commit(plan, sampled)
        ended = 0
        for number in sampled.tolist():
            row = planner.by_row[number]
            (played.itl_ms if row.key in last else played.ttft_ms).append((now - last.get(row.key, came[row.key])) / MS)
            last[row.key] = now
            got += 1
            if table.length[number] == row.asked.max_len:
                planner.finish(row)
                ended += 1
        ledger.advance(Clock.COMPUTE, plan.step)
        arrive(ended)
    assert len(played.ttft_ms) == len(requests)
    return played._replace(tokens_s=got / now * 1e9)
