"""Sampling: its definition, its distribution, and its independence of the rest of the batch."""

from __future__ import annotations

import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from implementations import BF16, CPU, F16, F32, TRITON, runs
from native_kernels import load_native, load_plain_variant
from products import random as random_numbers
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
from sharpest import sharpest

from gapless.kernels import plain
from gapless.kernels.layout import CUT_ID, CUT_VALUE, KEEP_ID, KEEP_VALUE, LENGTH, SEED_HIGH, SEED_LOW
from gapless.kernels.random import gumbel
from gapless.kernels.sampling import order_keys, reach_by_bits, reach_in_order, share_in_floats, share_in_integers
from gapless.kernels.views import Filters

VOCAB = 151_936
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


@pytest.fixture
def kernels(implementation):
    return implementation.kernels


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
@runs(on=CPU)
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


@runs(on=CPU)
def test_top_p_cuts_before_the_first_token_that_is_not_needed(kernels):
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert left(kernels, logits, Setting(top_p=0.5)) == {0}
    assert left(kernels, logits, Setting(top_p=0.51)) == {0, 1}
    assert left(kernels, logits, Setting(top_p=0.9)) == {0, 1, 2, 3}
    assert left(kernels, logits, Setting(top_p=1e-9)) == {0}


@pytest.mark.parametrize("setting", sharpest([HOT[6], HOT[3], *HOT[:3], *HOT[4:6], *HOT[7:]], 2))
@runs(on=CPU)
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
@runs(on=CPU)
def test_a_row_gets_its_own_token_in_any_company(kernels, vocab, rounding):
    logits, settings = mixed_batch(vocab + rounding, vocab, rounding)
    alone = [drawn(logits[i], settings[i], vocab) for i in range(24)]
    rng = random.Random(0)
    for size in (1, 2, 3, 8, 24, 24):
        rows = rng.sample(range(24), size)
        assert draw(kernels, logits[rows], [settings[i] for i in rows]) == [alone[i] for i in rows]


@runs(on=CPU)
def test_stop_ids_are_banned_up_to_the_minimum_and_no_further(kernels):
    logits = torch.tensor([[0.0, 9.0, 1.0, 8.0, 2.0]]).repeat(4, 1)
    for temperature in (0.0, 1e-3):
        settings = [Setting(temperature, min_len=6, stop_ids=(1, 3), length=length) for length in (4, 5, 6, 7)]
        assert draw(kernels, logits, settings) == [4, 4, 1, 1]


@runs(
    "vocab, dtype", cpu=[(13, F32), (5, F32), (701, BF16)], interpreter=[(301, F32), (300, F16)],
    cuda=[(vocab, dtype) for vocab in (13, 1025, 20_001) for dtype in (F32, F16, BF16)], keep=1,
)  # fmt: skip
def test_rows_are_cut_right_where_searches_go_wrong(implementation, vocab, dtype):
    every = 20 if implementation.name == "interpreter" else 1
    check_hard_rows(implementation.kernels, vocab, dtype, implementation.device, every)


@runs("vocab", cpu=[40, 2500], interpreter=[1100], cuda=[40, VOCAB])
def test_rows_that_are_not_finite_and_padding_disturb_no_other(implementation, vocab):
    check_bad_rows(implementation.kernels, vocab, implementation.device)


@runs("vocab", cpu=[40, 2500], interpreter=[1100], cuda=[40, VOCAB])
def test_each_place_of_a_row_draws_by_its_mask(implementation, vocab):
    check_masks_of_places(implementation.kernels, vocab, implementation.device)


def tables(temperatures, device):
    """Rows and tables of as many requests; seeds use all 64 bits."""
    seeds = [(index * 0x9E3779B97F4A7C15 + 0x8000000180000001) % 2**64 for index in range(len(temperatures))]
    signed = [seed - 2**64 if seed >= 2**63 else seed for seed in seeds]
    settings = [Setting(one, seed=signed[i], length=7 * i + 3) for i, one in enumerate(temperatures)]
    return tables_of(settings, device)


def sampled(implementation, logits, rows, made):
    before = logits.clone()
    tokens, finite = implementation.kernels.sample(logits, rows, made, None)
    assert tokens.dtype == torch.int64 and finite.dtype == torch.bool
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    return tokens.tolist(), finite.tolist()


