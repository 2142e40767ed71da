"""Rows with drafts get the tokens of a direct computation, at any depth, whether the drafts are right or not."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext

import pytest
from harness import VOCAB, WaryModel, captures_at_once, check_at_rest, kernels_for, model_loop, run, script, sizes
from oracle_drafter import Oracle, OracleHead, drafts_beside_chunks, numbers_at_random

from gapless.device import CpuDevice, Device
from gapless.loop.loop import Loop
from gapless.step.speculation import Speculation
from gapless.testing.sim import SimDevice

DRAFTS = 4


def play(
    seed: int, device: Device, depth: int | None, errs: float, chain: int | None = None, ran: Counter[int] | None = None
) -> Loop:
    """With `ran`, some seeds run numbers of drafts at random, which it counts."""
    shape = sizes(seed)
    jobs = script(seed, shape.max_len)
    graphs = captures_at_once(shape) if seed // 8 % 2 else {}
    kernels = kernels_for(seed) if device.kind != "cuda" else None
    kind = WaryModel if isinstance(device, SimDevice) else type(WaryModel(VOCAB)).__mro__[2]
    model, oracle = kind(VOCAB, shape.max_len), Oracle(VOCAB, DRAFTS, errs)
    speculation = Speculation(DRAFTS, oracle, shape.rows)
    if seed // 2 % 2:
        speculation = Speculation(DRAFTS, None, shape.rows, OracleHead(oracle, model))
    loop = model_loop(
        model, device, shape, depth, by_priority=seed % 3 == 0, prefix_caching=seed % 5 != 0, chain=chain,
        kernels=kernels, speculation=speculation, **graphs
    )  # fmt: skip
    with numbers_at_random(seed, speculation) if ran is not None and seed % 4 in (1, 2) else nullcontext() as found:
        run(loop, jobs)
    if ran is not None and found:
        ran.update(found)
    for job in jobs:
        job.check(f"seed {seed}, depth {depth}, request {job.request.key}")
    check_at_rest(loop)
    device.close()
    return loop


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("errs", [0.0, 0.3, 1.0])
def test_drafts_change_no_token(depth, errs, raced, guarded_steps):
    accepted = drafted = preempted = captured = 0
    ran = Counter[int]()
    with guarded_steps.rest(), drafts_beside_chunks() as beside:
        for seed in range(0, 16, 2 if raced else 1):
            loop = play(seed, SimDevice(seed * 8 + depth, maps_host=seed % 4 == 0), depth, errs, ran=ran)
            accepted += int(loop.launcher.gate.counts.accepted.sum())
            drafted += loop.launcher.gate.counts.draft_tokens
            preempted += loop.planner.preemptions
            captured += loop.counters.graph_steps
    assert drafted > 200 and preempted and captured and len(beside) > 5
    assert min(ran[places] for places in (1, 3, 5)) > (10 if raced else 20), ran
    least, most = {0.0: (0.95, 1.0), 0.3: (0.3, 0.8), 1.0: (0.0, 0.01)}[errs]  # a stale draft may be right by chance
    assert least * drafted <= accepted <= most * drafted, accepted / drafted


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("errs", [0.0, 0.3, 1.0])
def test_drafts_change_no_token_on_the_cpu(depth, errs):
    """Two of the drafters are heads, and two loops capture their steps."""
    loops = [play(seed, CpuDevice(threads=1), depth, errs) for seed in (0, 3, 9, 14)]
    drafted = sum(loop.launcher.gate.counts.draft_tokens for loop in loops)
    accepted = sum(int(loop.launcher.gate.counts.accepted.sum()) for loop in loops)
    assert drafted > 40 and any(loop.counters.graph_steps for loop in loops)
    assert accepted > 20 if errs < 1 else accepted < 5
