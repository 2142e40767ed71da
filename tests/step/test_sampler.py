"""The sampler against a naive one in float64, its distribution, and its independence of the rest of the batch."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from step_harness import mode_of, request, row_params

from gapless.base.params import SamplingParams
from gapless.step.sampler import SampleMode, _filter, ban_stops, ranked, sample

SETTINGS = [
    {},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 40, "top_p": 0.8},
    {"top_p": 0.5},
    {"top_p": 0.95, "min_p": 0.02},
    {"min_p": 0.3},
    {"top_k": 7, "top_p": 0.9, "min_p": 0.1, "temperature": 0.6},
    {"temperature": 1.7, "top_p": 0.99},
    {"temperature": 0.0},
]


def draw(logits, requests, lengths, mode=None):
    lengths = torch.tensor(lengths, dtype=torch.int32)
    return sample(logits.clone(), row_params(requests), lengths, mode or mode_of(requests)).tolist()


def kept_by_hand(logits, params, slack):
    """Token ids that must stay and ids that may, by the definition, in float64; `slack` is doubt at the borders."""
    scores = logits.double().numpy() / params.temperature
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if params.top_k:
        order = order[: params.top_k]
    weight = np.exp(scores[order] - scores[order[0]])
    before = (weight.cumsum() - weight) / weight.sum()
    top_p = float(np.float32(params.top_p))
    must, may = {order[0]}, {order[0]}
    for token, mass, relative in zip(order, before, weight, strict=True):
        for kept, doubt in ((must, slack), (may, -slack)):
            needed = params.top_p == 1.0 or mass < top_p - doubt
            likely = params.min_p == 0.0 or relative >= params.min_p + doubt
            if needed and likely:
                kept.add(token)
    return must, may


def kept_by_the_sampler(logits, params, candidates=0):
    scores = (logits - logits.amax()) / np.float32(params.temperature)
    best_first, ids = ranked(scores[None], candidates)
    filtered = _filter(best_first, row_params([request(params)]))
    return {token for token, score in zip(ids[0].tolist(), filtered[0].tolist(), strict=True) if score > -np.inf}


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.get("temperature") != 0.0])
def test_filters_keep_the_set_of_the_definition(setting):
    generator = torch.Generator().manual_seed(1)
    params = SamplingParams(**setting)
    for vocab in (3, 97, 1000):
        for spread in (0.1, 2.0, 8.0):
            logits = torch.randn(vocab, generator=generator) * spread
            must, may = kept_by_hand(logits, params, slack=2e-6)
            kept = kept_by_the_sampler(logits, params)
            assert must <= kept <= may, (setting, vocab, spread)
            assert len(may) - len(must) <= 1, "the test proves little when the borders are wide"


def test_top_p_cuts_before_the_first_token_that_is_not_needed():
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert kept_by_the_sampler(logits, SamplingParams(top_p=0.5)) == {0}
    assert kept_by_the_sampler(logits, SamplingParams(top_p=0.51)) == {0, 1}
    assert kept_by_the_sampler(logits, SamplingParams(top_p=0.9)) == {0, 1, 2, 3}
    assert kept_by_the_sampler(logits, SamplingParams(top_p=1e-9)) == {0}


def test_top_k_breaks_ties_by_the_smaller_id():
    logits = torch.zeros(97)
    logits[50] = 1.0
    for candidates in (0, 8, 16, 64):
        assert kept_by_the_sampler(logits, SamplingParams(top_k=6), candidates) == {50, 0, 1, 2, 3, 4}


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.get("temperature") != 0.0])
def test_draws_follow_the_distribution(setting):
    vocab, rows, params = 12, 12_000, SamplingParams(**setting)
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 1.5
    kept = sorted(kept_by_hand(logits, params, slack=0.0)[0])
    requests = [request(params, seed=seed * 0x9E3779B97F4A7C15 % 2**63) for seed in range(rows)]
    drawn = draw(logits.expand(rows, vocab), requests, [7] * rows)
    seen = np.bincount(drawn, minlength=vocab)
    assert set(np.flatnonzero(seen).tolist()) <= set(kept)
    weight = np.exp(logits[kept].double().numpy() / params.temperature)
    expected = rows * weight / weight.sum()
    statistic = float((((seen[kept] - expected) ** 2) / expected).sum())
    # Chi-square: mean k - 1, variance 2 (k - 1); five deviations, and the seeds are fixed.
    degrees = len(kept) - 1
    assert statistic <= 1e-9 + degrees + 5 * (2 * degrees) ** 0.5


def test_draws_of_one_seed_over_positions_follow_the_distribution_too():
    vocab, rows = 5, 12_000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])
    drawn = draw(logits.expand(rows, vocab), [request(seed=9)] * rows, list(range(rows)))
    seen = np.bincount(drawn, minlength=vocab)
    weight = np.exp(logits.double().numpy())
    expected = rows * weight / weight.sum()
    assert float((((seen - expected) ** 2) / expected).sum()) <= 4 + 5 * 8**0.5


def mixed_batch(seed, vocab, rounding):
    """Rows of all settings, with logits that meet often when `rounding` is low."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    requests = [
        request(
            SamplingParams(**{**rng.choice(SETTINGS), "max_tokens": None, "min_tokens": rng.choice((0, 0, 4))}),
            seed=rng.randrange(-(2**63), 2**63),
            stop_ids=rng.sample(range(vocab), rng.randrange(3)),
            min_len=rng.choice((0, 30)),
        )
        for _ in range(24)
    ]
    logits = (torch.randn(24, vocab, generator=generator) * 4).round(decimals=rounding)
    return requests, logits, [rng.randrange(1, 50) for _ in requests]


