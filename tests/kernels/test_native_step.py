"""Sampling and the step's glue in C++ against plain torch: equal, to the last bit."""

from __future__ import annotations

import pytest
import torch
from kernels.native_kernels import load_native

from gapless.base.records import Flag
from gapless.kernels import plain
from gapless.kernels.layout import (
    ACTIVE,
    COMPUTED,
    CUT_ID,
    CUT_VALUE,
    HEADER_WORDS,
    KEEP_ID,
    KEEP_VALUE,
    LATE,
    LENGTH,
    LINE_FLAG,
    MASKED,
    MAX_LEN,
    MIN_LEN,
    NO_TOKEN,
    PARAM_COLUMNS,
    SEED_HIGH,
    SEED_LOW,
    STATE_COLUMNS,
    STOP_IDS,
    TEMPERATURE,
    line_words,
)  # fmt: skip
from gapless.kernels.tables import Tables
from gapless.kernels.views import Counts
from gapless.model.seam import BatchShape
from gapless.step.inputs import apply_admissions, apply_pages, mixed_batch
from gapless.step.packet import Packet, PacketShape

ROWS, LENGTHS, PAGE = 9, 40, 16


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def sampled(kernels, logits, state, params):
    rows = torch.arange(len(logits), dtype=torch.int32)
    return kernels.sample(logits, rows, Tables(state, params, state, state, state[:, None, :0]), None)


def tables():
    """state, params, history, pages; row 0 is the null row, and rows 3 and 7 have finished."""
    state = torch.zeros(ROWS, STATE_COLUMNS, dtype=torch.int32)
    state[1:, COMPUTED] = torch.randint(0, 30, (ROWS - 1,)).int()
    state[1:, LENGTH] = state[1:, COMPUTED] + 1
    state[1:, 0] = torch.arange(1, ROWS) * 11
    state[:, CUT_VALUE], state[:, CUT_ID] = KEEP_VALUE, KEEP_ID
    state[1:, ACTIVE] = 1
    state[[3, 7], ACTIVE] = 0
    params = torch.full((ROWS, PARAM_COLUMNS), NO_TOKEN, dtype=torch.int32)
    params[:, MAX_LEN] = LENGTHS
    params[:, MIN_LEN] = 0
    params[:, TEMPERATURE] = torch.tensor([0.0, 0.7, 1.0, 1.3] * 3)[:ROWS].view(torch.int32)
    params[:, SEED_LOW : SEED_HIGH + 1] = torch.randint(-(2**31), 2**31, (ROWS, 2)).int()
    history = torch.randint(0, 100, (ROWS, LENGTHS)).int()
    pages = torch.randint(1, 50, (ROWS, 3)).int()
    params[:, MASKED] = 0
    return state, params, history, pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 5, 16, 33, 100, 1000, 30011])
@pytest.mark.parametrize("random", [False, True])
def test_sample_equals_the_reference(vocab, random, dtype):
    state, params, _, _ = tables()
    params[:, TEMPERATURE] *= random
    logits = (torch.randn(ROWS, vocab) * 3).to(dtype)
    logits[2, vocab // 2] = logits[2].max()  # a tie
    got, want = (sampled(k, logits, state, params) for k in (load_native(), plain.KERNELS))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert got[0].dtype == torch.int64 and got[1].dtype == torch.bool


def test_of_equal_logits_the_first_is_taken():
    state, params, _, _ = tables()
    params[:, TEMPERATURE] = 0
    logits = torch.zeros(ROWS, 333)
    logits[:, [17, 100, 332]] = 2.0
    tokens, _ = sampled(load_native(), logits, state, params)
    assert tokens.tolist() == [17] * ROWS
    logits[:, 332] = 3.0
    assert sampled(load_native(), logits.bfloat16(), state, params)[0].tolist() == [332] * ROWS


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [0, 50, 99])
def test_what_is_not_finite(bad, place):
    state, params, _, _ = tables()
    params[:, TEMPERATURE] = 0
    logits = torch.randn(ROWS, 100)
    logits[4, place], logits[5] = bad, -torch.inf
    logits[6, :99] = -torch.inf
    got, want = (sampled(k, logits, state, params) for k in (load_native(), plain.KERNELS))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    assert got[1].tolist() == [i not in (4, 5) for i in range(ROWS)]


