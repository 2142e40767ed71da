"""Sampling and the step's glue in C++ against the torch twins: equal, to the last bit."""

from __future__ import annotations

import pytest
import torch
from kernels.native_kernels import load_native

from gapless.base.records import Flag
from gapless.kernels import plain
from gapless.kernels.layout import (
    ACTIVE,
    COMPUTED,
    HEADER_WORDS,
    LENGTH,
    MAX_LEN,
    NO_TOKEN,
    OUTBOX_COLUMNS,
    PARAM_COLUMNS,
    SEED_HIGH,
    SEED_LOW,
    STATE_COLUMNS,
    STOP_IDS,
    TEMPERATURE,
)  # fmt: skip

ROWS, LENGTHS, PAGE = 9, 40, 16


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def tables():
    """state, params, history, pages; row 0 is the null row, and rows 3 and 7 have finished."""
    state = torch.zeros(ROWS, STATE_COLUMNS, dtype=torch.int32)
    state[1:, COMPUTED] = torch.randint(0, 30, (ROWS - 1,)).int()
    state[1:, LENGTH] = state[1:, COMPUTED] + 1
    state[1:, 0] = torch.arange(1, ROWS) * 11
    state[1:, ACTIVE] = 1
    state[[3, 7], ACTIVE] = 0
    params = torch.full((ROWS, PARAM_COLUMNS), NO_TOKEN, dtype=torch.int32)
    params[:, MAX_LEN] = LENGTHS
    params[:, TEMPERATURE] = torch.tensor([0.0, 0.7, 1.0, 1.3] * 3)[:ROWS].view(torch.int32)
    params[:, SEED_LOW : SEED_HIGH + 1] = torch.randint(-(2**31), 2**31, (ROWS, 2)).int()
    history = torch.randint(0, 100, (ROWS, LENGTHS)).int()
    pages = torch.randint(1, 50, (ROWS, 3)).int()
    return state, params, history, pages


@pytest.mark.parametrize("vocab", [1, 5, 16, 33, 100, 1000])
@pytest.mark.parametrize("random", [False, True])
def test_sample_equals_the_twin(vocab, random):
    state, params, _, _ = tables()
    rows, logits = torch.arange(ROWS), torch.randn(ROWS, vocab) * 3
    logits[2, vocab // 2] = logits[2].max()  # a tie
    got, want = (k.sample(logits, rows, state, params, random) for k in (load_native(), plain.KERNELS))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert got[0].dtype == torch.int64 and got[1].dtype == torch.bool


def test_of_equal_logits_the_first_is_taken():
    state, params, _, _ = tables()
    logits = torch.zeros(ROWS, 333)
    logits[:, [17, 100, 332]] = 2.0
    tokens, _ = load_native().sample(logits, torch.arange(ROWS), state, params, False)
    assert tokens.tolist() == [17] * ROWS
    logits[:, 332] = 3.0
    assert load_native().sample(logits.bfloat16(), torch.arange(ROWS), state, params, False)[0].tolist() == [332] * ROWS


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 50, 99])
def test_what_is_not_finite(bad, place):
    state, params, _, _ = tables()
    logits = torch.randn(ROWS, 100)
    logits[4, place], logits[5] = bad, -torch.inf
    logits[6, :99] = -torch.inf
    got, want = (k.sample(logits, torch.arange(ROWS), state, params, False) for k in (load_native(), plain.KERNELS))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert got[1].tolist() == [i not in (4, 5) for i in range(ROWS)]


def test_a_hundred_thousand_draws_are_the_same():
    """The noise goes through torch's own logarithms, so nothing can differ; every row draws with a seed of its own."""
    rows, vocab = 1000, 100
    state = torch.randint(0, 2**20, (rows, STATE_COLUMNS)).int()
    params = torch.zeros(rows, PARAM_COLUMNS, dtype=torch.int32)
    params[:, TEMPERATURE] = (torch.rand(rows) + 0.5).view(torch.int32)
    for _ in range(100):
        params[:, SEED_LOW : SEED_HIGH + 1] = torch.randint(-(2**31), 2**31, (rows, 2)).int()
        state[:, LENGTH] += 1
        logits = torch.randn(rows, vocab)
        got, want = (k.sample(logits, torch.arange(rows), state, params, True) for k in (load_native(), plain.KERNELS))
        assert torch.equal(got[0], want[0])


@pytest.mark.parametrize("writes", [0, 3])
def test_begin_decode_equals_the_twin(writes):
    state, _, history, pages = tables()
    rows = torch.tensor([5, 2, 3, 8, 0, 0])
    pairs = torch.tensor([[5 * 3 + 1, 70], [2 * 3, 71], [8 * 3 + 2, 72]])[:writes]
    words = torch.cat((torch.tensor([9, 1]), rows, pairs.flatten(), torch.tensor([123]))).int()
    results = []
    for kernels in (load_native(), plain.KERNELS):
        own = pages.clone()
        results.append((*kernels.begin_decode(words, 6, writes, state, history, own, PAGE), own))
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)
    assert len(words) > HEADER_WORDS + 6


@pytest.mark.parametrize("chunked", [False, True])
def test_finish_equals_the_twin(chunked):
    state, params, history, _ = tables()
    rows = torch.tensor([5, 2, 3, 8, 1, 6, 4, 0, 0] if not chunked else [5, 2, 3, 8, 1, 6, 4, 7])
    sizes = torch.tensor([1, 1, 1, 1, 7, 3, 2, 5]) if chunked else None
    count = 6 if chunked else len(rows)
    tokens, finite = torch.randint(0, 100, (count,)), torch.ones(count, dtype=torch.bool)
    finite[3] = False
    params[2, STOP_IDS + 4] = int(tokens[1])
    params[1, MAX_LEN] = int(state[1, LENGTH]) + 1
    results = []
    for kernels in (load_native(), plain.KERNELS):
        own = [state.clone(), history.clone(), torch.full((3, 99), -7, dtype=torch.int32)]
        words = torch.tensor([77, 2]).int()
        out = kernels.finish(words, rows, sizes, tokens, finite, own[0], params, own[1], own[2])
        results.append((out, own[0], own[1][1:], own[2]))  # the null row's history means nothing
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)
    flags = results[0][3][2, OUTBOX_COLUMNS : (1 + count) * OUTBOX_COLUMNS].view(-1, OUTBOX_COLUMNS)[:, 3].tolist()
    assert set(flags) == {Flag.LIVE, Flag.STOP, Flag.LENGTH, Flag.ERROR, Flag.INERT}
