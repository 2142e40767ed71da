"""From runs to rows: means, verdicts and their direction, tails, and what is left out."""

from __future__ import annotations

import random
import statistics
from typing import Any

import pytest
from ab_made_up import arm_run, load_run, made_runs, sample

from gapless.lab.compare import JUDGED, Rules, compare
from gapless.lab.records import LoadRun
from gapless.lab.report import pairs_of
from gapless.lab.significance import Tail, behind, crossover, detectable


def rows(effect: float, **options: float) -> dict[str, dict[str, Any]]:
    found = compare(pairs_of(made_runs(effect=effect, **options)), JUDGED, Rules())
    return {row["key"]: row for row in found}


def test_a_slower_b_is_worse_in_every_metric_whatever_its_direction():
    slower, faster, same = rows(0.1), rows(-0.1), rows(0.0)
    for key in JUDGED:
        assert [side[key]["verdict"] for side in (slower, faster, same)] == ["worse", "better", "same"], key
    assert slower["mean_tpot_ms"]["delta"] == pytest.approx(0.1, abs=0.03)
    assert slower["output_throughput"]["delta"] == pytest.approx(-0.09, abs=0.03)


def test_the_numbers_of_a_row_can_be_checked_by_hand():
    row = rows(0.1)["mean_tpot_ms"]
    a = [run.metrics["mean_tpot_ms"] for run in made_runs(effect=0.1) if run.letter == "A"]
    b = [run.metrics["mean_tpot_ms"] for run in made_runs(effect=0.1) if run.letter == "B"]
    assert row["a_mean"] == pytest.approx(statistics.fmean(a)) and row["a_std"] == pytest.approx(statistics.stdev(a))
    assert row["delta"] == pytest.approx(statistics.fmean(b) / statistics.fmean(a) - 1)
    assert row["low"] is not None and row["high"] is not None and row["low"] < row["delta"] < row["high"]
    assert row["p"] is not None and row["p_holm"] is not None and row["p"] <= row["p_holm"] <= 8 * row["p"]
    assert row["needed"]["0.01"] > row["needed"]["0.03"] >= 4


def test_verdicts_go_by_the_raised_p_value_and_nothing_else():
    seen = set()
    for seed in range(12):
        for row in compare(pairs_of(made_runs(effect=0.01, seed=seed)), JUDGED, Rules(alpha=0.1)):
            assert row["p_holm"] is not None
            assert (row["verdict"] == "same") == (row["p_holm"] >= 0.1)
            seen.add((row["verdict"], row["p_holm"] < 0.2))
    assert {("same", True), ("same", False)} <= seen, "some lie just beyond the limit"


def test_the_detectable_effect_counts_the_length_of_the_list():
    pairs = pairs_of(made_runs())
    one, all_of_them = compare(pairs, JUDGED[:1], Rules())[0], compare(pairs, JUDGED, Rules())[0]
    found = crossover(*zip(*((a.metrics[JUDGED[0]], b.metrics[JUDGED[0]], a.first) for a, b in pairs), strict=True))
    for row, alpha in ((one, 0.05), (all_of_them, 0.05 / 8)):
        assert row["detectable"] == pytest.approx(detectable(found.error, 4, alpha, 0.8) / row["a_mean"])


def test_too_few_pairs_are_not_judged():
    (row,) = compare(pairs_of(made_runs(pairs=2, effect=0.5)), ["mean_tpot_ms"], Rules())
    assert row["verdict"] == "unknown" and row["low"] is None and row["p"] is None
    assert row["delta"] == pytest.approx(0.5, abs=0.1)


def test_a_metric_that_a_run_lacks_is_left_out():
    runs = made_runs(pairs=4)
    lone = LoadRun(tuple(s._replace(output_tokens=1, events=s.events[:1]) for s in runs[0].load.samples), 1.0)
    runs[0] = arm_run(runs[0].letter, 0, True, lone)
    keys = [row["key"] for row in compare(pairs_of(runs), JUDGED, Rules())]
    assert "mean_tpot_ms" not in keys and "mean_itl_ms" not in keys and "mean_ttft_ms" in keys


def test_the_permutation_test_has_its_say():
    pairs = pairs_of(made_runs(pairs=6, effect=0.1))
    (row,) = compare(pairs, ["mean_tpot_ms"], Rules(test="permutation"))
    assert row["p"] == row["p_permutation"] == 2 / 2**6 and row["verdict"] == "worse"
    (unpaired,) = compare(pairs, ["mean_tpot_ms"], Rules(test="welch"))
    assert unpaired["order"] is None and unpaired["verdict"] == "worse"


def test_a_p99_of_384_requests_is_four_requests():
    assert behind(384, 0.99) == 4
    assert (behind(100, 0.99), behind(101, 0.99), behind(1, 0.99)) == (1, 2, 1)


def test_the_interval_of_a_tail_holds_the_true_one():
    rng = random.Random(0)
    found = Tail([[rng.expovariate(1.0) for _ in range(400)] for _ in range(10)], 0.99)
    assert (found.samples, found.behind, found.behind_a_run) == (4000, 40, 4)
    assert found.low < 4.605 < found.high  # the quantile of the distribution it was drawn from
    assert found.low <= found.value <= found.high


def test_one_run_with_a_hiccup_widens_the_interval_of_a_tail():
    rng = random.Random(0)
    runs = [[rng.gauss(10, 1) for _ in range(200)] for _ in range(8)]
    calm = Tail(runs, 0.99)
    assert Tail([*runs[:-1], [value + 20 for value in runs[-1]]], 0.99).high > calm.high + 10


def test_tails_count_requests_of_runs():
    row = rows(0.0)["p99_ttft_ms"]
    assert row["a_tail"] is not None and row["a_tail"]["samples"] == 6 * 16 and row["a_tail"]["behind_a_run"] == 1
    assert rows(0.0)["mean_ttft_ms"]["a_tail"] is None


def test_half_a_pair_does_not_count():
    runs = made_runs(pairs=4)
    assert len(pairs_of(runs[:-1])) == 3
    assert {(a.letter, b.letter) for a, b in pairs_of(runs)} == {("A", "B")}


def test_failed_requests_count_in_no_figure():
    good = load_run(0.01, requests=4)
    bad = LoadRun((*good.samples, sample(4, error="HTTP 500")), good.duration)
    whole, holed = arm_run("A", 0, True, good), arm_run("A", 0, True, bad)
    for key in JUDGED:
        assert holed.metrics[key] == pytest.approx(whole.metrics[key]), key
