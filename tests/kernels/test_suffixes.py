"""The kernels for drafts from other answers in torch and C++, against plain Python."""

from __future__ import annotations

import pytest
from suffix_cases import check_recall, check_remember

from gapless.kernels import native, plain
from gapless.kernels.seam import Kernels
from gapless.kernels.views import Recall


@pytest.fixture(params=["torch", "native"])
def kernels(request) -> Kernels:
    if request.param == "torch":
        return plain.KERNELS
    found = native.load()
    assert found is not None
    return found


@pytest.mark.parametrize(("width", "lengths"), [(1, 3), (5, 3), (9, 1), (3, 2)])
def test_what_followed_is_noted_for_its_tenant(kernels, width, lengths):
    assert sum(check_remember(kernels, "cpu", seed, width, lengths, steps=40) for seed in range(6)) > 30


@pytest.mark.parametrize(
    "asked", [Recall(4, 1000, 100), Recall(1, 250, 0), Recall(8, 9000, 700), Recall(8, 1500, 1000)]
)
@pytest.mark.parametrize("lengths", [1, 3])
def test_what_was_noted_is_drafted_for_its_tenant(kernels, asked, lengths):
    found = sum(check_recall(kernels, "cpu", seed, asked, lengths) for seed in range(20))
    assert found > 0 or asked.factor == 250  # whose drafts are none