@runs(
    "rows, vocab",
    [(1, 1), (2, 5), (9, 2050)],
    native=[(9, 30_011)],
    interpreter=[(3, 1024)],
    cuda=[(1, VOCAB), (65, VOCAB)],
)
def test_greedy_rows_take_the_first_best_token(implementation, rows, vocab):
    """Wherever the vocabulary is cut."""
    for dtype in implementation.dtypes:
        logits = random_numbers((rows, vocab), dtype, implementation.device, 1)
        for row in range(rows):
            first = (row * 517 + vocab // 2) % vocab
            for place in (vocab - 1, first, first + 1, first + 2, first + 1024):
                logits[row, min(place, vocab - 1)] = 9.0
        tokens, finite = sampled(implementation, logits, *tables([0.0] * rows, implementation.device))
        assert tokens == [line.index(max(line)) for line in logits.float().cpu().tolist()]
        assert all(finite)


@runs("vocab", [7, 2000], cuda=[VOCAB])
def test_bad_logits_are_flagged_in_their_rows_alone(implementation, vocab):
    """Each fault alone, in the last place. A token is always one of the vocabulary."""
    good = random_numbers((1, vocab), F32, implementation.device, 2)
    faults = [good.clone() for _ in range(6)]
    faults[0][0, -1], faults[1][0, -1], faults[2][:] = math.nan, math.inf, -math.inf
    faults[3][:] = -math.inf
    faults[3][0, vocab // 2] = 1.0
    faults[4][:] = math.nan
    logits = torch.cat([good, *faults])
    for temperature in (0.0, 0.7):
        own = tables([temperature] * 7, implementation.device)
        tokens, finite = sampled(implementation, logits, *own)
        assert finite == [True, False, False, False, True, False, True]
        assert tokens[4] == vocab // 2 and all(0 <= token < vocab for token in tokens)
        expected, _ = plain.sample(logits, *own, None)
        assert [tokens[0], tokens[6]] == [int(expected[0]), int(expected[6])]


@runs(
    "dtype, rows, vocab, spread, share", on=("native", *TRITON),
    native=[(dtype, 9, vocab, 3.0, 1.0) for dtype in (F32, BF16) for vocab in (1, 16, 33, 1000, 30_011)]
    + [(F32, 20_000, 100, 1.0, 1.0)],
    interpreter=[(F32, 12, 300, 1.0, 0.9), (F32, 3, 2500, 3.0, 0.6), (F16, 5, 97, 1.0, 0.6)],
    cuda=[(F32, 2000, 3000, 2.0, 0.999), (F32, 30, VOCAB, 1.0, 0.9), (BF16, 30, VOCAB, 3.0, 0.9)],
)  # fmt: skip
def test_draws_are_those_of_torch(implementation, dtype, rows, vocab, spread, share):
    """Where a token is another one, torch has the two within the last bits of each other. C++ uses torch's logarithms,
    so nothing can differ."""
    logits = random_numbers((rows, vocab), dtype, implementation.device, 3, spread)
    temperatures = [(0.0, 1.0, 0.3, 1e-30, 2.5)[row % 5] for row in range(rows)]
    own = tables(temperatures, implementation.device)
    tokens, _ = sampled(implementation, logits, *own)
    logits = logits.float()
    expected = plain.sample(logits, *own, None)[0].tolist()
    differ = [row for row in range(rows) if tokens[row] != expected[row]]
    assert 1 - len(differ) / rows >= share
    for row in differ:
        position, seed = own[1].state[own[0][row], LENGTH], own[1].params[own[0][row], SEED_LOW : SEED_HIGH + 1]
        noise = gumbel(None, vocab, position.long().view(1, 1), seed[None])[0]
        scores, pair = (
            (logits[row] - logits[row].amax()) / (temperatures[row] or 1.0) + noise,
            [tokens[row], expected[row]],
        )
        doubt = 4e-6 * max(1.0, float(noise[pair].abs().max()))
        assert temperatures[row] and float(scores[pair].diff().abs()) <= doubt, row
    cold = [row for row in range(rows) if not temperatures[row]]
    assert [tokens[row] for row in cold] == logits.argmax(-1)[cold].tolist()


@runs("count, vocab", on=TRITON, interpreter=[(9, 1100)], cuda=[(200, VOCAB)])
def test_a_draw_is_independent_of_its_batch(implementation, count, vocab):
    """A row's token is the same alone and in batches that are cut otherwise."""
    logits = random_numbers((count, vocab), F32, implementation.device, 4)
    rows, own = tables([1.0] * count, implementation.device)
    tokens, _ = sampled(implementation, logits, rows, own)
    for part in (slice(0, 1), slice(3, 6), slice(count - 2, count)):
        again, _ = sampled(implementation, logits[part].contiguous(), rows[part].contiguous(), own)
        assert again == tokens[part]


@runs()
def test_a_row_without_filters_has_no_cut_beside_rows_with_filters(implementation):
    """Its later steps may list it in no lane: they would draw by the cut of these logits."""
    device = implementation.device
    for dtype in implementation.dtypes:
        settings = [Setting(0.8, top_k=5), Setting(), Setting(0.0), Setting(1.3, top_p=0.5), Setting(min_p=0.5)]
        rows, made = tables_of(settings, device)
        logits, index = normal(5, 300, seed=1).to(device, dtype), torch.arange(5, dtype=torch.int32, device=device)
        implementation.kernels.cut(logits, index, rows, made, ALL)
        cuts = made.state[rows.long()][:, [CUT_VALUE, CUT_ID]].tolist()
        assert [cut == [KEEP_VALUE, KEEP_ID] for cut in cuts] == [False, True, True, False, False], dtype


@runs("few", [{"top_k": 40, "top_p": 0.9}, {"top_k": 9}, {"top_p": 0.7}, {"min_p": 0.05}], on=("interpreter",), keep=2)
def test_a_cut_is_the_same_in_any_spread_and_beside_any_filters(implementation, few, monkeypatch):
    from gapless.kernels import cut_triton

    for dtype in implementation.dtypes:
        logits = (normal(2, 900, seed=1) * 3).to(dtype)
        index, found = torch.arange(2, dtype=torch.int32), []
        own = Filters("top_k" in few, "top_p" in few)
        for tile, filters in dict.fromkeys(((256, ALL), (256, own), (512, own), (1024, ALL))):
            monkeypatch.setattr(cut_triton, "FEW_ROWS_TILE", tile)
            rows, tables = tables_of([Setting(0.8, **few), Setting(1.3, **few)])
            implementation.kernels.cut(logits, index, rows, tables, filters)
            found.append(tables.state)
        assert all(torch.equal(state, found[0]) for state in found)


@runs("dtype, count", on=("cuda",), cuda=[(dtype, count) for dtype in (F32, BF16) for count in (1, 5, 40, 256)])
def test_cuts_of_a_real_vocabulary_equal_the_definition(implementation, dtype, count):
    """However many rows share the launches."""
    asked = [Setting(top_p=0.9), Setting(top_k=50), Setting(0.7, 40, 0.8, 0.02), Setting(1.5, min_p=0.1)]
    settings = [asked[i % 4]._replace(seed=i) for i in range(count)]
    rows, tables = tables_of(settings, "cuda")
    logits = random_numbers((count, VOCAB), dtype, "cuda", 5, 3.0)
    kernels = implementation.kernels
    kernels.cut(logits, torch.arange(count, dtype=torch.int32, device="cuda"), rows, tables, ALL)
    tokens, finite = kernels.sample(logits, rows, tables, None)
    assert bool(finite.all())
    for i in range(0, count, max(1, count // 12)):
        row, found = logits[i].cpu(), mask_by(tables, int(rows[i]), logits[i], settings[i])
        assert not (kept_mask(row, settings[i], -2e-6) & ~found).any(), settings[i]
        assert not (found & ~kept_mask(row, settings[i], 2e-6)).any(), settings[i]
        assert found[int(tokens[i])]
    if count == 40:
        same = [int(tokens[i]) == drawn(logits[i].cpu(), settings[i], VOCAB) for i in range(count)]
        assert sum(same) >= 36, "scores tie in the last bits of a logarithm but seldom"


@pytest.mark.parametrize("dtype", sharpest([BF16, F32]))
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


def test_a_share_in_integers_is_the_exact_product_rounded_up():
    source = torch.Generator().manual_seed(5)
    shares = (1 - torch.rand(4000, 1, generator=source)) ** torch.randint(1, 12, (4000, 1), generator=source)
    shares = shares.clamp(min=1e-30)
    shares[:4, 0] = torch.tensor([1.0, 1.0 - 2.0**-24, 0.5, 1e-30])
    shifts = torch.randint(0, 55, (4000, 1), generator=source)
    totals = torch.randint(1, 1 << 61, (4000, 1), generator=source) >> shifts
    found, rounded = share_in_integers(shares, totals), share_in_floats(shares, totals)
    pairs = zip(shares.flatten().tolist(), totals.flatten().tolist(), strict=True)
    assert found.flatten().tolist() == [math.ceil(Fraction(share) * total) for share, total in pairs]
    assert ((found - rounded).abs() <= 1 + (totals >> 52)).all()


@pytest.mark.process
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
