"""Rows about KV that is stored in the host's memory and loaded from there, beside the steps that write and read it."""

from __future__ import annotations

from unittest.mock import patch

import torch
from harness import Job, checksum_loop, contents_of, kernels_for, script, sizes
from scenes import broken, device_that_prefers, must_fail, play, request, tokens
from simulation.lower import LateLine

from gapless.loop.build import HostSizes, Sizes
from gapless.memory.below import LowerTiers
from gapless.memory.ledger import Clock
from gapless.memory.pages import ALREADY_PASSED, PagePool, Pin
from gapless.plan.planner import Planner
from gapless.testing.sim import SimDevice, SimStream

PLENTY = HostSizes(100 * 4096, 1)
SHAPE = Sizes(rows=3, max_len=48, pages=14, page_size=4, step_tokens=8, queue=32)
"""The pages of one longest sequence and a little more."""


def hosted(device, jobs, depth=8, shape=SHAPE, tweak=lambda loop: None, kernels=None):
    """Play jobs with a host tier; every copy holds what its digest means."""
    loop = checksum_loop(device, shape, depth, host=PLENTY, kernels=kernels)
    tweak(loop)
    play(loop, jobs)
    contents, slots = contents_of(loop, jobs), loop.transfers.slots[0]
    for digest, copy in loop.transfers.host.groups[0].copies.items():
        entries = slots[copy.slot].view(torch.int64).view(loop.launcher.executor.program.cache.data.shape[1:])
        if contents.knows(digest):
            contents.check(digest, entries, "a copy")
    assert not loop.transfers.host.counts.refused, "what came back was not what was stored"
    return loop


def conversations(count=4, length=20, new=9, rounds=2):
    """Prompts of their own, each of which comes again when the others have taken its pages."""
    return [
        Job(request(key + 100 * turn, tokens(key, length), new), 25 * (turn * count + key), None)
        for turn in range(rounds) for key in range(count)
    ]  # fmt: skip


def settled_too_early():
    return broken(PagePool, "settled", lambda pool, page: page in pool.digest_of)


def test_row_047_a_store_waits_for_the_step_that_computes_its_page():
    """The copy to the host was not ordered after the compute, and what came back was garbled. Here a page is stored
    when the host has observed its step, so the fence has passed before the copy is enqueued."""

    def scene():
        for depth in (2, 8):
            assert hosted(device_that_prefers("bulk_out"), conversations(), depth).transfers.host.counts.loaded

    scene()
    with settled_too_early():
        scene()


def pages_free_while_steps_run():
    """Pages wait for transfers, and not for the steps that use them."""
    unpin = PagePool.unpin

    def at_once(pool, pages, at=ALREADY_PASSED, kind=Pin.REQUEST):
        unpin(pool, pages, ALREADY_PASSED if at[0] is Clock.COMPUTE else at, kind)

    return broken(PagePool, "unpin", at_once)


def test_row_048_a_load_does_not_overwrite_what_a_step_reads():
    """A load wrote pages that a step in flight still read. Here a load takes pages as any request does: those whose
    last step was observed."""

    def scene():
        for leaves in range(1, 9):
            first, filler = (Job(request(key, tokens(key, 40), 5), 60 * key, None) for key in range(2))
            writer = Job(request(3, tokens(3, 20), 27), 120, leaves)
            again = Job(request(4, tokens(0, 40), 5), 122, None)
            loop = hosted(device_that_prefers("bulk_in"), [first, filler, writer, again])
            assert loop.transfers.host.counts.loaded == 9

    scene()
    with pages_free_while_steps_run():
        scene()


def test_row_049_a_long_prompt_is_stored_chunk_by_chunk_behind_its_steps():
    """Offload began before the prefill that it copied had ended. Here each chunk's pages follow their own step."""

    def scene():
        loop = hosted(device_that_prefers("bulk_out"), [Job(request(1, tokens(1, 44), 3), 0, None)])
        assert loop.transfers.host.counts.stored == 11

    scene()
    with settled_too_early():
        scene()


