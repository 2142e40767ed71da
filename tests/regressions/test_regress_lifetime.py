"""Rows of the class lifetime: a page, a row or a buffer reused while a step in flight can still reach it."""

from __future__ import annotations

import numpy as np
import torch
from grouped_model import GroupedModel, continue_grouped
from harness import VOCAB, Job, check_at_rest, checksum_loop, model_loop, one_line_for_all, run, script, sizes
from scenes import (
    broken,
    crowd,
    device_that_prefers,
    job,
    must_fail,
    play,
    request,
    rows_of,
    tokens,
)

from gapless.loop.build import Sizes
from gapless.memory.ledger import Ledger
from gapless.memory.pages import PagePool
from gapless.memory.rows import RowTable
from gapless.plan import planner
from gapless.plan.planner import Planner
from gapless.testing.checksum import continue_prompt, entry
from gapless.testing.sim import SimDevice

SEEDS = range(8)


def at_once(ledger, at, release, item):
    release(item)


def audited(loop):
    """Assert that no page or row is handed out while a launched step that can reach it has not been observed."""
    reach = {}
    launch, take_page, take_row = loop.launcher.launch, loop.pool.take, loop.rows.take

    def noted(plan, requests):
        rows = rows_of(plan)
        reach[plan.step] = rows, {page for row in rows for page in loop.planner.by_row[row].pages}
        return launch(plan, requests)

    def flying():
        return [(flight.plan.step, *reach[flight.plan.step]) for flight in loop.flights]

    def page():
        page = take_page()
        for step, _, pages in flying():
            assert page not in pages, f"page {page} has a new owner while step {step} can reach it"
        return page

    def row(key, known, leases):
        row = take_row(key, known, leases)
        for step, rows, _ in flying():
            assert row not in rows, f"row {row} has a new owner while step {step} is in flight"
        return row

    loop.launcher.launch, loop.pool.take, loop.rows.take = noted, page, row


def test_row_046_pages_of_finished_and_preempted_requests_stay_until_their_last_step():
    """Blocks of a finished or preempted request went back to the pool while the next step still used them. Here a
    page comes back when the last step planned with its owner has been observed, over-run steps included."""

    def scene():
        return [crowd(seed, tweak=audited) for seed in SEEDS]

    assert sum(loop.planner.preemptions for loop in scene()) > 0
    with broken(Ledger, "retire", at_once):
        scene()


def test_row_056_two_that_need_each_others_pages_still_make_progress():
    """Freeing needed a step of progress and progress needed the free: the engine span without a token. Here a pool
    that holds one longest sequence serves four of them at depth 8, and every turn that can do nothing ends a wait."""

    def scene():
        done = []
        for seed in SEEDS:
            shape = Sizes(2, 41, 11, 4, 4, 8)
            loop = checksum_loop(SimDevice(seed), shape, 8)
            done.append(play(loop, [job(key, tokens(key, 4), 37) for key in range(4)]))
        return done

    assert all(loop.planner.preemptions > 0 for loop in scene())

    def after_one_more_step(planner):
        held, completed = planner.leaving, planner.ledger.completed
        planner.leaving = [seq for seq in held if seq.last_step < completed]
        preempt_now(planner)
        planner.leaving = [seq for seq in held if seq.last_step >= completed]

    preempt_now = Planner.preempt
    with broken(Planner, "preempt", after_one_more_step):
        scene()


def test_row_057_the_tokens_of_a_step_outlive_the_steps_behind_it():
    """The output object dropped its device tensors while the copy stream still had to read them. Here each step in
    flight has device lines of its own, so a copy that runs eight steps late still brings the right tokens."""

    def scene(tweak=lambda loop: None):
        for seed in SEEDS:
            shape = sizes(seed)
            loop = checksum_loop(device_that_prefers("compute"), shape, 8)
            tweak(loop)
            play(loop, script(seed, shape.max_len))

    scene()
    with must_fail():
        scene(one_line_for_all)


def test_row_082_a_row_is_not_touched_while_a_forward_reads_it():
    """A freed pool row was cleared on another stream while the running forward still read it. Here a row comes free
    when its last step has been observed: overwriting its page table at that very moment harms no other."""

    def scene():
        for seed in SEEDS:
            loop = checksum_loop(SimDevice(seed, "lazy"), Sizes(4, 48, 49, 4, 16, 32), 8)
            _scribble_on_free_rows(loop)
            long = [job(key, tokens(key, 6), 40) for key in range(2)]
            short = [Job(request(key, tokens(key, 5), 30), 2 * key, 1 + key % 3) for key in range(2, 12)]
            play(loop, long + short)

    scene()

    def rows_at_once(rows, row, last_step):
        rows.key[row] = -1
        rows.free.append(row)

    with broken(RowTable, "retire", rows_at_once):
        scene()


