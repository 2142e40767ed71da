"""Scores in Triton's interpreter; run by tests/kernels/test_score_triton.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from score_cases import KINDS, check_alone, check_score

from gapless.kernels.score_triton import score

# -inf less -inf and so on: what a GPU computes without a word.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "width"), [*((torch.float32, width) for width in (0, 1, 5, 20)), (torch.float16, 5)])
def test_scores_equal_the_direct_computation(dtype, width, kind):
    check_score(score, kind, dtype, "cpu", 5, 2600, [0, 2, 4, 4], width)


@pytest.mark.parametrize("vocab", [1, 3, 19, 2048, 2049])
def test_scores_of_small_vocabularies_equal_the_direct_computation(vocab):
    check_score(score, "ties", torch.float16, "cpu", 5, vocab, [1, 4], 20)
    check_score(score, "plain", torch.float32, "cpu", 1, vocab, [0], 5)


def test_every_token_that_a_row_with_drafts_got_is_scored():
    listed = [place * 5 + row for row in (0, 2, 3, 4) for place in range(3)]
    check_score(score, "ties", torch.float16, "cpu", 5, 999, listed, 5, places=3)


def test_a_row_does_not_depend_on_others():
    check_alone(score, "cpu", torch.float32, 4500)
