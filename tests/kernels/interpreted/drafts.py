"""The kernels for drafts in Triton's interpreter; run by tests/kernels/test_drafts_triton.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from draft_cases import check_accept, check_begin, check_begin_beside, check_look_up, check_sample

from gapless.kernels import drafts_triton
from gapless.kernels.all_triton import TRITON_KERNELS

pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:overflow encountered")


@pytest.mark.parametrize("places", [1, 5])
def test_a_step_with_drafts_begins_with_every_place_of_its_rows(places):
    for seed in range(3):
        check_begin(TRITON_KERNELS, "cpu", seed, places)


@pytest.mark.parametrize("places", [1, 5])
def test_a_step_with_drafts_beside_prompts_begins_with_every_place(places):
    for seed in range(3):
        for decode in ([3], [3, 1, 7, 9, 2, 0], []):
            check_begin_beside(TRITON_KERNELS, "cpu", seed, places, decode)


@pytest.mark.parametrize(("places", "width"), [(1, 5), (5, 5)])
def test_a_row_keeps_what_it_sampled_after_right_drafts(places, width):
    for seed in range(6):
        check_accept(TRITON_KERNELS, "cpu", seed, places, width)


@pytest.mark.parametrize("block", [8, 1024])
def test_what_followed_before_is_drafted(block, monkeypatch):
    monkeypatch.setattr(drafts_triton, "MATCH_BLOCK", block)
    assert sum(check_look_up(TRITON_KERNELS, "cpu", seed, 4, (2, 4)) for seed in range(5)) > 3


def test_a_place_draws_as_its_row_would_draw_there():
    for seed in range(2):
        check_sample(TRITON_KERNELS, "cpu", seed, 3, 50)
