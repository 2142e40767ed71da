"""The statistics against constants of scipy (stats.t, stats.nct, ttest_ind, permutation_test, linregress)."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest

from gapless.lab.distributions import t_power, t_quantile, t_two_sided
from gapless.lab.significance import (
    crossover,
    detectable,
    drift,
    holm,
    pairs_needed,
    sign_flip_p,
    spread_of,
    welch,
)

A = [10.1, 10.3, 9.8, 10.0, 10.4, 10.2]
B = [10.6, 10.2, 10.1, 10.9, 10.5, 10.4]
ABBA = [True, False] * 3


@pytest.mark.parametrize(
    "df, p, quantile",
    [
        (1, 0.6, 0.32491969623290634),
        (1, 0.975, 12.706204736174694),
        (1, 0.9995, 636.6192487687897),
        (2.5, 0.975, 3.5746548420036817),
        (2.5, 0.9995, 18.277893528131457),
        (8, 0.6, 0.26192109674883235),
        (8, 0.975, 2.306004135204166),
        (8, 0.9995, 5.041305433373456),
        (30, 0.975, 2.0422724563012378),
    ],
)
def test_quantiles_of_t_equal_known_values(df, p, quantile):
    assert t_quantile(p, df) == pytest.approx(quantile, rel=1e-9)
    assert t_quantile(1 - p, df) == pytest.approx(-quantile, rel=1e-9)
    assert 1 - t_two_sided(quantile, df) / 2 == pytest.approx(p, rel=1e-12)


@pytest.mark.parametrize(
    "t, df, p",
    [
        (0.3, 1, 0.8144528418445154),
        (9, 1, 0.07044657495455456),
        (2, 2.5, 0.1573914957579659),
        (9, 8, 1.8531184296450075e-05),
        (9, 30, 5.014831916147889e-10),
        (0, 8, 1.0),
        (math.inf, 8, 0.0),
    ],
)
def test_two_sided_probabilities_equal_known_values(t, df, p):
    assert t_two_sided(t, df) == pytest.approx(p, rel=1e-9)
    assert t_two_sided(-t, df) == t_two_sided(t, df)


@pytest.mark.parametrize(
    "shift, df, alpha, power",
    [
        (5, 1, 0.05, 0.3051601027351559),
        (2.5, 3, 0.05, 0.4078412512980282),
        (3.2, 8, 0.05, 0.7997779797008098),
        (2.9, 18, 0.05, 0.7830463086377052),
        (5, 8, 0.05 / 9, 0.8404074185856738),
        (0, 38, 0.05, 0.05),
    ],
)
def test_power_is_that_of_the_noncentral_t(shift, df, alpha, power):
    assert t_power(shift, df, alpha) == pytest.approx(power, rel=1e-6)


def test_the_test_of_welch_equals_known_values():
    found = welch(A, B)
    assert found.df == pytest.approx(9.272006470508934)
    assert found.p == pytest.approx(0.058766310979964174, rel=1e-9)
    assert found.interval(0.05) == pytest.approx((-0.014405459745092553, 0.6477387930784254), rel=1e-9)


def test_crossover_is_the_two_sample_test_of_both_orders():
    found = crossover(A, B, ABBA)
    assert found.delta == pytest.approx(statistics.fmean(B) - statistics.fmean(A))
    assert found.df == 4
    assert found.p == pytest.approx(0.11721716888134273, rel=1e-9)
    # scipy's interval is for twice the difference.
    assert found.interval(0.05) == pytest.approx((-0.24951994214345852 / 2, 1.5161866088101243 / 2), rel=1e-9)


def test_crossover_is_blind_to_a_steady_drift_and_to_the_order():
    plain = crossover(A, B, ABBA)
    # Every run is 0.7 later than the one before; and the second of a pair has 3.0 more.
    at = [(2 * k, 2 * k + 1) if first else (2 * k + 1, 2 * k) for k, first in enumerate(ABBA)]
    a = [x + 0.7 * t + 3.0 * (not first) for x, (t, _), first in zip(A, at, ABBA, strict=True)]
    b = [y + 0.7 * t + 3.0 * first for y, (_, t), first in zip(B, at, ABBA, strict=True)]
    shifted = crossover(a, b, ABBA)
    assert shifted.delta == pytest.approx(plain.delta)
    assert shifted.error == pytest.approx(plain.error)
    assert shifted.order == pytest.approx(plain.order + 3.7)
    assert welch(a, b).error > 5 * plain.error  # what the pairing is for


def test_sign_flips_drawn_agree_with_all_of_them():
    differences = [y - x for x, y in zip(A, B, strict=True)]
    assert sign_flip_p(differences) == 0.09375
    assert sign_flip_p([1.0] * 6) == 2 / 2**6
    assert sign_flip_p([1.0, -1.0] * 3) == 1.0
    many = differences[:5] * 3
    exact = sum(abs(sum(s * d for s, d in zip(signs, many, strict=True))) >= abs(sum(many)) * (1 - 1e-12)
                for signs in itertools.product((1, -1), repeat=15)) / 2**15  # fmt: skip
    assert sign_flip_p(many) == pytest.approx(exact, abs=4 * math.sqrt(exact / 20_000))
    assert sign_flip_p(many, seed=1) == sign_flip_p(many, seed=1)


def test_the_correction_of_holm_equals_known_values():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_detectable_and_needed_agree_with_the_power():
    for pairs, alpha in ((6, 0.05), (10, 0.05), (10, 0.05 / 8)):
        least = detectable(2.0, pairs - 2, alpha, 0.8)
        assert t_power(least / 2.0, pairs - 2, alpha) == pytest.approx(0.8, abs=1e-6)
        # Seen from the other side: that effect takes that many pairs.
        assert pairs_needed(least * 1.000001, 2.0 * math.sqrt(pairs), alpha, 0.8) == pairs
        assert pairs_needed(least * 0.98, 2.0 * math.sqrt(pairs), alpha, 0.8) > pairs
    assert pairs_needed(1e-9, 1.0, 0.05, 0.8, most=500) == 500


def test_the_spread_of_a_crossover_follows_from_its_error():
    found = crossover(A, B, ABBA)
    assert spread_of(found, 6) == pytest.approx(found.error * math.sqrt(6))


def test_the_drift_of_rounds_equals_known_values():
    found = drift(A)
    assert found is not None
    assert found == pytest.approx((0.02857142857142847, 0.6364208217348142))
    assert drift([1.0, 2.0, 3.0]) is None
    assert drift([1.0, 2.0, 3.0, 4.0]) == (1.0, 0.0)


def test_runs_without_spread_are_equal_or_differ_for_certain():
    same, other = [5.0] * 4, [6.0] * 4
    order = [True, False, True, False]
    assert crossover(same, same, order).p == 1.0
    assert crossover(same, other, order).p == 0.0
    assert crossover(same, other, order).interval(0.05) == (1.0, 1.0)
