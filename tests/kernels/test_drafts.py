"""The kernels for drafts in torch and C++, against plain Python."""

from __future__ import annotations

import pytest
from draft_cases import check_accept, check_begin, check_look_up, check_sample

from gapless.kernels import native, plain
from gapless.kernels.seam import Kernels


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


@pytest.mark.parametrize(("places", "width"), [(1, 1), (1, 5), (3, 3), (5, 5), (3, 9)])
def test_a_row_keeps_what_it_sampled_after_right_drafts(kernels, places, width):
    for seed in range(20):
        check_accept(kernels, "cpu", seed, places, width)


@pytest.mark.parametrize("lengths", [(1, 1), (1, 4), (2, 4), (3, 8)])
def test_what_followed_before_is_drafted(kernels, lengths):
    assert sum(check_look_up(kernels, "cpu", seed, most, lengths) for seed in range(12) for most in (1, 4, 8)) > 20


@pytest.mark.parametrize("places", [2, 5])
def test_a_place_draws_as_its_row_would_draw_there(kernels, places):
    for seed in range(6):
        check_sample(kernels, "cpu", seed, places, 50)