def test_a_hundred_thousand_draws_are_the_same():
    """The noise goes through torch's own logarithms, so nothing can differ; every row draws with a seed of its own."""
    rows, vocab = 1000, 100
    state = torch.randint(0, 2**20, (rows, STATE_COLUMNS)).int()
    state[:, CUT_VALUE], state[:, CUT_ID] = KEEP_VALUE, KEEP_ID
    params = torch.zeros(rows, PARAM_COLUMNS, dtype=torch.int32)
    params[:, TEMPERATURE] = (torch.rand(rows) + 0.5).view(torch.int32)
    for _ in range(100):
        params[:, SEED_LOW : SEED_HIGH + 1] = torch.randint(-(2**31), 2**31, (rows, 2)).int()
        state[:, LENGTH] += 1
        logits = torch.randn(rows, vocab)
        got, want = (sampled(k, logits, state, params) for k in (load_native(), plain.KERNELS))
        assert torch.equal(got[0], want[0])


@pytest.mark.parametrize("writes", [0, 3])
def test_begin_decode_equals_the_reference(writes):
    before = Tables(*tables(), torch.empty(ROWS, 1, 0, dtype=torch.int32))
    state, _, _, pages, _ = before
    rows = torch.tensor([5, 2, 3, 8, 0, 0])
    pairs = torch.tensor([[5 * 3 + 1, 70], [2 * 3, 71], [8 * 3 + 2, 72]])[:writes]
    words = torch.cat((torch.tensor([9, 1]), rows, pairs.flatten(), torch.tensor([123]))).int()
    results = []
    for kernels in (load_native(), plain.KERNELS):
        own = pages.clone()
        results.append(
            (*kernels.begin_decode(words, Counts.of_decode(6, writes), before._replace(pages=own), PAGE), own)
        )
    inert = state[rows, ACTIVE] == 0
    assert results[0][1][inert].tolist() == [0, 0, 0], "an inert row's token means nothing: any that exists"
    results[1][1][inert] = 0
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)
    assert len(words) > HEADER_WORDS + 6