def test_row_050_pages_of_generated_tokens_are_stored():
    """Hashes of pages lagged behind, so decoded tokens never left the device. Here a row that leaves publishes all that
    is full, and the next turn of the conversation loads it."""
    first = Job(request(1, tokens(1, 5), 30), 0, None)
    known = [*tokens(1, 5), *first.expected()]
    others = [Job(request(2 + key, tokens(9 + key, 40), 5), 60 + 30 * key, None) for key in range(2)]
    last = Job(request(9, known[:34], 5), 200, None)
    loop = hosted(SimDevice(1), [first, *others, last])
    assert loop.transfers.host.counts.loaded == 33 // 4


def test_row_051_no_page_is_stored_before_its_last_token_is_computed():
    """Placeholders counted as computed, so incomplete KV was saved. Here a page is published when its tokens have run,
    which the sampled token of the moment has not."""

    def scene():
        for seed in range(12):
            shape = sizes(seed)
            hosted(SimDevice(seed, "single"), script(seed, shape.max_len), 8, shape)

    def one_more(planner, seq, computed, step):
        publish(planner, seq, computed + 1, step)

    scene()
    publish = Planner.publish
    with broken(Planner, "publish", one_more):
        scene()


def test_row_052_requests_are_preempted_and_come_back_while_transfers_run():
    """A request that was preempted and admitted again met its own transfers, and an assertion failed. Here transfers
    have pins of their own, and know no requests."""
    preempted = loaded = 0
    for seed in range(16):
        jobs = [Job(request(key, tokens(key, 9), 38), key, None) for key in range(5)]
        loop = hosted(SimDevice(seed), jobs, 4, kernels=kernels_for(seed))
        preempted += loop.planner.preemptions
        loaded += loop.transfers.host.counts.loaded
    assert preempted and loaded, "the pages were meant to be too few"


def test_row_042_a_request_that_leaves_while_its_pages_load_frees_nothing_twice():
    """An abort freed pages that a transfer freed again. Here the pages of a load belong to the load; what the request
    owns by then is a place in the queue."""
    left = 0
    for seed in range(8):
        jobs = conversations()
        loop = checksum_loop(SimDevice(seed, "lazy"), SHAPE, 4, host=PLENTY, kernels=kernels_for(seed))
        play(loop, jobs[:4])
        for one in jobs[4:]:
            loop.submit(one.request)
            for _ in range(5):
                if loop.pool.counts().owned and not loop.in_flight:
                    left += 1
                    break
                loop.turn()
            loop.abort(one.request.key)
            loop.pool.check([])
        play(loop, conversations(rounds=1))
    assert left > 8, "requests were meant to leave during loads"


def clearing(loop, kinds):
    """Has each step clear the pages that were taken since the last one, as models with states need it."""
    take, enqueue, fresh = loop.pool.take, loop.launcher.enqueue, []
    memory = loop.launcher.executor.program.cache.data

    def taken(kind=Pin.REQUEST):
        page = take(kind)
        fresh.extend([page] if kind in kinds else [])
        return page

    def clear(pages):
        memory[pages] = 0

    def cleared(*args):
        if fresh:
            loop.device.compute.launch(clear, [*fresh])
            fresh.clear()
        return enqueue(*args)

    loop.pool.take, loop.launcher.enqueue = taken, cleared


def test_row_044_nothing_writes_a_page_after_its_load():
    """Fresh blocks were cleared by a kernel that was queued, which came after the network had filled some. Here a page
    that a load fills is the load's alone until it is shared, and no step writes or clears it."""

    def scene(*kinds):
        jobs = [*conversations(3), Job(request(9, tokens(9, 8), 40), 70, None)]  # steps run beside the loads

        def watched(loop):
            clearing(loop, kinds)
            contents, turn = contents_of(loop, jobs), loop.turn

            def looked_at():
                report = turn()
                contents.check_settled(loop, again=True)
                return report

            loop.turn = looked_at

        loop = hosted(device_that_prefers("bulk_in"), jobs, shape=SHAPE._replace(pages=20), tweak=watched)
        assert loop.transfers.host.counts.loaded >= 4

    scene()
    scene(Pin.REQUEST)
    with must_fail():
        scene(Pin.REQUEST, Pin.LOAD)


