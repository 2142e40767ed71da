"""The bound on prompt tokens beside decoding rows: from measured times, and kept by every plan."""

import pytest
from plan_harness import Drive, Job

from gapless.plan.limits import LEAST, STALL, UNNOTICED_NS, ChunkBudget

MS = 1_000_000


def learned(decode_ns: int, token_ns: int, most: int = 1024) -> ChunkBudget:
    budget = ChunkBudget(most, True)
    for _ in range(50):
        budget.learn(4, 0, decode_ns)
        budget.learn(4, 100, decode_ns + 100 * token_ns)
        budget.learn(0, 200, 200 * token_ns)
    return budget


@pytest.mark.parametrize(
    "decode_ns, token_ns, bound_ns",
    [
        (30 * MS, MS, STALL * 30 * MS),
        (5 * MS, 50_000, STALL * 5 * MS),
        (MS // 2, 20_000, UNNOTICED_NS),
    ],
)
def test_a_step_with_chunks_takes_no_longer_than_the_bound(decode_ns, token_ns, bound_ns):
    budget = learned(decode_ns, token_ns)
    tokens = budget.beside(4)
    assert LEAST < tokens < 1020
    assert bound_ns - token_ns <= decode_ns + tokens * token_ns <= bound_ns
    assert budget.beside(0) == 1024, "nobody waits for it"


def test_slow_prompts_go_on_and_fast_ones_take_the_whole_step():
    assert learned(MS, 100 * MS).beside(4) == LEAST
    assert learned(MS, 100 * MS, most=20).beside(4) == 16
    assert learned(MS, 10).beside(4) == 1020


def test_it_follows_the_times():
    budget = learned(5 * MS, 50_000)
    before = budget.beside(4)
    for _ in range(50):
        budget.learn(4, 300, 5 * MS + 300 * 100_000)
    assert before // 2 - 1 <= budget.beside(4) <= before // 2 + 1


def test_without_measured_times_and_where_it_is_off_the_step_is_the_bound():
    budget = ChunkBudget(64, False)
    for _ in range(10):
        budget.learn(1, 0, MS)
        budget.learn(1, 60, 1000 * MS)
    assert budget.beside(1) == 63 and ChunkBudget(64, True).beside(1) == 63


@pytest.mark.parametrize("bounds_stalls", [True, False])
def test_a_plan_keeps_it_beside_decoding_rows(bounds_stalls):
    drive = Drive(rows=3, max_len=400, pages=400, size=4, tokens=200, prefix=False, bounds_stalls=bounds_stalls)
    drive.add(Job(0, [1] * 5, 100, 100))
    for _ in range(6):
        drive.turn()
    drive.planner.chunk_budget = learned(5 * MS, 500_000, most=200) if bounds_stalls else drive.planner.chunk_budget
    drive.add(Job(1, [2] * 300, 320, 320))
    drive.add(Job(2, [3] * 90, 120, 120))
    beside = [plan.chunk_tokens for plan in iter(drive.turn, None) if plan.decode and plan.chunks]
    assert sum(beside) == 390
    assert max(beside) <= drive.planner.chunk_budget.beside(1) if bounds_stalls else max(beside) == 199
