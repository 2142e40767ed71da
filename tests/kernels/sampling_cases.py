"""Sampling in Triton against torch, and its random words against the cipher in Python's own integers."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from fused_cases import random
from sampling_oracle import WORD, Setting, philox, tables_of
from torch import Tensor

from gapless.kernels import sampling_triton
from gapless.kernels.layout import LENGTH, SEED_HIGH, SEED_LOW
from gapless.kernels.random import gumbel
from gapless.kernels.sampling import sample as plain_sample
from gapless.kernels.tables import Tables


def tables(temperatures: list[float], device: str) -> tuple[Tensor, Tables]:
    """Rows and tables of as many requests; seeds use all 64 bits."""
    seeds = [int(seed_of(index * 0x9E3779B97F4A7C15 + 0x8000000180000001)) for index in range(len(temperatures))]
    made = [Setting(one, seed=seeds[i], length=7 * i + 3) for i, one in enumerate(temperatures)]
    return tables_of(made, device)


def seed_of(seed: int) -> int:
    """The same 64 bits with a sign."""
    return seed % 2**64 - (2**64 if seed % 2**64 >= 2**63 else 0)


def seed_words(seed: int) -> Tensor:
    return torch.tensor([seed_of(seed)]).view(torch.int32)


def draw(logits: Tensor, rows: Tensor, made: Tables) -> tuple[list[int], list[bool]]:
    before = logits.clone()
    tokens, finite = sampling_triton.sample(logits, rows, made, None)
    assert tokens.dtype == torch.int64 and finite.dtype == torch.bool
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True)
    return tokens.tolist(), finite.tolist()


def check_greedy(device: str, dtype: torch.dtype, rows: int, vocab: int) -> None:
    """The first of the best tokens, wherever the vocabulary is cut."""
    logits = random((rows, vocab), dtype, device, 1)
    for row in range(rows):
        first = (row * 517 + vocab // 2) % vocab
        for place in (vocab - 1, first, first + 1, first + 2, first + sampling_triton.SAMPLING_BLOCK):
            logits[row, min(place, vocab - 1)] = 9.0
    tokens, finite = draw(logits, *tables([0.0] * rows, device))
    values = logits.float().cpu().tolist()
    assert tokens == [line.index(max(line)) for line in values]
    assert all(finite)


def check_bad_logits(device: str, vocab: int) -> None:
    """Each fault alone, in the last place; the rows beside stay good. A token is always one of the vocabulary."""
    good = random((1, vocab), torch.float32, device, 2)
    faults = [good.clone() for _ in range(6)]
    faults[0][0, -1], faults[1][0, -1], faults[2][:] = math.nan, math.inf, -math.inf
    faults[3][:] = -math.inf
    faults[3][0, vocab // 2] = 1.0
    faults[4][:] = math.nan
    logits = torch.cat([good, *faults])
    for temperature in (0.0, 0.7):
        made = tables([temperature] * 7, device)
        tokens, finite = draw(logits, *made)
        assert finite == [True, False, False, False, True, False, True]
        assert tokens[4] == vocab // 2 and all(0 <= token < vocab for token in tokens)
        expected, _ = plain_sample(logits, *made)
        assert [tokens[0], tokens[6]] == [int(expected[0]), int(expected[6])]


def check_random(device: str, dtype: torch.dtype, rows: int, vocab: int, spread: float) -> float:
    """Share of rows whose token is torch's; where it is not, torch has the two within the last bits of each other."""
    logits = random((rows, vocab), dtype, device, 3, spread)
    temperatures = [(0.0, 1.0, 0.3, 1e-30, 2.5)[row % 5] for row in range(rows)]
    made = tables(temperatures, device)
    tokens, _ = draw(logits, *made)
    logits = logits.float()
    expected = plain_sample(logits, *made)[0].tolist()
    noise = noise_of(*made, vocab)
    for row, (token, other) in enumerate(zip(tokens, expected, strict=True)):
        scores = (logits[row] - logits[row].amax()) / (temperatures[row] or 1.0) + noise[row]
        doubt = 4e-6 * max(1.0, abs(float(noise[row, token])), abs(float(noise[row, other])))
        assert token == other or (temperatures[row] and abs(scores[token] - scores[other]) <= doubt), row
    cold = [row for row in range(rows) if not temperatures[row]]
    assert [tokens[row] for row in cold] == logits.argmax(-1)[cold].tolist()
    return sum(a == b for a, b in zip(tokens, expected, strict=True)) / rows


def noise_of(rows: Tensor, made: Tables, vocab: int) -> Tensor:
    position = made.state[rows, LENGTH].long()[:, None]
    return gumbel(None, vocab, position, made.params[rows, SEED_LOW : SEED_HIGH + 1])


def check_independence(device: str, count: int, vocab: int) -> None:
    """A row's token is the same alone and in batches that are cut otherwise."""
    logits = random((count, vocab), torch.float32, device, 4)
    rows, made = tables([1.0] * count, device)
    tokens, _ = draw(logits, rows, made)
    for part in (slice(0, 1), slice(3, 6), slice(count - 2, count)):
        again, _ = draw(logits[part].contiguous(), rows[part].contiguous(), made)
        assert again == tokens[part]


@triton.jit
def _noise_kernel(out, position, seed_low, seed_high, BLOCK: tl.constexpr):
    block = tl.arange(0, BLOCK)
    low, high = tl.load(seed_low).to(tl.uint32, bitcast=True), tl.load(seed_high).to(tl.uint32, bitcast=True)
    noise = sampling_triton.gumbel(block.to(tl.uint32), tl.load(position).to(tl.uint32), low, high)
    tl.store(out + block[:, None] * 4 + tl.arange(0, 4)[None, :], noise)


def check_noise(device: str, seed: int, position: int) -> None:
    """Against the cipher in Python and logarithms in float64: a few units in the last place."""
    tokens = 256
    out = torch.empty(tokens, device=device)
    words = seed_words(seed).to(device)
    where = torch.tensor([position], dtype=torch.int32, device=device)
    _noise_kernel[(1,)](out, where, words[:1], words[1:].clone(), tokens // 4)
    unsigned = seed % 2**64
    for token, value in enumerate(out.tolist()):
        bits = philox((token // 4, position, 0, 0), (unsigned & WORD, unsigned >> 32))[token % 4]
        uniform = min((float(torch.tensor(bits).float()) + 0.5) / 2**32, 1 - 2**-24)
        expected = -math.log(-math.log1p(-uniform))
        assert abs(value - expected) <= 1e-6 * max(1.0, abs(expected)), (token, value, expected)
