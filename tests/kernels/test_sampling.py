"""Sampling in torch and in C++: its definition, its distribution, and its independence of the rest of the batch."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from native_kernels import load_native, load_plain_variant
from sampling_oracle import (
    ALL,
    Setting,
    check_bad_rows,
    check_hard_rows,
    check_masks_of_places,
    drawn,
    kept,
    kept_by,
    kept_mask,
    mask_by,
    tables_of,
)

from gapless.kernels import plain
from gapless.kernels.layout import CUT_ID, CUT_VALUE
from gapless.kernels.sampling import order_keys, reach_by_bits, reach_in_order

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
HOT = [setting for setting in SETTINGS if setting.get("temperature") != 0.0]


@pytest.fixture(params=["torch", "native"])
def kernels(request):
    return plain.KERNELS if request.param == "torch" else load_native()


def normal(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def draw(kernels, logits, settings):
    """The tokens of a batch, every row of which is cut."""
    rows, tables = tables_of(settings)
    before = (logits := logits.contiguous()).clone()
    kernels.cut(logits, torch.arange(len(rows), dtype=torch.int32), rows, tables, ALL)
    tokens, _ = kernels.sample(logits, rows, tables, None)
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    return tokens.tolist()


def left(kernels, logits, asked):
    """What the cut leaves of one row."""
    rows, tables = tables_of([asked])
    kernels.cut(logits[None], torch.zeros(1, dtype=torch.int32), rows, tables, ALL)
    return kept_by(tables, 1, logits, asked)


def kept_by_hand(logits, asked, slack):
    """Token ids that must stay and ids that may, by the definition, in float64; `slack` is doubt at the borders."""
    scores = logits.double().numpy() / asked.temperature
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if asked.top_k:
        order = order[: asked.top_k]
    weight = np.exp(scores[order] - scores[order[0]])
    before = (weight.cumsum() - weight) / weight.sum()
    top_p = float(np.float32(asked.top_p))
    must, may = {order[0]}, {order[0]}
    for token, mass, relative in zip(order, before, weight, strict=True):
        for side, doubt in ((must, slack), (may, -slack)):
            needed = asked.top_p == 1.0 or mass < top_p - doubt
            likely = asked.min_p == 0.0 or relative >= asked.min_p + doubt
            if needed and likely:
                side.add(token)
    return must, may


@pytest.mark.parametrize("setting", HOT)
def test_filters_keep_the_set_of_the_definition(kernels, setting):
    asked = Setting(**setting)
    for vocab in (3, 97, 1000):
        for spread in (0.1, 2.0, 8.0):
            logits = normal(vocab, seed=1) * spread
            must, may = kept_by_hand(logits, asked, slack=2e-6)
            found = left(kernels, logits, asked)
            assert must <= found <= may, (setting, vocab, spread)
            assert len(may) - len(must) <= 1, "the test proves little when the borders are wide"
            assert found == kept(logits, asked)


def test_top_p_cuts_before_the_first_token_that_is_not_needed(kernels):
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert left(kernels, logits, Setting(top_p=0.5)) == {0}
    assert left(kernels, logits, Setting(top_p=0.51)) == {0, 1}
    assert left(kernels, logits, Setting(top_p=0.9)) == {0, 1, 2, 3}
    assert left(kernels, logits, Setting(top_p=1e-9)) == {0}


def test_top_k_breaks_ties_by_the_smaller_id(kernels):
    logits = torch.zeros(97)
    logits[50] = 1.0
    assert left(kernels, logits, Setting(top_k=6)) == {50, 0, 1, 2, 3, 4}


@pytest.mark.parametrize("setting", HOT)
def test_draws_follow_the_distribution(kernels, setting):
    vocab, rows, asked = 12, 12_000, Setting(**setting)
    logits = normal(vocab, seed=3) * 1.5
    stays = sorted(kept_by_hand(logits, asked, slack=0.0)[0])
    settings = [asked._replace(seed=seed * 0x9E3779B97F4A7C15 % 2**63) for seed in range(rows)]
    seen = np.bincount(draw(kernels, logits.expand(rows, vocab), settings), minlength=vocab)
    assert set(np.flatnonzero(seen).tolist()) <= set(stays)
    weight = np.exp(logits[stays].double().numpy() / asked.temperature)
    expected = rows * weight / weight.sum()
    statistic = float((((seen[stays] - expected) ** 2) / expected).sum())
    # Chi-square: mean k - 1, variance 2 (k - 1); five deviations, and the seeds are fixed.
    degrees = len(stays) - 1
    assert statistic <= 1e-9 + degrees + 5 * (2 * degrees) ** 0.5


def test_draws_of_one_seed_over_positions_follow_the_distribution_too(kernels):
    vocab, rows = 5, 12_000
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])
    seen = np.bincount(
        draw(kernels, logits.expand(rows, vocab), [Setting(seed=9, length=i) for i in range(rows)]), minlength=5
    )
    weight = np.exp(logits.double().numpy())
    expected = rows * weight / weight.sum()
    assert float((((seen - expected) ** 2) / expected).sum()) <= 4 + 5 * 8**0.5


def mixed_batch(seed, vocab, rounding):
    """Rows of all settings, with logits that meet often when `rounding` is low."""
    rng = random.Random(seed)
    settings = [
        Setting(
            **rng.choice(SETTINGS),
            seed=rng.randrange(-(2**63), 2**63),
            stop_ids=rng.sample(range(vocab), rng.randrange(3)),
            min_len=rng.choice((0, 30)),
            length=rng.randrange(1, 50),
        )
        for _ in range(24)
    ]
    return (normal(24, vocab, seed=seed) * 4).round(decimals=rounding), settings


@pytest.mark.parametrize("rounding", [0, 1, 6])
@pytest.mark.parametrize("vocab", [13, 97, 2500])
def test_a_row_gets_its_own_token_in_any_company(kernels, vocab, rounding):
    logits, settings = mixed_batch(vocab + rounding, vocab, rounding)
    alone = [drawn(logits[i], settings[i], vocab) for i in range(24)]
    rng = random.Random(0)
    for size in (1, 2, 3, 8, 24, 24):
        rows = rng.sample(range(24), size)
        assert draw(kernels, logits[rows], [settings[i] for i in rows]) == [alone[i] for i in rows]


def test_greedy_rows_stay_greedy_beside_random_ones(kernels):
    logits = normal(40, 97, seed=2)
    tokens = draw(kernels, logits, [Setting(seed=i, temperature=float(i % 2), top_k=i % 3) for i in range(40)])
    assert tokens[::2] == logits.argmax(-1)[::2].tolist()
    assert tokens[1::2] != logits.argmax(-1)[1::2].tolist()


@pytest.mark.parametrize("setting", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}])
@pytest.mark.parametrize("temperature", [1e-4, 1e-30, 1e-40, 1e-45])
def test_a_tiny_temperature_is_as_good_as_greedy(kernels, temperature, setting):
    logits = normal(20, 97, seed=4) * 5
    settings = [Setting(seed=i, temperature=temperature, **setting) for i in range(20)]
    assert draw(kernels, logits, settings) == logits.argmax(-1).tolist()


def test_infinite_and_missing_logits_disturb_no_other_row(kernels):
    logits = normal(6, 97, seed=6)
    settings = [Setting(seed=i, **SETTINGS[i]) for i in range(6)]
    good = draw(kernels, logits, settings)
    broken = logits.clone()
    broken[1] = torch.nan
    broken[3, 5] = torch.inf
    broken[4] = -torch.inf
    tokens = draw(kernels, broken, settings)
    assert [tokens[i] for i in (0, 2, 5)] == [good[i] for i in (0, 2, 5)]
    assert all(0 <= token < 97 for token in tokens), "a token of a failed row must still be a token"


def test_minus_infinity_is_never_drawn(kernels):
    logits = torch.full((500, 97), -torch.inf)
    logits[:, 10:14] = normal(500, 4, seed=7)
    for setting in SETTINGS:
        assert set(draw(kernels, logits, [Setting(seed=i, **setting) for i in range(500)])) <= {10, 11, 12, 13}


def test_stop_ids_are_banned_up_to_the_minimum_and_no_further(kernels):
    logits = torch.tensor([[0.0, 9.0, 1.0, 8.0, 2.0]]).repeat(4, 1)
    for temperature in (0.0, 1e-3):
        settings = [Setting(temperature, min_len=6, stop_ids=(1, 3), length=length) for length in (4, 5, 6, 7)]
        assert draw(kernels, logits, settings) == [4, 4, 1, 1]


def test_banning_touches_only_the_stop_ids(kernels):
    logits = torch.zeros(3, 8)
    settings = [Setting(min_len=9, stop_ids=(0, 7)), Setting(stop_ids=(0,)), Setting(min_len=9)]
    seen = [set() for _ in settings]
    for seed in range(200):
        for found, token in zip(
            seen, draw(kernels, logits, [asked._replace(seed=seed) for asked in settings]), strict=True
        ):
            found.add(token)
    assert seen == [{1, 2, 3, 4, 5, 6}, set(range(8)), set(range(8))]


def test_a_stop_id_outside_the_vocabulary_bans_nothing(kernels):
    settings = [Setting(seed=seed, min_len=9, stop_ids=(8, 2**31 - 1)) for seed in range(200)]
    assert set(draw(kernels, torch.zeros(200, 8), settings)) == set(range(8))


def test_equal_seeds_and_positions_give_equal_tokens_and_others_do_not(kernels):
    logits = torch.zeros(200, 97)
    assert len(set(draw(kernels, logits, [Setting(seed=4)] * 200))) == 1
    assert len(set(draw(kernels, logits, [Setting(seed=4, length=i) for i in range(200)]))) > 50
    assert len(set(draw(kernels, logits, [Setting(seed=i) for i in range(200)]))) > 50


@pytest.mark.parametrize("vocab, dtype", [(5, torch.float32), (13, torch.float32), (701, torch.bfloat16)])
def test_rows_where_searches_go_wrong(kernels, vocab, dtype):
    check_hard_rows(kernels, vocab, dtype, "cpu")


def test_rows_that_are_not_finite_and_padding(kernels):
    for vocab in (40, 2500):
        check_bad_rows(kernels, vocab, "cpu")


def test_each_place_of_a_row_draws_what_its_mask_leaves(kernels):
    for vocab in (40, 2500):
        check_masks_of_places(kernels, vocab, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuts_of_a_real_vocabulary_equal_the_direct_computation(dtype):
    """151,937 tokens: the sums of the best, of many that are equal, and of the smallest weights."""
    vocab, kernels = 151_937, load_native()
    for spread, rounding in ((0.05, 6), (2.0, 0), (4.0, 6)):
        logits = (normal(vocab, seed=1) * spread).round(decimals=rounding).to(dtype)
        settings = [Setting(**setting) for setting in HOT]
        rows, tables = tables_of(settings)
        many = logits.expand(len(HOT), vocab).contiguous()
        kernels.cut(many, torch.arange(len(HOT), dtype=torch.int32), rows, tables, ALL)
        tokens, _ = kernels.sample(many, rows, tables, None)
        assert tokens.tolist() == [drawn(logits, asked, vocab) for asked in settings]
        for row, asked in zip(rows.tolist(), settings, strict=True):
            found = mask_by(tables, row, logits, asked)
            assert not (kept_mask(logits, asked, -1e-6) & ~found).any(), (spread, asked)
            assert not (found & ~kept_mask(logits, asked, 1e-6)).any(), (spread, asked)
        alone = tables._replace(state=tables.state.clone())
        for i in range(len(HOT)):
            alone.state[rows[i], CUT_VALUE : CUT_ID + 1] = -1
            kernels.cut(many, torch.tensor([i], dtype=torch.int32), rows, alone, ALL)
        assert torch.equal(alone.state, tables.state), "a row that is cut alone is shared among threads"


@pytest.mark.parametrize("vocab", [1, 13, 2560])
def test_a_search_by_bits_ends_where_one_in_order_does(vocab):
    logits = normal(5, vocab, seed=vocab)
    logits[:, ::3] = logits[:, :1].clone()  # ties
    logits[1, 4:] = -torch.inf
    amounts = (logits.exp() * 1_000).long()
    totals = amounts.sum(-1, keepdim=True)
    for target in (torch.ones_like(totals), totals // 2, totals, totals + 1):
        found = reach_by_bits(order_keys(logits), amounts, target.clamp(min=1))
        assert torch.equal(found, reach_in_order(order_keys(logits), amounts, target.clamp(min=1)))
        assert torch.equal(found > 0, target.clamp(min=1) <= totals), "it was meant to end at a token"


def test_sampling_without_avx512_is_the_same_to_the_bit(tmp_path):
    """The other half of the C++: the same cuts and draws, to the bit."""
    ops, kernels = load_plain_variant(tmp_path), load_native()
    for vocab, dtype in ((13, torch.float32), (1003, torch.bfloat16), (40_001, torch.float32)):
        logits, settings = mixed_batch(vocab, vocab, 1)
        rows, tables = tables_of(settings)
        logits, index = logits.to(dtype), torch.arange(len(rows), dtype=torch.int32)
        reference = tables._replace(state=tables.state.clone())
        kernels.cut(logits, index, rows, tables, ALL)
        ops.cut(logits, index, rows, reference.state, reference.params, reference.masks)
        assert torch.equal(reference.state, tables.state)
        want, _ = kernels.sample(logits, rows, tables, None)
        given = logits, rows, reference.state, reference.params, reference.masks, None
        assert torch.equal(ops.sample(*given)[0], want)
