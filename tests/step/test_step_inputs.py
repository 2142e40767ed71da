"""Inputs of a forward against the same computed row by row in plain Python."""

from __future__ import annotations

import random

import pytest
import torch

from gapless.base.records import Chunk
from gapless.kernels import plain
from gapless.kernels.layout import ACTIVE, COMPUTED, LENGTH
from gapless.kernels.tables import Tables
from gapless.model.seam import BatchShape
from gapless.step.inputs import fused_batch, mixed_batch
from gapless.step.packet import Packet, PacketShape

ROWS, SIZE, MAX_LEN = 7, 4, 32
MAX_PAGES = MAX_LEN // SIZE


def random_tables(rng):
    tables = Tables.new(ROWS, MAX_LEN, MAX_PAGES, torch.device("cpu"))
    for row in range(1, ROWS + 1):
        computed = rng.randrange(MAX_LEN - 1)
        tables.state[row, ACTIVE] = rng.random() < 0.7
        tables.state[row, COMPUTED] = computed
        tables.state[row, LENGTH] = computed + 1
        tables.history[row] = torch.tensor([rng.randrange(1000) for _ in range(MAX_LEN)])
        tables.pages[row] = torch.tensor([rng.randrange(1, 90) for _ in range(MAX_PAGES)])
    return tables


def random_batch(rng, tables):
    """Decode rows in any state, and chunks of active rows that start where the device stands."""
    rows = rng.sample(range(1, ROWS + 1), rng.randrange(1, ROWS + 1))
    decode = rows[: rng.randrange(len(rows) + 1)]
    chunks = []
    for row in rows[len(decode) :]:
        tables.state[row, ACTIVE] = 1
        start = int(tables.state[row, COMPUTED])
        chunks.append(Chunk(row, start, rng.randrange(1, min(9, MAX_LEN - start) + 1), rng.random() < 0.5))
    return decode, chunks


def by_hand(tables, decode, chunks, tokens):
    """(id, position, slot) of every query token, and the KV length of every row."""
    queries, lengths = [], []
    for row in decode:
        _, active, _, position, *_ = tables.state[row].tolist()
        page = int(tables.pages[row, position // SIZE])
        slot = page * SIZE + position % SIZE if active else 0
        queries.append((int(tables.history[row, position]), position, slot))
        lengths.append(position + 1 if active else 1)
    tokens = iter(tokens)
    for chunk in chunks:
        for position in range(chunk.start, chunk.start + chunk.size):
            page = int(tables.pages[chunk.row, position // SIZE])
            queries.append((next(tokens), position, page * SIZE + position % SIZE))
        lengths.append(chunk.start + chunk.size)
    return queries, lengths


@pytest.mark.parametrize("seed", range(60))
def test_inputs_are_those_computed_row_by_row(seed):
    rng = random.Random(seed)
    tables = random_tables(rng)
    decode, chunks = random_batch(rng, tables)
    tokens = [rng.randrange(1000) for chunk in chunks for _ in range(chunk.size)]
    queries, lengths = by_hand(tables, decode, chunks, tokens)
    bound = max([int(tables.state[row, COMPUTED]) + 1 for row in decode], default=0) + rng.randrange(3)
    shape = BatchShape(len(decode), tuple((c.start, c.size) for c in chunks), min(bound, MAX_LEN))
    before = tables.history.clone()

    def words(values):
        return torch.tensor(values, dtype=torch.int32)

    rows = [*decode, *(chunk.row for chunk in chunks)]
    sizes = [1] * len(decode) + [chunk.size for chunk in chunks] if chunks else []
    if chunks:
        nothing = words([])
        packet = Packet(words(rows), words(sizes), nothing, nothing, words(tokens))
        batch = mixed_batch(packet, tables, shape, SIZE)
    else:
        packet = PacketShape(len(rows), 0, 0, 0, 0)
        batch = fused_batch(plain.KERNELS, words([0, 0, *rows]), packet, tables, shape, SIZE)
    inputs = batch.inputs
    found = list(zip(inputs.ids.tolist(), inputs.positions.tolist(), inputs.slots.tolist(), strict=True))
    assert found == queries
    assert inputs.kv_lens.tolist() == lengths
    assert inputs.rows.tolist() == rows
    width = inputs.pages.shape[1]
    assert width * SIZE >= max([shape.bound, *(start + size for start, size in shape.chunks)])
    assert torch.equal(inputs.pages, tables.pages[rows, :width].long())
    ends = [sum(sizes[: i + 1]) - 1 for i in range(len(sizes))]
    assert (batch.last.tolist() if batch.last is not None else []) == ends
    check_history(before, tables, chunks, tokens)
    assert all(tensor.dtype == torch.int64 for tensor in inputs[:5])


def check_history(before, tables, chunks, tokens):
    """Prompt tokens entered the history at their positions, and nothing else changed."""
    tokens = iter(tokens)
    for chunk in chunks:
        for position in range(chunk.start, chunk.start + chunk.size):
            before[chunk.row, position] = next(tokens)
    assert torch.equal(tables.history, before)
