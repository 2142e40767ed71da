"""Copies of pages and their checksums in Triton's interpreter; run by tests/kernels/test_page_sums_triton.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from page_cases import check_changes, check_definition

from gapless.kernels import all_triton, pages_triton


@pytest.mark.parametrize("words, programs", [(1, 2), (7, 8), (4096, 2), (4097, 8), (70_000, 2), (70_000, 8)])
def test_rows_are_copied_and_each_word_counts_by_its_place(words, programs, monkeypatch):
    monkeypatch.setattr(pages_triton, "STORING", programs)  # memory of the CPU is stored to
    check_definition(all_triton.TRITON_KERNELS, words, "cpu", words, True)


@pytest.mark.parametrize("words", [33, 5000])
def test_flips_in_pairs_and_words_that_change_places_are_found(words):
    check_changes(all_triton.TRITON_KERNELS, words, "cpu", 1)
