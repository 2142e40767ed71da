"""Rows whose protection is taken away under an oracle: a request gets other tokens than by a direct computation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from unittest.mock import patch

import oracles
import pytest
import torch
from mutation.tools import both, replaced
from oracle_drafter import Oracle as RightDrafter
from oracles import ORACLES
from scenes import BROKEN, one_batch_for_all

from gapless.base.records import Flag
from gapless.kernels import adjust, plain
from gapless.kernels.layout import LENGTH
from gapless.loop.loop import Loop
from gapless.memory.rows import RowTable
from gapless.plan.planner import Planner
from gapless.plan.prefill import Prefill
from gapless.step import program
from gapless.step.executor import Executor
from gapless.step.lanes.adjust import AdjustKey
from gapless.step.listing import Lanes
from gapless.step.processors import ProcessorTables
from gapless.step.program import StepProgram
from gapless.testing.sim import SimStream

pytestmark = pytest.mark.unguarded

Fault = Callable[[], AbstractContextManager[None]]
FAULTS = []


def noticed_by(oracle: str, mood: str | None = None, sharp: bool = False) -> Callable[[Fault], Fault]:
    """Of the faults, `make test` plants the sharp ones."""

    def add(fault: Fault) -> Fault:
        marks = () if sharp else pytest.mark.seeds
        FAULTS.append(pytest.param(oracle, mood, fault, id=fault.__name__, marks=marks))
        return fault

    return add


@noticed_by("plain", "lazy")
def lifetime_L3_the_plan_of_a_step_is_refilled() -> AbstractContextManager[None]:
    return one_batch_for_all()


@noticed_by("erring draft model", "lazy")
def row_013_the_plan_of_draft_passes_is_refilled() -> AbstractContextManager[None]:
    return one_batch_for_all()


@noticed_by("page groups", "lazy")
def row_010_the_metadata_of_attention_is_refilled() -> AbstractContextManager[None]:
    return one_batch_for_all()


@noticed_by("plain", "lazy", sharp=True)
def row_011_an_upload_overtakes_the_stream() -> AbstractContextManager[None]:
    return replaced(SimStream, "upload", lambda _, self, target, source: target.copy_(source))


@noticed_by("right drafts")
def row_022_the_drafter_misses_the_last_token() -> AbstractContextManager[None]:
    def stale(draft, oracle, kernels, rows, tables):
        history, last = tables.history, (tables.state[:, LENGTH].long() - 1).clamp(min=0)
        place = torch.arange(len(last)), last
        before, history[place] = history[place].clone(), 0
        draft(oracle, kernels, rows, tables)
        history[place] = before

    return replaced(RightDrafter, "__call__", stale)


@noticed_by("right drafts")
def row_021_no_draft_past_the_second_place_is_accepted() -> AbstractContextManager[None]:
    def short(draw, self, logits, rows):
        given, finite = draw(self, logits, rows)
        given[:, 3:] = given[:, 3:].clamp(max=-2)
        return given, finite

    return replaced(StepProgram, "draw", short)


@noticed_by("right drafts")
def row_023_drafts_are_made_beside_the_next_step() -> AbstractContextManager[None]:
    draft = RightDrafter.__call__

    def beside(enqueue, executor, steps):
        enqueue(executor, steps)
        program = executor.program
        rows = torch.arange(len(program.tables.state), dtype=torch.int32)
        executor.device.bulk_out.launch(draft, program.drafter, program.kernels, rows, program.tables)

    return both(patch.object(RightDrafter, "__call__", lambda *_: None), replaced(Executor, "enqueue", beside))


@noticed_by("wishes", sharp=True)
def row_024_penalties_count_a_token_that_is_not_there() -> AbstractContextManager[None]:
    def one_too_many(listed, index, rows, tables, slots):
        at = listed(index, rows, tables, slots)
        return at._replace(length=at.length + 1)

    return replaced(adjust, "listed_rows", one_too_many)


@noticed_by("wishes")
def row_025_rows_with_penalties_are_not_listed() -> AbstractContextManager[None]:
    def of(original, self, plan):
        lists = original(self, plan)
        return lists._replace(lanes=tuple([one for one in lists.lanes if one.lane.name != "adjust"]))

    return replaced(Lanes, "of", of)


@noticed_by("processors")
def row_026_processors_see_a_placeholder() -> AbstractContextManager[None]:
    lengths = ProcessorTables.lengths
    return patch.object(ProcessorTables, "lengths", property(lambda self: lengths.fget(self) + 1))


@noticed_by("plain", sharp=True)
def row_027_a_placeholder_reaches_the_forward() -> AbstractContextManager[None]:
    def with_a_placeholder(build, packet, *rest):
        if packet.tokens.shape[0] and not packet.admissions.shape[0]:
            packet.tokens[-1:] = -1
        return build(packet, *rest)

    return replaced(program, "mixed_batch", with_a_placeholder)


@noticed_by("plain")
def row_029_a_preempted_request_loses_its_last_token() -> AbstractContextManager[None]:
    return replaced(RowTable, "settled", lambda settled, self, row: settled(self, row)[:-1])


@noticed_by("plain", sharp=True)
def row_032_a_stop_is_overlooked() -> AbstractContextManager[None]:
    def overlooked(take, *args):
        given = take(*args)
        return given._replace(flags=torch.where(given.flags == int(Flag.STOP), int(Flag.LIVE), given.flags).int())

    return replaced(plain, "take", overlooked)


@noticed_by("plain", sharp=True)
def row_033_a_chunk_counts_as_the_last_one() -> AbstractContextManager[None]:
    def too_soon(take, self):
        return tuple(chunk._replace(last=chunk.last or chunk.size > 1) for chunk in take(self))

    return replaced(Prefill, "take", too_soon)


@noticed_by("plain", sharp=True)
def row_039_an_abort_looks_up_what_may_have_ended() -> AbstractContextManager[None]:
    return replaced(Loop, "abort", lambda _, loop, key: loop.planner.finish(loop.planner.by_key[key]))


@noticed_by("plain")
def row_056_a_preemption_waits_for_a_step_that_waits_for_it() -> AbstractContextManager[None]:
    def after_one_more_step(preempt, planner):
        held, completed = planner.leaving, planner.ledger.completed
        planner.leaving = [row for row in held if row.last_step < completed]
        preempt(planner)
        planner.leaving = [row for row in held if row.last_step >= completed]

    return replaced(Planner, "preempt", after_one_more_step)


@noticed_by("plain", sharp=True)
def row_066_a_sampled_token_is_not_applied() -> AbstractContextManager[None]:
    def not_applied(advance, rows, line, sizes, given, tables):
        place = rows[:1].long(), line[:1, LENGTH].long()
        before = tables.history[place].clone()
        advance(rows, line, sizes, given, tables)
        tables.history[place] = before

    return replaced(plain, "advance", not_applied)


@noticed_by("masks", sharp=True)
def row_074_a_bias_comes_after_the_mask() -> AbstractContextManager[None]:
    def biases_last(adjust, key, state, *given):
        adjust(key, state, *given)
        state.tables.masks.fill_(-1)

    return replaced(AdjustKey, "run", biases_last)


@noticed_by("plain")
def row_076_a_captured_step_reads_a_packet_on_the_host() -> AbstractContextManager[None]:
    def from_the_host(capture, executor, order):
        own = executor.buffers
        words = executor.packets.slots[0].tensor.view(torch.int32)[executor.layout.packet :]
        executor.buffers = own._replace(words=words)
        try:
            return capture(executor, order)
        finally:
            executor.buffers = own

    return replaced(Executor, "capture", from_the_host)


@noticed_by("wishes")
def row_084_the_counter_of_a_sampler_follows_the_step() -> AbstractContextManager[None]:
    launched = iter(range(10**6))

    def by_the_step(draw, self, logits, rows):
        state = self.tables.state
        lengths, state[:, LENGTH] = state[:, LENGTH].clone(), next(launched)
        found = draw(self, logits, rows)
        state[:, LENGTH] = lengths
        return found

    return replaced(StepProgram, "draw", by_the_step)


@noticed_by("plain", "lazy")
def lifetime_L1_the_host_writes_the_page_table() -> AbstractContextManager[None]:
    loops = []

    def clear(retire, rows, row, last_step):
        loops[-1].launcher.executor.program.tables.pages[row] = 0
        retire(rows, row, last_step)

    def init(original, self, *args, **kwargs):
        original(self, *args, **kwargs)
        loops.append(self)

    return both(replaced(Loop, "__init__", init), replaced(RowTable, "retire", clear))


@pytest.mark.parametrize(("oracle", "mood", "fault"), FAULTS)
def test_a_missing_protection_is_noticed(oracle, mood, fault, monkeypatch):
    # C++ writes wherever a packet says, so that broken ones are for plain PyTorch.
    monkeypatch.setattr(oracles, "kernels_for", lambda seed, device: None)
    with fault(), pytest.raises(BROKEN) as caught:
        assert ORACLES[oracle].holds(oracles.play(ORACLES[oracle], ORACLES[oracle].few, 8, mood=mood))
    assert not isinstance(caught.value.__cause__, TypeError), "the fault no longer fits the engine"
