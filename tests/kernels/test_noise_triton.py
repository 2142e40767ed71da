"""Triton's noise, against the cipher in Python's own integers."""

from __future__ import annotations

import math

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

import triton
import triton.language as tl
from implementations import TRITON, runs
from sampling_oracle import WORD, philox

from gapless.kernels import sampling_triton


@triton.jit
def _noise_kernel(out, position, seed_low, seed_high, BLOCK: tl.constexpr):
    block = tl.arange(0, BLOCK)
    low, high = tl.load(seed_low).to(tl.uint32, bitcast=True), tl.load(seed_high).to(tl.uint32, bitcast=True)
    noise = sampling_triton.gumbel(block.to(tl.uint32), tl.load(position).to(tl.uint32), low, high)
    tl.store(out + block[:, None] * 4 + tl.arange(0, 4)[None, :], noise)


@runs("seed", [0, -1, 2**31, -(2**63), 0x1234_5678_9ABC_DEF0], on=TRITON)
@pytest.mark.parametrize("position", [0, 131_071])
def test_noise_equals_the_cipher_in_python(implementation, seed, position):
    """With logarithms in float64: a few units in the last place."""
    tokens, device = 256, implementation.device
    out, words = torch.empty(tokens, device=device), torch.tensor([seed]).view(torch.int32).to(device)
    place = torch.tensor([position], dtype=torch.int32, device=device)
    _noise_kernel[(1,)](out, place, words[:1], words[1:].clone(), tokens // 4)
    unsigned = seed % 2**64
    for token, value in enumerate(out.tolist()):
        bits = philox((token // 4, position, 0, 0), (unsigned & WORD, unsigned >> 32))[token % 4]
        uniform = min((float(torch.tensor(bits).float()) + 0.5) / 2**32, 1 - 2**-24)
        expected = -math.log(-math.log1p(-uniform))
        assert abs(value - expected) <= 1e-6 * max(1.0, abs(expected)), (token, value, expected)
