"""Arrival processes against their formulas."""

from __future__ import annotations

import math
import statistics

import pytest

from gapless.base.errors import ConfigError
from gapless.lab.arrivals import Arrivals, Burst, Ramp, burstiness_of, parse_arrivals

N = 20_000


def gaps(times):
    return [b - a for a, b in zip((0.0, *times), times, strict=False)]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_spread_of_their_gamma_distribution(seed, burstiness):
    found = gaps(Arrivals(rate=50.0, burstiness=burstiness).times(N, seed))
    mean, cv = statistics.fmean(found), statistics.pstdev(found) / statistics.fmean(found)
    assert mean == pytest.approx(1 / 50.0)  # exactly, by the scaling
    # The sample CV of n gaps is off by about sqrt((1 + 2 cv^2) / 2n) x cv at most for these shapes; six of those.
    true = 1 / math.sqrt(burstiness)
    assert abs(cv - true) < 6 * true * math.sqrt((1 + 2 * true**2) / (2 * N)) + 6 * true * true / math.sqrt(N)


@pytest.mark.parametrize("seed", range(3))
def test_a_poisson_process_counts_poisson(seed):
    times = Arrivals(rate=10.0).times(N, seed)
    counts = [0] * int(times[-1])
    for at in times:
        if at < len(counts):
            counts[int(at)] += 1
    mean, variance = statistics.fmean(counts), statistics.pvariance(counts)
    # Index of dispersion is 1, with a standard deviation of sqrt(2 / seconds).
    assert abs(variance / mean - 1) < 6 * math.sqrt(2 / len(counts))


def test_the_same_seed_gives_the_same_times():
    process = Arrivals(rate=5.0)
    assert process.times(100, 1) == process.times(100, 1) != process.times(100, 2)
    assert all(a <= b for a, b in zip(process.times(100, 1), process.times(100, 1)[1:], strict=False))
    # What a seed means must not change with the version of anything.
    assert process.times(3, 1) == pytest.approx(PINNED)


PINNED = (0.06090153423, 0.43768392042, 0.6)


def test_constant_arrivals_are_even_and_others_come_at_once():
    assert Arrivals(rate=4.0, burstiness=math.inf).times(4) == pytest.approx((0.25, 0.5, 0.75, 1.0))
    assert Arrivals().times(3) == (0.0, 0.0, 0.0)
    assert Arrivals(rate=3.0).times(0) == ()


@pytest.mark.parametrize("strategy", ["linear", "exponential"])
@pytest.mark.parametrize("start, end", [(2.0, 20.0), (8.0, 1.0)])
def test_ramps_equal_the_direct_computation(strategy, start, end):
    count, at, want = 50, 0.0, []
    for i in range(count):
        share = i / (count - 1)
        rate = (
            start + (end - start) * share if strategy == "linear" else start * math.exp(share * math.log(end / start))
        )
        at += 1 / rate
        want.append(at)
    ramp = Ramp(strategy, start, end)
    assert Arrivals(burstiness=math.inf, ramp=ramp).times(count) == pytest.approx(want)
    assert (ramp.rates(count)[0], ramp.rates(count)[-1]) == pytest.approx((start, end))
    assert ramp.rates(1) == [start]
    random = Arrivals(ramp=ramp).times(4000, 7)
    expected = math.fsum(1 / rate for rate in ramp.rates(4000))
    assert abs(random[-1] - expected) < 6 * math.sqrt(math.fsum(1 / rate**2 for rate in ramp.rates(4000)))


@pytest.mark.parametrize("fields", [{"rate": math.nan}, {"ramp": Ramp("exponential", 1.0, math.inf)}])
def test_an_impossible_arrival_process_is_refused(fields):
    with pytest.raises(ConfigError):
        Arrivals(**fields)


def test_bursts_have_their_times_and_burstiness_is_measured():
    assert Arrivals(burst=Burst(2, 1.5)).times(5) == (0.0, 0.0, 1.5, 1.5, 3.0)
    assert parse_arrivals("burst:2:1.5") == Arrivals(burst=Burst(2, 1.5))
    assert burstiness_of((1.0, 2.0, 3.0)) == 0.0 and burstiness_of((1.0,)) == 0.0
    assert burstiness_of((0.0, 0.0, 1.0)) == pytest.approx(1.0)
    assert burstiness_of(Arrivals(rate=9.0).times(N)) == pytest.approx(1.0, abs=0.05)


def test_arrivals_are_named_by_their_distribution():
    assert Arrivals().name == "all at once" and Arrivals(2.0).name == "Poisson, 2 requests/s"
    assert Arrivals(2.0, 0.5).name == "gamma, 2 requests/s" and Arrivals(2.0, math.inf).name == "constant, 2 requests/s"
    assert Arrivals(ramp=Ramp("linear", 1, 9)).name == "linear ramp from 1 to 9 requests/s"
