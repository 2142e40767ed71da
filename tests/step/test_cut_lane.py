"""The cut lane: which rows are in it, and what it leaves undone."""

from __future__ import annotations

import pytest
import torch
from step_harness import request, rows_in
from test_lanes import ASKS, tokens_of

from gapless.base.records import Chunk, StepPlan
from gapless.memory.ledger import Ledger
from gapless.memory.rows import RowTable
from gapless.step.listing import NO_LISTS, Lanes


def plan_of(decode, chunks=()):
    return StepPlan(1, tuple(decode), tuple(chunks), (), (), 8)


@pytest.mark.parametrize("asks", [{"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_the_lane_of_the_cut_is_for_rows_that_the_registry_says_need_it(asks):
    lanes, plan = Lanes(RowTable(3, 8, Ledger())), plan_of((3, 1, 2))
    lanes.admit(1, request(temperature=0.7, **asks))
    lanes.admit(2, request(temperature=0.0, **asks))
    lanes.admit(3, request(temperature=0.7))
    assert rows_in(lanes.of(plan), "cut") == (1,), "a greedy row asks for no cut"
    lanes.admit(1, request(temperature=0.7))
    assert lanes.of(plan) == NO_LISTS


def test_only_filters_that_can_leave_a_token_out_are_cut():
    lanes = Lanes(RowTable(9, 16, Ledger()))
    settings = ({}, {"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 0.0, "top_k": 3}, {"min_tokens": 2})
    for row, setting in enumerate(settings, 1):
        lanes.admit(row, request(**setting))
    assert rows_in(lanes.of(plan_of(range(1, 7))), "cut") == (1, 2, 3)
    beside = lanes.of(plan_of((1, 5, 6), [Chunk(2, 0, 1, True), Chunk(3, 0, 1, False)]))
    assert rows_in(beside, "cut") == (3,)


def test_lanes_keep_the_vocabulary_unsorted(monkeypatch):
    """Sorting all rows since one has top-p alone was most of a step."""
    monkeypatch.setattr(torch.Tensor, "argsort", None)
    monkeypatch.setattr(torch.Tensor, "sort", None)
    found, _ = tokens_of(4, ASKS["top-p"], buckets=())
    assert all(len(tokens) > 2 for tokens in found)
