"""Placing CUDA events on the host's clock, with events that are numbers."""

from __future__ import annotations

import random

import numpy as np

from gapless.device.event_clock import EventClock

HOUR_NS = 3_600_000_000_000


class Event:
    """A device time in ns; distances are float32 milliseconds, as CUDA gives them."""

    def __init__(self, ns: float) -> None:
        self.ns = ns

    def elapsed_time(self, end: Event) -> float:
        return float(np.float32((end.ns - self.ns) / 1e6))


def test_hours_of_drift_and_rounding_stay_below_the_host_bounds() -> None:
    rng, drift, start = random.Random(1), 1.00003, 10**15
    clock = EventClock(Event(0.0), start)
    true, worst, last = 0, 0, 0
    while true < 2 * HOUR_NS:
        true += rng.randrange(1_000_000, 1_000_000_000)
        # The host launched a step of 2 ms and looked 0 to 40 us after its end.
        recorded, seen = start + true - 2_000_000, start + true + rng.randrange(40_000)
        ns = clock.at(Event(true * drift), recorded, seen)
        assert recorded <= ns <= seen and ns > last
        worst, last = max(worst, abs(ns - start - true)), ns
    # Without the bounds the drift alone would have come to 216 ms.
    assert worst < 100_000


def test_an_event_before_the_base_keeps_its_place() -> None:
    clock = EventClock(Event(0.0), 1_000)
    assert clock.at(Event(5e9), 0, 10**18) == 5_000_001_000
    assert clock.at(Event(4.9e9), 0, 10**18) == 4_900_001_000