def test_lifetime_L7_a_store_reads_only_what_compute_has_written():
    """Copies to the host read KV before the compute wrote it. Here nothing is stored that the host has not observed,
    whatever the copy stream's pace."""

    def scene():
        for mood in ("eager", "lazy", "starve", "single"):
            hosted(SimDevice(3, mood), conversations(), 8)

    scene()
    with settled_too_early():
        scene()


def given_to(device, jobs, kept, depth=8, delays=(0,), shape=SHAPE):
    """Play jobs on an engine that finds the pages of another one in `kept`; every copy holds what was stored."""
    loop = checksum_loop(device, shape, depth, host=HostSizes(14 * 4096, 1))
    line = LateLine(kept, 1, delays, fails=0.0)
    transfers = loop.transfers
    transfers.host.attach([line], transfers.slot)
    play(loop, jobs)
    while line.orders or transfers.busy:
        transfers.poll()
    transfers.host.check()
    assert not transfers.host.counts.refused, "what came back was not what was stored"
    return loop


def given_by_another(jobs):
    """What an engine has stored that computed these jobs."""
    kept = {}
    given_to(SimDevice(1), jobs, kept, shape=SHAPE._replace(pages=60))
    return kept


def test_row_043_a_page_that_an_ended_request_still_writes_takes_none_from_a_peer():
    """A block was freed for the network while the next step in flight still wrote to it. Here a page that a load fills
    is one whose last step the host has observed, though the request that had it ended steps ago."""
    firsts = [Job(request(key, tokens(key, 40), 5), 0, None) for key in (5, 6)]
    kept = given_by_another(firsts)

    def scene():
        for leaves in range(2, 9, 2):
            writer = Job(request(1, tokens(1, 20), 27), 0, leaves)
            again = [one.request._replace(key=one.request.key + 10) for one in firsts]
            jobs = [writer, *(Job(one, 3 + 20 * place, None) for place, one in enumerate(again))]
            loop = given_to(device_that_prefers("bulk_in"), jobs, dict(kept))
            assert loop.transfers.host.below.counts[0].loaded >= 9, (
                "the prompts were meant to come from the other engine"
            )

    scene()
    with pages_free_while_steps_run():
        scene()


class OneFence:
    """The fence of whatever was recorded last."""

    latest = None

    def __init__(self, fence):
        OneFence.latest = fence

    def __getattr__(self, name):
        return getattr(OneFence.latest, name)


def test_row_060_transfers_of_both_directions_have_fences_of_their_own():
    """A connector had one event for two batches in flight, and took the end of one for that of the other. Here each
    transfer has a new one, and a page is shared when its own fence has passed."""

    def scene():
        jobs = [Job(one.request, one.arrives // 5, None) for one in conversations(count=5, rounds=3)]
        assert hosted(device_that_prefers("bulk_out"), jobs).transfers.host.counts.loaded

    def record(stream, **options):
        fence = recorded(stream, **options)
        return OneFence(fence) if stream.name.startswith("bulk") else fence

    scene()
    recorded = SimStream.record
    with broken(SimStream, "record", record):
        scene()


def test_lifetime_L6_a_load_whose_requests_have_left_keeps_its_slots_until_it_has_ended():
    """The decoder aborted, and the sender went on writing into pages that were others' by then. Here a slot belongs to
    the job that fills it until the tier has said that it ended, whatever has become of the request."""
    firsts = [Job(request(key, tokens(key, 40), 5), 20 * key, None) for key in range(3)]
    kept = given_by_another(firsts)

    def scene():
        for leaves in range(0, 6, 2):
            jobs = [
                Job(one.request._replace(key=one.request.key + 10), 8 * place, leaves)
                for place, one in enumerate(firsts)
            ]
            others = [Job(request(20 + key, tokens(20 + key, 40), 5), 4 + 8 * key, None) for key in range(3)]
            given_to(SimDevice(leaves), jobs + others, dict(kept), delays=(9, 30))

    def load(below, search, place, copies):
        begun(below, search, place, copies)
        for copy in copies:
            copy.unpin()

    def ended(below, place, end):
        for copy in below.jobs[end.job].copies if below.jobs[end.job].loads else ():
            copy.pin()
        end_of(below, place, end)

    scene()
    begun, end_of = LowerTiers.load, LowerTiers.ended
    with patch.object(LowerTiers, "ended", ended), broken(LowerTiers, "load", load):
        scene()