def test_begin_mixed_equals_the_reference():
    """Two decode rows, a new row's prompt, the middle of another's; the last tokens belong to no row."""
    state, params, history, pages = tables()
    state[8, COMPUTED] = 17
    rows, sizes = [5, 2, 8, 6], [1, 1, 9, 20]
    cuts = [KEEP_VALUE, KEEP_ID] * ((STATE_COLUMNS - CUT_VALUE) // 2)
    admission = [6, 31, 1, 20, 0, 0, 0, *cuts, *range(PARAM_COLUMNS)]
    prompts = torch.randint(0, 100, (29,)).tolist()
    shape = PacketShape(rows=4, page_writes=2, admissions=1, chunks=2, chunk_tokens=29)
    words = torch.tensor([9, 1, *rows, *sizes, 18, 70, 19, 71, *admission, *prompts, -77]).int()
    reference = Tables(state.clone(), params.clone(), history.clone(), pages.clone(), pages[:, None, :0])
    packet = Packet.of(words, shape)
    apply_admissions(packet, reference)
    apply_pages(packet.pages, reference)
    want = mixed_batch(packet, reference, BatchShape(2, ((17, 9), (0, 20)), 40), PAGE)
    mine = Tables(state, params, history, pages, pages[:, None, :0])
    begin = load_native().begin_mixed
    assert begin is not None
    got = begin(words, Counts(4, 2, 2, 1, 31 + 5), mine, PAGE)
    for name, table in mine._asdict().items():
        assert torch.equal(table, getattr(reference, name)), name
    assert torch.equal(got.rows, want.inputs.rows) and torch.equal(got.last, want.last)
    assert torch.equal(got.kv_lens, want.inputs.kv_lens) and torch.equal(got.starts, want.inputs.starts)
    for name in ("ids", "positions", "slots"):
        tokens = getattr(got, name)
        assert tokens.dtype == torch.int64
        assert torch.equal(tokens[:31], getattr(want.inputs, name)) and tokens[31:].tolist() == [0] * 5


def test_a_null_chunk_in_front_ends_at_some_token():
    words = torch.tensor([9, 1, 0, 8, 0, 9, *range(9)]).int()
    shape = PacketShape(rows=2, page_writes=0, admissions=0, chunks=2, chunk_tokens=9)
    mine, reference = (Tables(*made[:4], made[3][:, None, :0]) for made in (tables(), tables()))
    begin = load_native().begin_mixed
    assert begin is not None
    want = mixed_batch(Packet.of(words, shape), reference, BatchShape(0, ((0, 9), (0, 0)), 40), PAGE)
    for last in (begin(words, Counts(2, 0, 0, 0, 9), mine, PAGE).last, want.last):
        assert last.tolist() == [0, 8]


def test_inert_rows_of_a_mixed_step_have_one_entry():
    words = torch.tensor([9, 1, 3, 7, 1, 4, 50, 51, 52, 53]).int()
    begin = load_native().begin_mixed
    assert begin is not None
    got = begin(words, Counts(2, 1, 0, 0, 5), Tables(*tables(), torch.empty(ROWS, 1, 0, dtype=torch.int32)), PAGE)
    assert got.kv_lens.tolist() == [1, 1] and got.ids.tolist() == got.slots.tolist() == [0] * 5


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("width", [1, 5])
def test_finish_equals_the_reference(chunked, width):
    state, params, history, pages = tables()
    rows = torch.tensor([5, 2, 3, 8, 1, 6, 4, 0, 0] if not chunked else [5, 2, 3, 8, 1, 6, 4, 7]).int()
    sizes = torch.tensor([1, 1, 1, 1, 7, 3, 2, 5]).int() if chunked else None
    count = 6 if chunked else len(rows)
    tokens, finite = torch.randint(0, 100, (count, width)), torch.ones(count, dtype=torch.bool)
    finite[3] = False
    params[2, STOP_IDS + 4] = int(tokens[1, -1])
    params[1, MAX_LEN] = int(state[1, LENGTH]) + (width + 1) // 2
    tokens[5, 0] = NO_TOKEN
    tokens[0, 1:] = NO_TOKEN  # one of several
    results = []
    for kernels in (load_native(), plain.KERNELS):
        own = Tables(state.clone(), params, history.clone(), pages, pages[:, None, :0])
        lines, out = torch.full((3, 99), -7, dtype=torch.int32), torch.empty(count, width, dtype=torch.int32)
        words = torch.tensor([2**31 - 1, 2]).int()
        kernels.finish(words, rows, sizes, tokens, finite, own, lines, out)
        results.append((out, own.state, own.history[1:], lines, words))  # the null row's history means nothing
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype and torch.equal(got, want)
    assert results[0][4].tolist() == [0, 0], "the step after the last number, and the outbox after the last one"
    line = line_words(width)
    flags = results[0][3][2, line : (1 + count) * line].view(-1, line)[:, LINE_FLAG].tolist()
    assert set(flags) == set(Flag)
    held = flags.index(Flag.HELD)
    assert results[0][1][rows[held], [ACTIVE, LENGTH]].tolist() == state[rows[held], [ACTIVE, LENGTH]].tolist()
    assert results[0][1][rows[held], COMPUTED] == state[rows[held], LENGTH] - 1, "its last token runs again"


@pytest.mark.parametrize("width", [1, 5])
def test_a_row_whose_mask_is_late_takes_nothing(width):
    state, params, history, pages = tables()
    rows, tokens, finite = torch.tensor([5, 2]).int(), torch.full((2, width), 9), torch.ones(2, dtype=torch.bool)
    state[5, LATE] = 1
    for kernels in (load_native(), plain.KERNELS):
        own = Tables(state.clone(), params, history.clone(), pages, pages[:, None, :0])
        lines, out = torch.full((1, 99), -7, dtype=torch.int32), torch.empty(2, width, dtype=torch.int32)
        kernels.finish(torch.zeros(2).int(), rows, None, tokens, finite, own, lines, out)
        assert out[0].tolist() == [NO_TOKEN] * width and out[1, 0] == 9
        assert torch.equal(own.state[5], state[5]) and lines[0, line_words(width) + LINE_FLAG] == Flag.HELD
