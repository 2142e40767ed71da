"""Steps with chunks on graphs larger than their own: with lanes, over two page groups, and on two ranks."""

from __future__ import annotations

import pytest
import torch
from grouped_model import GroupedModel
from mixed_harness import LONGEST, REQUESTS, SETTINGS, VOCAB, dense_model, drive, engine
from sharpest import sharpest

from gapless.step import graphs
from gapless.step.lanes.cut import CutKey
from gapless.step.lanes.score import ScoreKey
from gapless.step.orders import CaptureOrder
from gapless.testing.sim import SimDevice
from gapless.testing.world import World

ASKING = (
    {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "logprobs": 3},
    {"temperature": 0.9},
    {"temperature": 0.7, "top_p": 0.6},
    {"temperature": 0.0, "logprobs": 0},
    {"temperature": 0.0},
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return dense_model(tmp_path_factory.mktemp("mixed"))


class UnboundedModel(GroupedModel):
    """Two page groups. No graph of it depends on a bound of the lengths: a step may read its whole page table.

    A captured step has chunks of other sizes than its plan, so every token is a row by itself.
    """

    bounded = False

    def forward(self, inputs, plan, cache):
        rows = torch.arange(len(inputs.ids), device=inputs.ids.device)
        if inputs.starts is not None:
            rows = torch.searchsorted(inputs.starts[1:], rows, right=True).clamp(max=len(inputs.rows) - 1)
        alone = inputs._replace(rows=inputs.rows[rows], kv_lens=inputs.kv_lens[rows], starts=None)
        return super().forward(alone._replace(columns=inputs.page_table.shape[1]), (1,) * len(rows), cache)


def watch(loop):
    """Plans and decisions of the steps with chunks, and whether each runs as a graph that stands in."""
    leader, seen = loop.launcher.leader, []
    decide, stand_ins = leader.decide, {key for key in leader.graphs.likely() if getattr(key, "batch", None)}

    def look(plan):
        decision = decide(plan)
        if plan.chunks:
            seen.append((plan, decision, decision.key.forward in stand_ins))
        return decision

    leader.decide = look
    return seen


def many(seen):
    """Return them, of which there must be more than fifty."""
    assert len(seen) > 50
    return seen


def test_rows_of_prompts_that_ask_get_their_filters_and_scores(model):
    """Their places in the batch are those in the larger graph, after its decode rows."""
    scores, tokens = ({}, {}), []
    for buckets, values in zip(((), None), scores, strict=True):
        device = SimDevice(3)
        loop = engine(device, model, 4, buckets=buckets, patience=1)
        loop.capture()
        seen = watch(loop)
        tokens.append(drive(loop, ASKING, scores=values))
    moved = [
        (CutKey in map(type, decision.wanted), ScoreKey in map(type, decision.wanted))
        for plan, decision, stands_in in many(seen)
        if stands_in and 0 < len(plan.decode) < decision.key.forward.batch.decode
    ]
    assert sum(cut for cut, _ in moved) > 10 and sum(score for _, score in moved) > 10
    assert all(stands_in for _, _, stands_in in many(seen))
    assert len(tokens[0]) == REQUESTS - 1 and tokens[0] == tokens[1]
    assert len(scores[0]) > 250 and scores[0] == pytest.approx(scores[1], abs=1e-4)


def test_pages_of_two_groups_are_written():
    """A larger graph has room for the page writes of every group, so that no step with chunks runs eagerly."""
    tokens = []
    for buckets in ((), None):
        device = SimDevice(4)
        loop = engine(device, UnboundedModel(VOCAB, LONGEST), 4, buckets=buckets, patience=1)
        loop.capture()
        seen = watch(loop)
        tokens.append(drive(loop, SETTINGS[:1]))
    assert all(stands_in and decision.captured for _, decision, stands_in in many(seen))
    assert sum({write.group for write in plan.pages} == {0, 1} for plan, _, _ in seen) > 50
    assert len(tokens[0]) == REQUESTS - 1 and tokens[0] == tokens[1]


@pytest.mark.parametrize("depth", sharpest([4, 1]))
def test_ranks_that_follow_run_them_too(depth, monkeypatch):
    """They capture what was wished for, drop what the leader drops, and compute what one rank computes."""
    options, orders = {"buckets": (2, 5), "patience": 1}, []
    alone = engine(SimDevice(depth), UnboundedModel(VOCAB, LONGEST), depth, **options)
    alone.capture()
    wanted = drive(alone, ASKING)
    world = World(depth, 2)
    send, world.send = world.send, lambda order: (send(order), orders.append(order))
    model = UnboundedModel(VOCAB, LONGEST)
    loop = engine(world.device, model, depth, ranks=world, group=world.group, **options)
    world.follow(loop)
    loop.capture()
    at_start = len(orders)
    monkeypatch.setattr(graphs, "MOST_GRAPHS", at_start)
    seen = watch(loop)
    assert drive(loop, ASKING) == wanted
    while loop.rest():
        loop.turn()
    assert drive(loop, ASKING) == wanted
    world.check_alike(loop)
    world.device.close()
    stand_ins = [stands_in for _, _, stands_in in many(seen)]
    assert 30 < sum(stand_ins) < len(stand_ins) - 10, "and some have got graphs of their own"
    later = [order for order in orders[at_start:] if isinstance(order, CaptureOrder)]
    assert later and any(order.drop for order in later), "graphs were captured on the way, and dropped"
