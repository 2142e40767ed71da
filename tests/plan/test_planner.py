"""The planner on a perfect device: what every plan promises, order, fairness, aborts, and what a plan costs."""

from __future__ import annotations

import sys

import numpy as np
import pytest
from plan_harness import ONE, Drive, Job, random_run
from sharpest import sharpest

from gapless.base.errors import QueueFullError
from gapless.memory.groups import PageGroup, WindowRule
from gapless.memory.ledger import Clock
from gapless.memory.pages import Pin
from gapless.plan.planner import LOOK_BEHIND, MAX_SKIPS
from gapless.plan.row import RowSpec, State

SEEDS = 48


@pytest.fixture(scope="module")
def runs():
    return [random_run(seed) for seed in (*range(SEEDS - 1), 148)]  # 148 aborts a request that leaves its row


def test_random_scripts_keep_every_promise_and_end_at_rest(runs):
    assert sum(drive.plans for drive in runs) > 2_000


@pytest.mark.seeds
def test_further_random_scripts_keep_every_promise_and_end_at_rest():
    assert sum(random_run(seed).plans for seed in range(SEEDS - 1, 5 * SEEDS)) > 8_000


@pytest.mark.parametrize("chain", sharpest([4, 2, 8]))
def test_chains_keep_every_promise(chain):
    runs = [random_run(seed, chain) for seed in range(60)]
    assert sum(drive.chained for drive in runs) > 40
    assert sum(drive.planner.preemptions for drive in runs) > 10


@pytest.mark.parametrize("adds", sharpest([(0, 5), (0, 1), (1, 3)], whole=True))
@pytest.mark.parametrize("chain", sharpest([4, 1]))
def test_rows_that_are_held_and_rows_that_take_several_tokens_keep_every_promise(adds, chain):
    runs = [random_run(seed, chain, adds) for seed in range(40)]
    assert sum(drive.planner.preemptions for drive in runs) > 10
    assert sum(drive.held for drive in runs) > 100 or adds[0]


@pytest.mark.parametrize("adds", sharpest([(0, 5), (1, 3)], whole=True))
@pytest.mark.parametrize("chain", sharpest([4, 1]))
def test_rows_that_get_pages_for_several_steps_keep_every_promise(adds, chain):
    runs = [random_run(seed, chain, adds, ONE if seed % 2 else WINDOWED[:2], ahead=8) for seed in range(40)]
    assert sum(drive.planner.preemptions for drive in runs) > 10
    assert sum(drive.plans for drive in runs) > 500


@pytest.mark.parametrize(("pages", "most"), [(400, 0.2), (60, 1.0)])
def test_rows_get_pages_for_several_steps_where_there_are_plenty(pages, most):
    shares = []
    for ahead in (1, 8):
        drive = Drive(rows=2, max_len=90, pages=pages, size=4, tokens=16, adds=(1, 4), ahead=ahead)
        for key in range(2):
            drive.add(job(key, 2, 80))
        plans = [plan for _ in range(30) if (plan := drive.turn()) and len(plan.decode) == 2]
        shares.append(sum(bool(plan.pages) for plan in plans) / len(plans))
        drive.drain()
    assert shares[0] > 0.5 and shares[1] <= most * shares[0] + 0.05, shares


MIXED = ((*ONE, PageGroup("local", WindowRule(64))), (PageGroup("local", WindowRule(64)), *ONE))
WINDOWED = (PageGroup(), PageGroup("local", WindowRule(6)), PageGroup("far", WindowRule(9)))


@pytest.mark.parametrize("groups", sharpest([WINDOWED, ONE + ONE, WINDOWED[:2], WINDOWED[1:]], whole=True))
def test_page_groups_keep_every_promise(groups):
    runs = [random_run(seed, 1 + seed % 3, (seed % 2, 1 + seed % 2), groups) for seed in range(40)]
    assert sum(drive.planner.preemptions for drive in runs) > 10
    assert sum(sum(drive.cached.values()) for drive in runs) > 100


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


def test_a_waiting_request_ends_chains():
    drive = Drive(rows=1, max_len=64, pages=60, size=8, tokens=16)
    drive.add(job(0, 2, 40))
    drive.turn()
    assert len(drive.planner.chain(4)) == 4
    drive.add(job(1, 2, 40))
    assert len(drive.planner.chain(4)) == 1


def test_random_scripts_reach_what_they_are_for(runs):
    assert sum(drive.planner.preemptions for drive in runs) > 40
    assert sum(sum(drive.cached.values()) for drive in runs) > 100
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
    assert drive.add(job(0, 4, 4)) and drive.add(job(1, 4, 4)) and drive.add(job(3, 4, 4)), "one can run at once"
    with pytest.raises(QueueFullError, match="try again later"):
        drive.planner.add(RowSpec(9, 4, 8, 0, 9), np.ones(4, np.int32))
    assert 9 not in drive.planner.by_key
    drive.turn()
    assert not drive.add(job(2, 4, 4)), "the row is taken"
    while len(drive.planner.waiting) == 2:
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
    assert [drive.jobs[key].row.state is State.WAITING for key in range(3)] == [True, False, False]
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
    monkeypatch.setattr(drive.planner, "claim", lambda row, match: tried.append(row))
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
        ledger.advance(Clock.COMPUTE, ledger.completed + 1)
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
    while drive.planner.room.running < 64 or drive.planner.decode.entering or drive.planner.prefill:
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


