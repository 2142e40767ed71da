"""The kernels for drafts in torch and C++, against plain Python."""

from __future__ import annotations

import pytest
import torch
from draft_cases import (
    check_accept,
    check_ask,
    check_begin,
    check_begin_beside,
    check_keep_drafts,
    check_look_up,
    check_sample,
)

from gapless.kernels import native, plain
from gapless.kernels.layout import (
    CUT_ID,
    CUT_VALUE,
    DRAFTED,
    KEEP_ID,
    KEEP_VALUE,
    LENGTH,
    NO_TOKEN,
    SEED_LOW,
    STOP_IDS,
    TEMPERATURE,
)
from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Tables


@pytest.fixture(params=["torch", "native"])
def kernels(request) -> Kernels:
    if request.param == "torch":
        return plain.KERNELS
    found = native.load()
    assert found is not None
    return found


@pytest.mark.parametrize("places", [1, 2, 5])
def test_a_step_with_drafts_begins_with_every_place_of_its_rows(kernels, places):
    for seed in range(8):
        check_begin(kernels, "cpu", seed, places)


@pytest.mark.parametrize("places", [1, 2, 5])
def test_a_step_with_drafts_beside_prompts_begins_with_every_place(kernels, places):
    for seed in range(8):
        for decode in ([3], [3, 1, 7, 9, 2, 0], []):
            check_begin_beside(kernels, "cpu", seed, places, decode)


@pytest.mark.parametrize(("places", "width"), [(1, 1), (1, 5), (3, 3), (5, 5), (3, 9)])
def test_a_row_keeps_what_it_sampled_after_right_drafts(kernels, places, width):
    for seed in range(20):
        check_accept(kernels, "cpu", seed, places, width)


@pytest.mark.parametrize("drafts", [1, 4, 8])
def test_a_row_is_asked_for_as_many_drafts_as_it_may_have(kernels, drafts):
    for seed in range(20):
        check_ask(kernels, "cpu", seed, drafts)


def test_drafts_are_kept_in_the_histories_of_their_rows(kernels):
    for seed in range(20):
        check_keep_drafts(kernels, "cpu", seed)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 4), (2, 4), (3, 8)])
def test_what_followed_before_is_drafted(kernels, lengths):
    assert sum(check_look_up(kernels, "cpu", seed, most, lengths) for seed in range(12) for most in (1, 4, 8)) > 20


@pytest.mark.parametrize("places", [2, 5])
def test_a_place_draws_as_its_row_would_draw_there(kernels, places):
    for seed in range(6):
        check_sample(kernels, "cpu", seed, places, 50)


def test_tokens_after_a_draft_have_the_distribution_of_their_logits(kernels):
    """Chi-square over seeds, at temperature 1: what a place draws does not lean on what was drafted before it."""
    count, vocab = 4000, 12
    tables = Tables.new(count, 8, 2, torch.device("cpu"))
    tables.state[1:, LENGTH], tables.state[1:, DRAFTED] = 3, 5
    tables.state[:, CUT_VALUE::2], tables.state[:, CUT_ID::2] = KEEP_VALUE, KEEP_ID
    tables.params[:, STOP_IDS:] = NO_TOKEN
    tables.params[:, TEMPERATURE] = torch.tensor(1.0).view(torch.int32)
    tables.params[:, SEED_LOW] = torch.arange(count + 1)
    logits = torch.randn(3, 1, vocab, generator=torch.Generator().manual_seed(5)).expand(3, count, vocab)
    rows = torch.arange(1, count + 1, dtype=torch.int32)
    tokens, _ = kernels.sample(logits.reshape(-1, vocab).contiguous(), rows, tables, None)
    for own, drawn in zip(logits[:, 0], tokens.view(3, count), strict=True):
        expected = own.softmax(-1) * count
        found = torch.bincount(drawn, minlength=vocab)
        assert float(((found - expected) ** 2 / expected).sum()) < 31.3  # p = 0.001 for 11 degrees of freedom
    assert not torch.equal(*tokens.view(3, count)[1:])
