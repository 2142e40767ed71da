"""Rows about custom logits processors: what they are given is the row's own tokens, at any depth."""

from __future__ import annotations

import pytest
from direct import Varied, direct_run
from harness import VOCAB, Job, captures_at_once, check_at_rest, run
from scenes import broken, request
from torch_processors import PROCESSORS

from gapless.loop.build import Sizes, build_loop
from gapless.loop.loop import Loop
from gapless.step.processors import ProcessorTables
from gapless.testing.sim import SimDevice

pytestmark = pytest.mark.unguarded


def play(depth: int, chain: int | None = None) -> Loop:
    """Requests whose processors look at lengths, history and counts get the tokens of a direct computation."""
    calls = [{"qualname": one.name, "args": [2.0]} for one in PROCESSORS]
    jobs = [Job(request(key, [5, 7, key], 30, logits_processors=calls), 2 * key, None) for key in range(5)]
    for job in jobs:
        job.request = job.request._replace(processors=tuple((number, (2.0,)) for number in range(3)))
    shape = Sizes(4, 48, 60, 4, 32, 32, slots=3)
    options = {"processors": PROCESSORS, "chain": chain, **captures_at_once(shape)}
    loop = build_loop(SimDevice(depth, "lazy"), Varied(VOCAB, 48), shape, depth, **options)
    run(loop, jobs)
    assert [job.tokens for job in jobs] == [direct_run(job.request) for job in jobs]
    check_at_rest(loop)
    return loop


@pytest.mark.seeds
def test_row_026_processors_see_tokens_and_no_placeholders():
    """Processors were given -1 for tokens in flight, and repaired for some of them alone. Here they are given the
    device's own tables, in which a token that is not there yet has no place."""
    assert play(8).counters.graph_steps and play(4, chain=8).counters.chained_steps

    def one_too_many(self):
        return lengths.fget(self) + 1

    lengths = ProcessorTables.lengths
    with broken(ProcessorTables, "lengths", property(one_too_many)):
        play(8)
