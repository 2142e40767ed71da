"""The planner on a perfect device: what every plan promises, order, fairness, aborts, and what a plan costs."""

from __future__ import annotations

import sys

import pytest
from plan_harness import Drive, Job, random_run

from gapless.base.errors import QueueFullError
from gapless.plan.planner import LOOK_BEHIND, MAX_SKIPS
from gapless.plan.sequence import Sequence, State

SEEDS = 240


@pytest.fixture(scope="module")
def runs():
    return [random_run(seed) for seed in range(SEEDS)]


def test_random_scripts_keep_every_promise_and_end_at_rest(runs):
    assert sum(drive.plans for drive in runs) > 10_000


@pytest.mark.parametrize("chain", [2, 4, 8])
def test_chains_keep_every_promise(chain):
    runs = [random_run(seed, chain) for seed in range(60)]
    assert sum(drive.chained for drive in runs) > 40
    assert sum(drive.planner.preemptions for drive in runs) > 10


def test_a_chain_goes_on_until_a_row_needs_no_more_steps():
    drive = Drive(rows=2, max_len=64, pages=40, size=32, tokens=16)
    drive.add(job(0, 3, 7))
    drive.add(job(1, 3, 20))
    drive.turn()
    assert [len(drive.planner.chain(8)) for _ in range(4)] == [6, 8, 5, 0]


def test_a_chain_brings_no_more_pages_than_rows():
    drive = Drive(rows=2, max_len=64, pages=60, size=2, tokens=16)
    for key in range(2):
        drive.add(job(key, 2, 40))
    drive.turn()
    plans = drive.planner.chain(8)
    assert len(plans) == 2 and len(plans[0].pages) == 2, "each row begins a page every second step"


def test_who_waits_ends_chains():
    drive = Drive(rows=1, max_len=64, pages=60, size=8, tokens=16)
    drive.add(job(0, 2, 40))
    drive.turn()
    assert len(drive.planner.chain(4)) == 4
    drive.add(job(1, 2, 40))
    assert len(drive.planner.chain(4)) == 1


def test_random_scripts_reach_what_they_are_for(runs):
    assert sum(drive.planner.preemptions for drive in runs) > 100
    assert sum(sum(drive.cached.values()) for drive in runs) > 500
    states = set().union(*(drive.aborted_in for drive in runs))
    assert states == set(State) - {State.DONE}, "an abort in every state"


def job(key, prompt, new, priority=0, stops_at=10**9):
    return Job(key, list(range(prompt)), prompt + new, stops_at, priority)


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_one_request_alone_may_fill_the_whole_pool(depth):
    drive = Drive(rows=4, max_len=33, pages=9, size=4, tokens=16, depth=depth)
    for key in range(4):
        drive.add(job(key, 20, 13))
    drive.drain()
    assert drive.planner.preemptions


def test_first_come_is_first_served():
    drive = Drive(rows=2, pages=40, depth=4)
    for key in range(12):
        drive.add(job(key, 5 + key % 3, 4, priority=-key))
    drive.drain()
    assert drive.admitted == list(range(12))


def test_priority_goes_first_and_arrival_next():
    drive = Drive(rows=1, pages=40, depth=2, priority=True)
    for key, priority in enumerate((5, 1, 3, 1, 0, 5)):
        drive.add(job(key, 5, 4, priority))
    drive.drain()
    assert drive.admitted == [4, 1, 3, 2, 0, 5]


def test_a_full_queue_refuses_and_keeps_nothing():
    drive = Drive(rows=1, queue=2, depth=1)
    assert drive.add(job(0, 4, 4)) and drive.add(job(1, 4, 4))
    with pytest.raises(QueueFullError, match="try again later"):
        drive.planner.add(Sequence(9, drive.jobs[0].seq.tokens, [], 8, 0, 9))
    assert 9 not in drive.planner.by_key
    drive.turn()
    assert drive.add(job(2, 4, 4)), "one has left the queue"
    drive.drain()


def test_preempted_requests_come_back_though_the_queue_is_full():
    drive = Drive(rows=3, max_len=33, pages=9, size=4, tokens=16, queue=3, depth=2)
    for key in range(3):
        drive.add(job(key, 7, 26))
    for key in range(3, 100):
        drive.turn()
        drive.add(job(key, 7, 2))
        if drive.planner.preemptions:
            break
    assert drive.planner.preemptions and len(drive.planner.waiting) > 3
    drive.drain()


def test_the_lowest_in_rank_is_preempted():
    drive = Drive(rows=3, max_len=33, pages=9, size=4, tokens=16, depth=2, priority=True)
    for key, priority in enumerate((2, 0, 1)):
        drive.add(job(key, 7, 26, priority))
    while not drive.planner.preemptions:
        drive.turn()
    assert [drive.jobs[key].seq.state is State.WAITING for key in range(3)] == [True, False, False]
    drive.drain()


