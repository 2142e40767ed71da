"""Which token a mask says comes next, by its definition over the texts of a vocabulary."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gapless.base.records import TokenTexts
from gapless.loop.attendant import NARROW, expected_next

TEXTS = [b"a", b"ab", b"abc", b"b", b"", b"abd", b"bc", *(b"abc"[:1] * size for size in range(2, 40))]
VOCABULARY = TokenTexts(b"".join(TEXTS), np.cumsum([len(text) for text in TEXTS]).astype(np.uint32))


def mask_of(tokens: list[int]) -> np.ndarray:
    words = np.zeros(-(-len(TEXTS) // 32), np.int32)
    for token in tokens:
        words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
    return words


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], None), ([0], 0), ([31], 31), ([44], 44), ([0, 1], 1), ([0, 1, 2], 2), ([1, 2, 5], None), ([0, 3], None),
        ([3, 6], 6), ([0, 7, 40], 40), ([*range(7, 7 + NARROW)], 6 + NARROW), ([*range(7, 8 + NARROW)], None),
        ([0, 50], None), ([50], 50),
    ],
)  # fmt: skip
def test_a_token_is_expected_where_every_allowed_one_begins_it(tokens, expected):
    assert expected_next(mask_of(tokens), VOCABULARY) == expected


def test_without_texts_a_token_is_expected_where_it_is_the_only_one():
    assert expected_next(mask_of([6]), None) == 6 and expected_next(mask_of([0, 1]), None) is None


def test_expected_tokens_are_those_of_the_texts_for_any_mask():
    rng = random.Random(0)
    for _ in range(500):
        tokens = sorted(rng.sample(range(len(TEXTS)), rng.randrange(1, 5)))
        begun = [one for one in tokens if all(TEXTS[one].startswith(TEXTS[other]) for other in tokens)]
        assert expected_next(mask_of(tokens), VOCABULARY) == (begun[0] if begun else None)