# What clients meet at the edges.


def test_a_row_that_is_held_goes_on_though_all_its_tokens_were_thought_to_be_in_flight():
    """A step may give a live row no token; the row then needs a step more than its limit says."""
    drive = Drive(rows=2, max_len=64, pages=20, size=4, tokens=16, prefix=False)
    planner, rows = drive.planner, drive.rows
    planner.add(RowSpec(0, 4, 8), np.zeros(4, np.int32))
    row = planner.by_key[0]
    steps = 0
    while (plan := planner.plan()) is not None:
        steps += 1
        rows.length[row.number] += steps != 2
        planner.commit(plan, np.array([row.number]))
        drive.ledger.advance(Clock.COMPUTE, plan.step)
    assert (steps, int(rows.length[row.number]), row.state) == (5, 8, State.ENDING)
    planner.finish(row)
    drive.check_at_rest()


@pytest.mark.parametrize("depth", [1, 2, 8])
def test_requests_with_one_prompt_compute_it_once(depth):
    for tokens in (16, 40, 600):
        drive = Drive(rows=16, max_len=200, pages=999, size=4, tokens=tokens, depth=depth)
        for key in range(16):
            drive.add(Job(key, [7] * 130, 140, 10**9))
        ran = 0
        while drive.planner.has_work() or drive.flights:
            plan = drive.turn()
            ran += plan.chunk_tokens if plan else 0
        # Each has the last two tokens to itself: a prefix comes in pages, and the last token runs.
        assert ran == 130 + 15 * 2
        drive.check_at_rest()


def test_a_request_waits_for_a_prefix_only_while_someone_before_it_computes_it():
    drive = Drive(rows=3, max_len=200, pages=200, size=4, tokens=8, depth=1, priority=True)
    drive.add(Job(0, [7] * 100, 110, 10**9, priority=1))
    drive.turn()
    drive.add(Job(1, [7] * 100 + [1], 110, 10**9, priority=1))
    drive.turn()
    assert drive.admitted == [0]
    drive.add(Job(2, [7] * 100 + [2], 110, 10**9, priority=0))
    drive.turn()
    assert drive.admitted == [0, 2], "the first in rank does not wait"
    drive.abort(0)
    drive.abort(2)
    drive.turn()
    assert drive.admitted == [0, 2, 1], "no request computes it any more"
    drive.drain()


@pytest.mark.parametrize("priority", [False, True])
def test_a_short_prompt_gets_its_turn_beside_a_long_one(priority):
    drive = Drive(rows=8, max_len=2001, pages=900, size=8, tokens=32, depth=1, priority=priority, prefix=False)
    drive.add(Job(0, [1] * 2000, 2001, 10**9, priority=5))
    drive.turn()
    drive.add(Job(1, [2] * 1500, 1600, 10**9, priority=5))
    drive.turn()
    drive.add(Job(2, [3] * 5, 20, 10**9, priority=0))
    for _ in range(4):
        assert drive.turn().chunk_tokens >= 30, "and the budget is used up"
    assert drive.jobs[2].tokens > 5


def test_the_whole_budget_goes_to_a_prompt_that_is_alone():
    drive = Drive(rows=8, max_len=2001, pages=900, size=8, tokens=32, depth=1)
    drive.add(Job(0, [1] * 2000, 2001, 10**9))
    assert {drive.turn().chunk_tokens for _ in range(50)} == {32}


def test_priority_counts_in_prefill():
    drive = Drive(rows=8, max_len=401, pages=900, size=8, tokens=32, depth=1, priority=True, prefix=False)
    for key, priority in ((0, 5), (1, 1), (2, 3)):
        drive.add(Job(key, [key] * 400, 401, 10**9, priority))
        drive.turn()
    ends = []
    while len(ends) < 3:
        drive.turn()
        ends += [job.key for job in drive.jobs.values() if job.done and job.key not in ends]
    assert ends == [1, 2, 0]


