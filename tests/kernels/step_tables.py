"""Tables of a step, and its packet, written down by hand."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from gapless.base.records import NO_TOKEN
from gapless.kernels import layout as L
from gapless.kernels.tables import Tables

STEP, SLOTS, MARK = 1234, 3, -77
LONGEST, PAGE_SIZE, MAX_PAGES = 40, 4, 10
VOCAB = 50


def moved(tables: Tables, device: str) -> Tables:
    """A copy on `device`."""
    return Tables(*(table.to(device, copy=True) for table in tables))


def world(rng: random.Random, size: int) -> Tables:
    """`size` rows in all states, the null row not counted: fresh, at a page's border, one before the end, finished."""
    state = torch.zeros(size + 1, L.STATE_COLUMNS, dtype=torch.int32)
    params = torch.full((size + 1, L.PARAM_COLUMNS), NO_TOKEN, dtype=torch.int32)
    params[0] = 0
    history = torch.zeros(size + 1, LONGEST, dtype=torch.int32)
    pages = torch.zeros(size + 1, MAX_PAGES, dtype=torch.int32)
    for row in range(1, size + 1):
        length = rng.choice((1, PAGE_SIZE, PAGE_SIZE + 1, LONGEST - 1, rng.randrange(1, LONGEST)))
        longest = rng.choice((length + 1, length + 1, LONGEST))
        active = int(rng.random() < 0.7)
        state[row, :8] = torch.tensor([rng.randrange(2**31), active, length, length - 1, 0, 3 * row, row, -row])
        params[row, L.MAX_LEN] = longest
        stops = rng.choice((0, 1, 5, L.FIRST_PARAM - L.STOP_IDS))
        params[row, L.STOP_IDS : L.STOP_IDS + stops] = torch.tensor([rng.randrange(VOCAB) for _ in range(stops)])
        history[row, :length] = torch.tensor([rng.randrange(VOCAB) for _ in range(length)])
        pages[row] = torch.tensor(rng.sample(range(1, 1000), MAX_PAGES))
    return Tables(state, params, history, pages, pages[:, None, :0])


def packet(rows: list[int], writes: list[tuple[int, int]], slot: int = 0, step: int = STEP) -> Tensor:
    words = [0] * L.HEADER_WORDS
    words[L.PACKET_STEP], words[L.PACKET_SLOT] = step, slot
    # What stands behind a packet is left over from an earlier one.
    return torch.tensor([*words, *rows, *(n for pair in writes for n in pair), *[MARK] * 50], dtype=torch.int32)


def batch_rows(rng: random.Random, size: int, used: int, padding: int) -> list[int]:
    return rng.sample(range(1, size + 1), used) + [0] * padding