def _scribble_on_free_rows(loop):
    """Freeing a row points its page table at the pages of a neighbour, at once and in no stream's order."""
    table, rows = loop.launcher.executor.program.tables.pages, loop.rows

    class Scribbled(list):
        def append(self, row):
            others = [seq for seq in loop.planner.by_row if seq is not None and seq.row != row]
            if others:
                table[row] = others[0].pages[0]
            super().append(row)

    rows.free = Scribbled(rows.free)


def test_lifetime_L4_a_writer_outside_the_streams_gets_only_settled_pages():
    """Pages of an aborted request were refilled over the network while a step in flight still wrote to them. Here the
    pool hands out only pages whose steps the host has observed, so a writer that no stream orders cannot collide."""
    loaded, size = [(7 * place + 3) % VOCAB for place in range(40)], 4

    def scene():
        for steps in range(9, 24):
            # Without the patience it would let the device run dry on the way, to capture a graph.
            loop = checksum_loop(SimDevice(steps, "lazy"), Sizes(2, 64, 41, size, 16, 8), 8, patience=99)
            loop.submit(request(1, tokens(1, 5), 50))
            for _ in range(steps):
                loop.turn()
            assert loop.in_flight > 1
            loop.abort(1)
            _load_over_the_network(loop, loaded, size)
            follower = job(2, [*loaded, 5], 10)
            started = []
            loop.submit(follower.request)
            settled = []
            while loop.has_work():
                turn = loop.turn()
                started += turn.started
                settled += [token for item in turn.tokens for token in item.tokens.tolist()]
            assert started == [(2, len(loaded))], "the loaded prefix was used"
            assert settled == continue_prompt([*loaded, 5], 10, VOCAB)

    scene()
    with broken(Ledger, "retire", at_once):
        scene()


def _load_over_the_network(loop, prompt, size):
    """Fill free pages with the KV of a prompt, now, and publish them."""
    cache, pool = loop.launcher.executor.program.cache, loop.pool
    chain = loop.planner.index.chain(np.array(prompt, np.int32), "")
    for index, digest in enumerate(chain.reach(len(prompt) // size, np.array(prompt, np.int32))):
        place = torch.arange(index * size, (index + 1) * size)
        page = pool.take()
        cache.data[page, 0, 0, :, 0, 0] = entry(torch.tensor(prompt)[place], place)
        pool.publish(page, digest)
        pool.retire([page], 0)


def test_lifetime_L5_one_victim_at_a_time_while_pages_are_on_their_way_back():
    """Deferred frees made a preemption yield no page at once, so more and more requests were preempted. Here fenced
    pages are a class of their own: while any are, or a victim still waits for its steps, no other row is chosen."""

    def watched(loop):
        planner, plan = loop.planner, loop.planner.plan

        def watch():
            fenced, held, preempted = loop.pool.counts().fenced, set(planner.leaving), planner.preemptions
            made = plan()
            chosen = set(planner.leaving) - held or planner.preemptions - preempted > len(held)
            assert len(planner.leaving) <= 1, "a second victim, while the first has yet to give its pages back"
            assert not (chosen and fenced), f"a victim, while {fenced} pages are on their way back"
            return made

        planner.plan = watch

    def scene():
        loops = [crowd(seed, tweak=watched, mood="lazy") for seed in SEEDS]
        return sum(loop.planner.preemptions for loop in loops)

    assert scene() > 0
    with broken(PagePool, "fenced", 0):
        scene()


def test_row_045_pages_leave_a_window_by_the_settled_length():
    """Pages before a window were freed by a length that counted tokens of steps in flight, which still read them. Here
    a page leaves by the length that the host has observed, and is free after the steps that were launched by then."""

    def scene():
        for seed in SEEDS:
            shape = sizes(seed)
            shape = shape._replace(page_size=2, pages=2 + shape.max_len // 2 + seed % 4)
            loop = model_loop(GroupedModel(VOCAB, shape.max_len), SimDevice(seed, "lazy"), shape, 8)
            for one in play_all(loop, script(seed, shape.max_len)):
                direct = continue_grouped(one.request.tokens.tolist(), len(one.tokens), VOCAB)
                assert one.tokens == direct, f"request {one.request.key} has wrong tokens"

    def play_all(loop, jobs):
        run(loop, jobs, check=False)
        check_at_rest(loop)
        return jobs

    scene()
    first = planner.first_entry
    with broken(planner, "first_entry", lambda pool, position: first(pool, position + 8)):
        scene()
