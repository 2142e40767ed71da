"""Sampling in Triton's interpreter; run by tests/kernels/test_sampling_triton.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from sampling_cases import check_bad_logits, check_greedy, check_independence, check_noise, check_random
from sampling_oracle import ALL, Setting, check_bad_rows, check_hard_rows, check_masks_of_places, tables_of

from gapless.kernels import cut_triton
from gapless.kernels.all_triton import TRITON_KERNELS
from gapless.kernels.views import Filters

# -inf less -inf and so on: what a GPU computes without a word.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")


@pytest.mark.parametrize("rows, vocab", [(1, 1), (2, 5), (3, 1024), (2, 3001), (9, 2050)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_greedy_rows_take_the_first_best_token(dtype, rows, vocab):
    check_greedy("cpu", dtype, rows, vocab)


@pytest.mark.parametrize("vocab", [7, 2000])
def test_bad_logits_are_flagged_in_their_rows_alone(vocab):
    check_bad_logits("cpu", vocab)


@pytest.mark.parametrize("seed", [0, -1, 2**31, -(2**63), 0x1234_5678_9ABC_DEF0])
def test_noise_equals_the_cipher_in_python(seed):
    check_noise("cpu", seed, 0)
    check_noise("cpu", seed, 131_071)


def test_draws_are_those_of_torch():
    assert check_random("cpu", torch.float32, 12, 300, 1.0) >= 0.9
    assert check_random("cpu", torch.float32, 3, 2500, 3.0) > 0.6
    assert check_random("cpu", torch.float16, 5, 97, 1.0) > 0.6


def test_a_token_does_not_depend_on_the_batch():
    check_independence("cpu", 9, 1100)


@pytest.mark.parametrize("vocab, dtype", [(300, torch.float16), (301, torch.float32)])
def test_rows_where_searches_go_wrong(vocab, dtype):
    check_hard_rows(TRITON_KERNELS, vocab, dtype, "cpu", every=13)


def test_rows_that_are_not_finite_and_padding():
    check_bad_rows(TRITON_KERNELS, 1100, "cpu")


def test_each_place_of_a_row_draws_what_its_mask_leaves():
    check_masks_of_places(TRITON_KERNELS, 1100, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("few", [{"top_k": 9}, {"top_p": 0.7}, {"top_k": 40, "top_p": 0.9}, {"min_p": 0.05}])
def test_a_cut_is_the_same_in_any_spread_and_beside_any_filters(few, dtype, monkeypatch):
    logits = (torch.randn(2, 900, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    index, found = torch.arange(2, dtype=torch.int32), []
    own = Filters("top_k" in few, "top_p" in few)
    for tile, filters in dict.fromkeys(((256, ALL), (256, own), (512, own), (1024, ALL))):
        monkeypatch.setattr(cut_triton, "FEW_ROWS_TILE", tile)
        rows, tables = tables_of([Setting(0.8, **few), Setting(1.3, **few)])
        TRITON_KERNELS.cut(logits, index, rows, tables, filters)
        found.append(tables.state)
    assert all(torch.equal(state, found[0]) for state in found)
