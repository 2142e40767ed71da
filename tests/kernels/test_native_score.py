"""Scores in C++ against torch and against Python in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from native_kernels import load_native, load_plain_variant
from score_cases import KINDS, check_alone, check_score, hard_logits, world

from gapless.kernels import plain
from gapless.kernels.layout import SCORE_LOGPROB, SCORE_TOP, score_words

DTYPES = (torch.float32, torch.bfloat16)
PIECE = 1 << 14
"""Tokens that native/scores.cpp sums at once."""


@pytest.fixture
def score():
    return load_native().score


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [0, 1, 5, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scores_equal_the_direct_computation(score, dtype, width, kind):
    check_score(score, kind, dtype, "cpu", 7, 4999, [0, 2, 3, 4, 6, 6], width)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_several_pieces_is_scored_as_one(score, kind):
    for vocab in (PIECE - 1, PIECE + 1, 2 * PIECE + 30):
        check_score(score, kind, torch.bfloat16, "cpu", 3, vocab, [0, 1, 2], 20)


@pytest.mark.parametrize("vocab", [1, 3, 15, 16, 17, 19, 33])
def test_scores_of_small_vocabularies_equal_the_direct_computation(score, vocab):
    check_score(score, "ties", torch.bfloat16, "cpu", 5, vocab, [1, 4], 20)
    check_score(score, "plain", torch.float32, "cpu", 1, vocab, [0], 5)


def test_every_token_that_a_row_with_drafts_got_is_scored(score):
    listed = [place * 7 + row for row in (0, 2, 3, 4, 6) for place in range(3)]
    check_score(score, "ties", torch.bfloat16, "cpu", 7, 999, [*listed, listed[-1]], 5, places=3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_others_nor_on_threads(score, dtype):
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            check_alone(score, "cpu", dtype, 2 * PIECE + 30)
    finally:
        torch.set_num_threads(before)


def test_threads_give_the_same_bits(score):
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(lines_of(score, hard_logits("plain", 9, 3 * PIECE, torch.float32, "cpu"), 20))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


def lines_of(score, logits, width):
    """The lines of all rows, each with a token."""
    rows = len(logits)
    words, tokens, tables = world(rows, [[5 * row % logits.shape[1]] for row in range(rows)], "cpu")
    lines = torch.zeros(2, rows * score_words(width), dtype=torch.int32)
    score(logits, torch.arange(rows).int(), words, tokens, tables, lines, 0, width)
    return lines[1].view(rows, -1)


def test_ids_and_ranks_of_bad_rows_are_those_of_torch_too(score):
    """NaN of both signs and infinities in the order of their bits."""
    logits = hard_logits("bad", 4, 1000, torch.float32, "cpu")
    logits[0, 5], logits[1, 0], logits[2, 10] = -torch.nan, -torch.inf, torch.nan
    got, want = (lines_of(kernels, logits, 20) for kernels in (score, plain.KERNELS.score))
    real = torch.zeros(got.shape[1], dtype=torch.bool)
    real[SCORE_LOGPROB] = real[SCORE_TOP + 20 :] = True
    assert torch.equal(got[:, ~real], want[:, ~real])
    assert bool(got[:, real].contiguous().view(torch.float32).isnan().all())


def test_scores_without_avx512_equal_the_direct_computation(tmp_path):
    score = partial(by_operator, load_plain_variant(tmp_path).score)
    for dtype in DTYPES:
        for kind in KINDS:
            check_score(score, kind, dtype, "cpu", 5, 4999, [0, 2, 3, 4], 5)


def by_operator(operator, logits, index, words, tokens, tables, outboxes, start, width):
    operator(logits, index, words, tokens, tables.state, outboxes, start, width)
