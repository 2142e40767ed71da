"""Loads are chosen over computing where they take less, by measured rates, on a device whose times are known."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest
from harness import VOCAB, ask, checksum_loop, request
from sharpest import sharpest
from simulation.lower import LateLine
from timed_device import TimedDevice, Times

from gapless.kernels import native
from gapless.loop.spec import HostSizes, Sizes
from gapless.offload.below import LowerTiers
from gapless.pace.load_gate import HOST_SOURCE, LoadGate

LENGTH, SIZE, COUNT = 256, 4, 6
SHAPE = Sizes(rows=2, max_len=LENGTH, pages=COUNT * LENGTH // SIZE // 3 + 1, page_size=SIZE, step_tokens=256, queue=8)
PLENTY = HostSizes(2 * COUNT * LENGTH // SIZE * 4096, 64, weighs=True)
SLOW = Times(page=200_000)
"""Loading takes ten times as long as computing."""


class Conversations:
    """Conversations that take turns, whose KV is three times what the device holds."""

    def __init__(self, times: Times, host: HostSizes | None) -> None:
        self.device = TimedDevice(times)
        self.loop = checksum_loop(self.device, SHAPE, None, host=host, kernels=native.load(), buckets=())
        if host is not None:
            self.loop.parts.transfers.warm_up()  # as an engine does when it is ready
        self._random, self._key = random.Random(1), 0
        self._known = [self._tokens(LENGTH - 96) for _ in range(COUNT)]

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(VOCAB) for _ in range(count)]

    def turns(self, count: int) -> float:
        """Return the time of a request, ns, over this many turns of each conversation."""
        began = self.device.host_now
        for number in [*range(COUNT)] * count:
            known = self._known[number] + self._tokens(4)
            self._key += 1
            job = ask(self._key, known, new=2)
            self.loop.submit(job.request)
            while self.loop.requests:
                for settled in self.loop.turn().tokens:
                    job.tokens += settled.tokens.reshape(-1).tolist()
            self._known[number] = known + job.tokens
        return (self.device.host_now - began) / COUNT / count


def per_request(times: Times, host: HostSizes | None) -> float:
    talk = Conversations(times, host)
    talk.turns(1)  # everything is computed
    took = talk.turns(8)
    talk.device.close()
    return took


def test_conversations_that_load_what_pays_take_less_time():
    times = Times(step=100_000)
    assert per_request(times, PLENTY) < 0.75 * per_request(times, None)


@pytest.mark.parametrize(
    "times", sharpest([SLOW, Times(token=300), Times(copy=20_000_000)]), ids=["slow link", "fast", "late"]
)
def test_a_tier_that_is_slower_than_computing_costs_little(times):
    none, tiered = per_request(times, None), per_request(times, PLENTY)
    assert per_request(times, PLENTY._replace(weighs=False)) > 1.3 * none, "every load"
    assert tiered < 1.04 * none


def test_a_tier_that_becomes_faster_is_used_again():
    talk = Conversations(Times(page=30_000), PLENTY)
    talk.turns(5)
    counts = talk.loop.parts.transfers.host.counts
    assert counts.slower > 8
    talk.device.times = Times()
    loaded = counts.loaded
    talk.turns(9)
    assert counts.loaded > loaded + 600, "trials have found it out"
    talk.device.close()


def gate_of(token: int, *pages: int) -> LoadGate:
    """A gate for which a prompt token takes so long, and a page of each source, that of the host first."""
    gate = LoadGate()
    for _ in range(2):  # the first time of each does not count
        gate.computed(1, token)
        for source, page in enumerate(pages, HOST_SOURCE):
            gate.moved(source, 1, page)
    return gate


def test_a_load_is_tried_when_its_time_is_unknown_and_not_when_it_takes_longer():
    gate = gate_of(1)
    assert gate.pays(64, 16), "nothing is known of loads"
    for _ in range(2):
        gate.moved(HOST_SOURCE, 10, 1_000)
    assert not gate.pays(64, 16) and gate.pays(1_600, 16)


def test_loads_through_the_host_count_both_ways_and_the_fastest_tier():
    gate = gate_of(100, 60, 500)
    lines = [LateLine({}, 1, delays=(0,), fails=0) for _ in range(2)]
    below = LowerTiers(lines, lambda group, slot: memoryview(b"page"), time.monotonic_ns, 1, 1, gate)
    assert gate.pays(1, 1) and not gate.pays(1, 1, gate.page_ns(0)) and gate.pays(1, 1, below.least_ns(1)), (
        "tier 1 is not known"
    )
    for _ in range(2):
        gate.moved(1, 1, 50)
    assert not gate.pays(1, 1, below.least_ns(1)) and gate.pays(2, 1, below.least_ns(1))


def test_steps_as_large_as_a_small_budget_allows_are_measured():
    device = TimedDevice(Times())
    shape = SHAPE._replace(step_tokens=64)
    loop = checksum_loop(device, shape, None, host=PLENTY._replace(least_tokens=256), buckets=())
    loop.submit(request(1, np.arange(200) % VOCAB, 4))
    while loop.requests:
        loop.turn()
    gate = loop.parts.transfers.host.gate
    for _ in range(2):
        gate.moved(HOST_SOURCE, 1, 10**9)
    assert not gate.pays(4, 1), "what a token takes is known"
    device.close()


def test_a_trial_is_used_up_by_a_load_and_not_by_a_question():
    gate = gate_of(100, 200)
    for _ in range(32):
        assert not gate.pays(1, 1) and not gate.pays(1, 1)
        gate.declined(1)
    gate.begun(3, 1, 0.0)
    assert gate.pays(1, 1) and gate.pays(1, 1), "neither a question nor a load that pays is a trial"
    gate.begun(1, 1, 0.0)
    assert not gate.pays(1, 1)


def test_loads_that_do_not_pay_cost_a_32nd_of_computing():
    gate, spent, saved = gate_of(100, 5_000), 0, 0
    for _ in range(20_000):
        if gate.pays(1, 1):
            gate.begun(1, 1, 0.0)
            spent += 4_900
        else:
            gate.declined(1)
        saved += 100
    assert 0 < spent <= saved / 32


def test_one_load_on_a_busy_machine_does_not_close_the_gate():
    gate = gate_of(100, 60)
    gate.moved(HOST_SOURCE, 1, 1_000_000)
    assert gate.pays(1, 1)


def test_a_first_load_that_connects_does_not_close_the_gate():
    gate = gate_of(100)
    gate.moved(0, 1, 1_000_000)
    assert gate.pays(1, 1, gate.page_ns(0)) and not gate.page_ns(0)
    gate.moved(0, 1, 60)
    gate.moved(0, 1, 60)
    assert gate.page_ns(0) == 60


def test_a_first_prompt_that_compiles_does_not_make_slow_loads_pay():
    gate = LoadGate()
    for tokens_ns in (1_000_000, 100):
        gate.computed(1, tokens_ns)
        gate.moved(HOST_SOURCE, 1, 200)
    assert not gate.pays(1, 1)