@pytest.mark.parametrize("rounding", [0, 1, 6])
@pytest.mark.parametrize("vocab", [13, 97, 2500])
def test_a_row_gets_the_same_token_in_any_company(vocab, rounding):
    requests, logits, lengths = mixed_batch(vocab + rounding, vocab, rounding)
    alone = [draw(logits[i : i + 1], [requests[i]], [lengths[i]])[0] for i in range(24)]
    rng = random.Random(0)
    for size in (2, 3, 8, 24, 24):
        rows = rng.sample(range(24), size)
        together = draw(logits[rows], [requests[i] for i in rows], [lengths[i] for i in rows])
        assert together == [alone[i] for i in rows]


def test_the_batch_keeps_enough_candidates_for_its_widest_row():
    logits = torch.zeros(60, 97)
    requests = [request(seed=i, top_k=(1, 5, 40)[i % 3]) for i in range(60)]
    alone = [draw(logits[:1], [requests[i]], [3])[0] for i in range(60)]
    assert mode_of(requests).candidates > 40
    assert draw(logits, requests, [3] * 60) == alone
    assert max(alone[1::3]) < 5 < max(alone[2::3]) < 40


@pytest.mark.parametrize("vocab", [97, 2500])
def test_a_row_gets_the_same_token_in_every_mode_wide_enough(vocab):
    logits = (torch.randn(16, vocab, generator=torch.Generator().manual_seed(5)) * 3).round(decimals=1)
    requests = [request(seed=i, top_k=9, top_p=0.9) for i in range(16)]
    modes = [SampleMode(True, True, count) for count in (16, 32, 64, 1024, 0)]
    results = {tuple(draw(logits, requests, [5] * 16, mode)) for mode in modes}
    assert len(results) == 1
    plain = [request(seed=i) for i in range(16)]
    assert draw(logits, plain, [5] * 16, SampleMode(True)) == draw(logits, plain, [5] * 16, SampleMode(True, True))


def test_greedy_rows_stay_greedy_beside_random_ones():
    logits = torch.randn(40, 97, generator=torch.Generator().manual_seed(2))
    requests = [request(seed=i, temperature=float(i % 2), top_k=i % 3) for i in range(40)]
    drawn = draw(logits, requests, [3] * 40)
    assert drawn[::2] == logits.argmax(-1)[::2].tolist()
    assert drawn[1::2] != logits.argmax(-1)[1::2].tolist()


@pytest.mark.parametrize("setting", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-40, 1e-45])
def test_a_tiny_temperature_is_as_good_as_greedy(temperature, setting):
    logits = torch.randn(20, 97, generator=torch.Generator().manual_seed(4)) * 5
    requests = [request(seed=i, temperature=temperature, **setting) for i in range(20)]
    assert draw(logits, requests, [3] * 20) == logits.argmax(-1).tolist()


def test_infinite_and_missing_logits_disturb_no_other_row():
    logits = torch.randn(6, 97, generator=torch.Generator().manual_seed(6))
    requests = [request(seed=i, **SETTINGS[i]) for i in range(6)]
    good = draw(logits, requests, [3] * 6)
    broken = logits.clone()
    broken[1] = torch.nan
    broken[3, 5] = torch.inf
    broken[4] = -torch.inf
    drawn = draw(broken, requests, [3] * 6)
    assert [drawn[i] for i in (0, 2, 5)] == [good[i] for i in (0, 2, 5)]
    assert all(0 <= token < 97 for token in drawn), "a token of a failed row must still be a token"


def test_minus_infinity_is_never_drawn():
    logits = torch.full((500, 97), -torch.inf)
    logits[:, 10:14] = torch.randn(500, 4, generator=torch.Generator().manual_seed(7))
    for setting in SETTINGS:
        drawn = draw(logits, [request(seed=i, **setting) for i in range(500)], [3] * 500)
        assert set(drawn) <= {10, 11, 12, 13}


def test_stop_ids_are_banned_up_to_the_minimum_and_no_further():
    requests = [request(min_tokens=2, min_len=6, stop_ids=(1, 3), temperature=0.0)] * 4
    logits = torch.tensor([[0.0, 9.0, 1.0, 8.0, 2.0]]).repeat(4, 1)
    assert draw(logits, requests, [4, 5, 6, 7]) == [4, 4, 1, 1]


def test_banning_touches_only_the_stop_ids():
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(8))
    after = logits.clone()
    requests = [request(min_len=9, stop_ids=(0, 7)), request(min_len=0, stop_ids=(0,)), request(min_len=9)]
    ban_stops(after, row_params(requests), torch.tensor([3, 3, 3], dtype=torch.int32))
    assert after[0, [0, 7]].tolist() == [-torch.inf] * 2
    after[0, [0, 7]] = logits[0, [0, 7]]
    assert torch.equal(after, logits)


def test_a_stop_id_outside_the_vocabulary_bans_nothing():
    logits = torch.zeros(1, 8)
    after = logits.clone()
    ban_stops(after, row_params([request(min_len=9, stop_ids=(8, 2**31 - 1))]), torch.tensor([3], dtype=torch.int32))
    assert torch.equal(after, logits)


def test_equal_seeds_and_positions_give_equal_tokens_and_others_do_not():
    logits = torch.zeros(200, 97)
    same = draw(logits, [request(seed=4)] * 200, [9] * 200)
    assert len(set(same)) == 1
    assert len(set(draw(logits, [request(seed=4)] * 200, list(range(200))))) > 50
    assert len(set(draw(logits, [request(seed=i) for i in range(200)], [9] * 200))) > 50
