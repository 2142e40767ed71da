"""Rows of the class mirror: the host's copy of what the device owns is stale where it is used."""

from __future__ import annotations

from harness import VOCAB, checksum_loop, model_loop
from scenes import ManyScores, broken, collect, job, request, tokens

from gapless.device import SimDevice
from gapless.loop.build import Sizes
from gapless.memory.rows import NOBODY, RowTable
from gapless.step import program


def test_row_019_what_is_in_flight_is_not_mapped_to_the_next_owner_of_a_row():
    """With all KV memory in use a row changed hands before what was in flight had been mapped, and outputs were
    garbled. Here a row has one owner until its last step is in, so a late chunk settles nothing of somebody else's."""
    first, second = tokens(1, 30), tokens(2, 30)

    def scene():
        for steps in range(2, 7):
            loop = checksum_loop(SimDevice(steps, "lazy"), Sizes(1, 40, 17, 4, 5, 8), 8)
            loop.submit(request(1, first, 9))
            for _ in range(steps):
                loop.turn()
            assert loop.in_flight == steps
            loop.abort(1)
            late = job(2, second, 10)
            loop.submit(late.request)
            while loop.has_work():
                for settled in loop.turn().tokens:
                    late.tokens += settled.tokens.tolist()
                known = max(0, loop.counters.prompt_tokens - 5 * steps)
                shared = loop.pool.match(loop._hasher.pages(late.request.tokens, ""))
                assert 4 * len(shared) <= known, "pages are shared that no observed step has filled"
            assert late.tokens == late.expected()

    scene()

    def before_its_steps_are_in(rows, row, last_step):
        rows.key[row] = NOBODY
        rows._free.append(row)

    with broken(RowTable, "retire", before_its_steps_are_in):
        scene()


def test_row_084_a_seed_gives_the_same_tokens_whatever_the_host_knows():
    """The counter of a seeded sampler followed the host's position, which lags, so equal seeds gave different tokens.
    Here the counter is the length in the device table: depth, batch and preemption do not change a sampled token."""
    many = [
        request(key, tokens(key, 4 + key), 24, seed=1000 + key, temperature=1.0, top_k=(0, 8)[key % 2])
        for key in range(5)
    ]

    def sampled(seed, depth, pages, rows, asked):
        shape = Sizes(rows, 48, pages, 4, 8, 32)
        loop = model_loop(ManyScores(VOCAB, 48), SimDevice(seed), shape, depth)
        return collect(loop, asked), loop.planner.preemptions

    alone = {one.key: sampled(0, 1, 49, 1, [one])[0][one.key] for one in many}

    def scene():
        preemptions = 0
        for seed in range(4):
            for depth in (1, 2, 8):
                got, count = sampled(seed, depth, 17, 4, many)
                assert got == alone
                preemptions += count
        return preemptions

    assert scene() > 0

    launched = iter(range(10**6))

    def by_the_step(logits, params, length, mode):
        return sample(logits, params, length * 0 + next(launched), mode)

    sample = program.sample
    with broken(program, "sample", by_the_step):
        scene()
