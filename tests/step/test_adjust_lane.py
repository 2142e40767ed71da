"""The adjust lane's processors: which rows a processor changes, what it is given, and in which order several run."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from harness import Job, capture_all, checksum_loop, run
from step_harness import request
from torch_processors import PROCESSORS as TORCH_PROCESSORS

from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.device import CpuDevice
from gapless.kernels.layout import ADJUST_SLOT, LENGTH, PROCESSORS
from gapless.kernels.tables import Adjustments, Tables
from gapless.loop.records import StepCounts
from gapless.loop.spec import Sizes
from gapless.step.lanes.adjust import AdjustLane
from gapless.step.processors import Processor, process
from gapless.testing.checksum import ChecksumModel
from gapless.testing.sim import SimDevice

CPU = torch.device("cpu")
VOCAB = 33


def memory(rows: int) -> tuple[Tables, Adjustments]:
    """Slots of rows in reverse order, with logits of their own."""
    tables, slots = Tables.new(rows, 8, 1, CPU), Adjustments.new(rows, VOCAB, CPU)
    tables.params[1:, ADJUST_SLOT] = torch.arange(rows, 0, -1, dtype=torch.int32)
    slots.adjusted.copy_(torch.randn(1, rows + 1, VOCAB, generator=torch.Generator().manual_seed(1)))
    return tables, slots


def spoil(logits, tables):
    return logits.fill_(torch.nan)


def test_rows_that_do_not_ask_keep_their_bits_whatever_is_written_to_their_logits():
    tables, slots = memory(50)
    asks = torch.arange(51) % 3 == 1
    slots.wishes[asks, PROCESSORS] = 0b10
    slots.wishes[~asks, PROCESSORS] = 0b01
    before = slots.adjusted[0].clone()
    listed = torch.tensor([*range(46), *[45] * 18], dtype=torch.int32)  # the last one again and again is padding
    process((Processor("none", spoil), Processor("spoil", spoil)), (1,), listed, tables, slots)
    changed = asks.clone()
    changed[1:6] = False  # the slots of rows 46 to 50
    assert slots.adjusted[0, changed].isnan().all()
    assert torch.equal(slots.adjusted[0, ~changed], before[~changed])


def test_processors_run_in_their_order_each_with_its_own_numbers():
    tables, slots = memory(2)
    request = Request(
        0, np.zeros(3, np.int32), SamplingParams(), 0, (), 0, 8, processors=((1, (2.0,)), (0, (0.5, 3.0)))
    )  # fmt: skip
    words = AdjustLane().wishes(request)
    slots.wishes[2, : len(words)] = torch.from_numpy(words)
    before, seen = slots.adjusted[0, 2].clone(), []

    def add(logits, tables):
        seen.append((tables.prompt_lengths.tolist(), tables.arguments[:, :3].tolist()))
        return logits + tables.arguments[:, 1:2]

    def times(logits, tables):
        seen.append((tables.lengths.tolist(), tables.arguments[:, :3].tolist()))
        return logits * tables.arguments[:, :1]

    tables.state[1, LENGTH] = 5  # of the row that has slot 2
    process((Processor("add", add), Processor("times", times)), (0, 1), torch.tensor([1]).int(), tables, slots)
    assert seen == [([3], [[0.5, 3.0, 0.0]]), ([5], [[2.0, 0.0, 0.0]])]
    assert torch.equal(slots.adjusted[0, 2], (before + 3) * 2)


def tokens_of(kind: str, asks: dict) -> tuple[list[list[int]], StepCounts]:
    """Eight greedy rows, one of which may ask, in an engine that has captured what is likely."""
    device = CpuDevice(threads=1) if kind == "cpu" else SimDevice(1, "eager")
    shape = Sizes(8, 32, 33, 8, 32, queue=8, slots=8)
    loop = checksum_loop(device, shape, 4, ChecksumModel, buckets=(8,), processors=TORCH_PROCESSORS[:1])
    capture_all(loop)
    requests = [request(key=key, tokens=(key, 7), max_len=24, temperature=0.0) for key in range(8)]
    requests[4] = requests[4]._replace(**asks)
    jobs = [Job(one, 0, None) for one in requests]
    run(loop, jobs, check=False)
    device.close()
    return [job.tokens for job in jobs], loop.counters


@pytest.mark.parametrize("kind", ["sim", "cpu"])
def test_all_steps_are_replays_and_neighbours_keep_their_tokens_when_one_row_asks(kind):
    plain, _ = tokens_of(kind, {})
    asked = SamplingParams(temperature=0.0, max_tokens=None, logits_processors=["favours"])
    tokens, counters = tokens_of(kind, {"params": asked, "processors": ((0, (50.0,)),)})
    assert tokens[4] == list(range(2, 24)) and [*tokens[:4], *tokens[5:]] == [*plain[:4], *plain[5:]]
    # Prompts run eagerly here, and in one step.
    assert counters.graph_misses == 0 and counters.graph_steps == counters.steps - 1 >= 20
