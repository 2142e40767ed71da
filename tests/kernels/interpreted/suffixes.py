"""The kernels for drafts from other answers in Triton's interpreter; run by tests/kernels/test_suffixes_triton.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from suffix_cases import check_recall, check_remember

from gapless.kernels.all_triton import TRITON_KERNELS
from gapless.kernels.views import Recall

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered")


@pytest.mark.parametrize(("width", "lengths"), [(1, 3), (5, 2)])
def test_what_followed_is_noted_for_its_tenant(width, lengths):
    assert sum(check_remember(TRITON_KERNELS, "cpu", seed, width, lengths, steps=4) for seed in range(3)) > 20


@pytest.mark.parametrize("asked", [Recall(4, 1000, 100), Recall(8, 1500, 700)])
def test_what_was_noted_is_drafted_for_its_tenant(asked):
    assert sum(check_recall(TRITON_KERNELS, "cpu", seed, asked, 3) for seed in range(3)) > 0