def test_small_requests_pass_a_big_one_but_not_for_ever():
    drive = Drive(rows=3, max_len=800, pages=101, size=8, tokens=900, queue=500, depth=2, prefix=False)
    drive.add(job(0, 8, 700))
    drive.turn()
    drive.add(job(1, 792, 1))
    for key in range(2, 300):
        drive.add(job(key, 3, 1))
    while not drive.jobs[0].done:
        drive.turn()
    passed = len(drive.admitted) - 1
    assert LOOK_BEHIND < passed <= MAX_SKIPS + drive.rows.size
    drive.drain(4000)
    assert drive.admitted[passed + 1] == 1


def test_a_new_request_is_tried_behind_a_head_that_does_not_fit():
    drive = Drive(rows=3, max_len=65, pages=8, size=16, tokens=80, depth=8, prefix=False)
    drive.add(Job(0, [1] * 57, 65, 10**9))
    drive.turn()
    drive.add(Job(1, [2] * 64, 65, 10**9))
    drive.turn()
    drive.add(Job(2, [3], 3, 10**9))
    drive.turn()
    assert drive.admitted == [0, 2]
    drive.drain()


def test_a_head_that_does_not_fit_is_not_tried_again_until_something_changes(monkeypatch):
    drive = Drive(rows=3, max_len=65, pages=17, size=16, tokens=80, queue=10_000, depth=2)
    drive.add(Job(0, [1] * 5, 60, 10**9))
    drive.turn()
    for key in range(1, 50):
        drive.add(Job(key, [2] * 64, 65, 10**9))
    drive.pool.take = lambda: pytest.fail("nothing fits")
    monkeypatch.setattr(drive.pool, "available", lambda: 3)
    tried = []
    monkeypatch.setattr(drive.planner, "_claim", lambda seq: tried.append(seq))
    for _ in range(6):
        drive.planner.plan()
    assert len(tried) == LOOK_BEHIND + 1


def test_an_abort_of_those_in_front_lets_the_next_be_tried():
    drive = Drive(rows=3, max_len=65, pages=8, size=16, tokens=80, depth=8, prefix=False)
    drive.add(Job(0, [1] * 57, 65, 10**9))
    drive.turn()
    for key in range(1, LOOK_BEHIND + 2):
        drive.add(Job(key, [2] * 64, 65, 10**9))
    drive.add(Job(99, [3], 3, 10**9))
    drive.turn()
    assert drive.admitted == [0]
    drive.abort(1)
    drive.turn()
    assert 99 in drive.admitted
    drive.drain()


def calls_of_a_plan(rows, waiting, size=64, ticks=8):
    """Python-level calls of each of some plans in steady decode, away from page borders."""
    drive = Drive(rows, 1024, rows * 16 + 1, size, rows * 4, 20_000, depth=2, prefix=False)
    for key in range(rows + waiting):
        drive.add(Job(key, [1] * 3, 1024, 10**9))
    planner, ledger = drive.planner, drive.ledger
    plan = planner.plan()
    while len(plan.decode) < rows:
        plan = planner.plan()
    counts, decode = [], plan.decode
    for _ in range(ticks):
        count = 0

        def profile(frame, event, argument):
            nonlocal count
            count += event in ("call", "c_call")

        sys.setprofile(profile)
        plan = planner.plan()
        sys.setprofile(None)
        counts.append(count)
        assert plan.decode is decode and len(decode) == rows and not plan.pages
        ledger.advance(ledger.completed + 1)
    return counts


def test_a_steady_plan_costs_the_same_for_any_number_of_rows_and_of_waiting_requests():
    few, many = calls_of_a_plan(8, 0), calls_of_a_plan(256, 0)
    crowd = calls_of_a_plan(256, 10_000)
    assert max(many) <= min(few) + 2
    assert max(crowd) <= min(few) + 12
    assert max(crowd) < 60


def test_a_border_costs_in_proportion_to_the_rows_that_cross_it():
    drive = Drive(64, 256, 64 * 16 + 1, 16, 4096, 100, depth=2, prefix=False)
    for key in range(64):
        drive.add(Job(key, [1] * (1 + key % 16), 256, 10**9))
    while drive.planner.running < 64 or drive.planner._entering or drive.planner._prefill:
        drive.turn()
    for _ in range(32):
        plan = drive.turn()
        assert plan is None or len(plan.pages) == 4
    for key in range(64):
        drive.abort(key)
    drive.drain()


def test_stopped_sequences_are_not_kept_alive():
    drive = Drive(rows=2, max_len=1000, pages=300, size=8, tokens=64, depth=2)
    for key in range(20):
        drive.add(Job(key, [1, 2, 3], 1000, stops_at=6))
    drive.drain()