@pytest.mark.parametrize(("rows", "max_len"), [(8, 4096), (64, 2048), (4, 8192)])
def test_page_writes_leave_the_token_budget_as_the_bound(rows, max_len):
    drive = Drive(rows, max_len, rows * max_len // 16 + 1, 16, 8192, prefix=False)
    for key in range(rows):
        drive.add(Job(key, [1] * 1000, 1100, 10**9))
    assert drive.turn().chunk_tokens == min(8192, rows * 1000)


@pytest.mark.parametrize("groups", [ONE, *MIXED])
def test_requests_that_do_not_fit_are_looked_up_once(monkeypatch, groups):
    """With rows that take pages in every step, and requests waiting that share a long prefix."""
    drive = Drive(rows=40, max_len=4000, pages=1000, size=4, tokens=4000, depth=1, groups=groups)
    shared = [n % 7 for n in range(3000)]
    drive.add(Job(0, shared, 3500, 10**9))
    for key in range(1, 24):
        drive.add(Job(key, [key] * (1 + key % 4), 900, 10**9))
    for _ in range(4):
        drive.turn()
    for key in range(100, 112):
        drive.add(Job(key, shared + [key] * 900, 3950, 10**9))
    matched, match = [], drive.planner.index.match
    monkeypatch.setattr(drive.planner.index, "match", lambda *args: matched.append(args) or match(*args))
    pages = 0
    for _ in range(30):
        pages += len(drive.turn().pages)
    assert pages > 90 * len(groups) and len(drive.planner.waiting) == 12
    assert len(matched) <= LOOK_BEHIND + 1


@pytest.mark.parametrize(("groups", "number"), [(ONE, 0), *((groups, n) for groups in MIXED for n in (0, 1))])
def test_a_refusal_is_remembered_until_the_pool_that_lacked_pages_gets_some(monkeypatch, groups, number):
    drive, taken = crowded(groups, [number])
    claimed, claim = [], drive.planner.room.claim
    monkeypatch.setattr(drive.planner.room, "claim", lambda *args: claimed.append(args) or claim(*args))
    for _ in range(9):
        drive.turn()
    assert drive.admitted == [0] and len(claimed) == 1
    for page in taken[number]:
        drive.pools[number].unpin((page,), kind=Pin.LOAD)
    drive.turn()
    assert drive.admitted == [0, 1]
    drive.drain()


@pytest.mark.parametrize("groups", [ONE, *MIXED])
def test_a_refusal_is_remembered_until_every_group_shares_more(groups):
    drive, taken = crowded(groups, range(len(groups)))
    tokens = drive.jobs[1].prompt
    digests = drive.planner.by_key[1].chain.reach(40, np.array(tokens, np.int32))
    prefixes = drive.prefixes(drive.jobs[1], len(tokens))
    for group, pool in enumerate(drive.pools):
        drive.turn()
        assert drive.admitted == [0]
        for number, (page, digest) in enumerate(zip(taken[group], digests, strict=False)):
            pool.publish(page, digest)
            for offset in range(4):
                drive.kv[group, page, offset] = prefixes[4 * number + offset]
    drive.turn()
    assert drive.admitted == [0, 1] and drive.cached[1] == 160
    for pool, pages in zip(drive.pools, taken, strict=True):
        for page in pages:
            pool.unpin((page,), kind=Pin.LOAD)
    drive.drain()


def crowded(groups, numbers):
    """A request runs, another waits for 50 pages: these pools have 40, the test holds the others, which come too."""
    drive = Drive(rows=4, max_len=400, pages=200, size=4, tokens=400, depth=1, groups=groups)
    taken = [[] for _ in groups]
    for number in numbers:
        pool = drive.pools[number]
        taken[number] = [pool.take(Pin.LOAD) for _ in range(pool.available() - 40)]
    drive.add(job(0, 8, 90))
    drive.turn()
    drive.add(job(1, 200, 20))
    return drive, taken


def test_a_burst_that_finds_free_rows_is_not_refused():
    drive = Drive(rows=64, max_len=64, pages=999, size=8, tokens=128, queue=8)
    assert all(drive.add(job(key, 4, 4)) for key in range(72))
    assert not drive.add(job(99, 4, 4))
    drive.drain()


def test_admission_leaves_room_for_rows_to_grow():
    """A pool for a third of the rows: prompts run again when the first wave has shown how long requests are, then
    rarely. With the fixed reserve of one page for eight rows, each was preempted three times."""
    drive = Drive(rows=16, max_len=80, pages=1 + 16 * 5 * 2 // 5, size=16, tokens=64, depth=2, prefix=False, queue=200)
    for key in range(96):
        drive.add(Job(key, [key % 7] * 8, 72, 10**9))
    drive.drain(9000)
    assert drive.planner.preemptions < 48


def test_fewer_prompt_tokens_run_beside_decoding_rows():
    drive = Drive(rows=4, max_len=400, pages=400, size=4, tokens=200, prefix=False)
    asked = []
    limit = lambda *numbers: asked.append(numbers) or 7  # noqa: E731
    drive.planner.limits = drive.limits._replace(chunk_limit=limit)
    drive.add(job(0, 250, 30))
    alone = [drive.turn().chunk_tokens for _ in range(2)]
    assert alone == [200, 50], "no row waits for these"
    drive.turn()
    drive.add(job(1, 40, 5))
    drive.add(job(2, 9, 5))
    plans = [plan for plan in iter(drive.turn, None) if plan.chunks]
    assert sum(plan.chunk_tokens for plan in plans) == 49
    assert all(plan.chunk_tokens <= 7 for plan in plans if plan.decode)
    assert [plan.chunk_tokens for plan in plans].count(7) >= 6, "the bound is used up"
    assert asked[:2] == [(1, 49), (1, 42)] and asked[-1][1] <= 7, "rows that decode, and prompt tokens that could run"
    drive.drain()
