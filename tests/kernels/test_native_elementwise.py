"""Norms, rotation with KV write and the MLP's gate in C++, against float64 and plain torch."""

from __future__ import annotations

import pytest
import torch
from kernels.native_kernels import load_native
from torch.nn.functional import silu

from gapless.kernels import plain
from gapless.kernels.views import KV, Rotation, TokenBatch

EPS = 1e-6
TOLERANCE = {torch.float32: dict(rtol=1e-5, atol=1e-5), torch.bfloat16: dict(rtol=2**-8, atol=2**-8)}
"""Computed in float32 and rounded once: half a unit of bfloat16 is 2**-9 of the value."""
dtypes = pytest.mark.parametrize("dtype", TOLERANCE)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def normed(x, weight):
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


@dtypes
@pytest.mark.parametrize("size", [16, 40, 64, 100, 1024])
@pytest.mark.parametrize("rows", [1, 5, 100])
def test_rms_norms_equal_float64(dtype, size, rows):
    kernels = load_native()
    x, delta, weight = torch.randn(rows, size).to(dtype), torch.randn(rows, size).to(dtype), torch.rand(size).to(dtype)
    torch.testing.assert_close(kernels.rms_norm(x, weight, EPS).double(), normed(x, weight), **TOLERANCE[dtype])
    wanted = x + delta
    got = kernels.add_rms_norm(x, delta, weight, EPS)
    assert torch.equal(x, wanted)
    torch.testing.assert_close(got.double(), normed(wanted, weight), **TOLERANCE[dtype])


@dtypes
@pytest.mark.parametrize("size", [3, 16, 40, 512, 3072])
def test_silu_and_product_equal_float64(dtype, size):
    gate_up = torch.randn(7, 2 * size) * 4
    gate_up[0, 0], gate_up[1, 0] = 200.0, -200.0
    gate_up = gate_up.to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    torch.testing.assert_close(load_native().silu_mul(gate_up).double(), silu(gate) * up, **TOLERANCE[dtype])


@dtypes
@pytest.mark.parametrize("dim", [8, 20, 64, 80, 128])
@pytest.mark.parametrize("with_norm", [False, True])
def test_rotation_and_cache_writes_equal_the_reference(dtype, dim, with_norm):
    heads, kv_heads, layer = 4, 2, 2
    qkv = torch.randn(6, heads + 2 * kv_heads, dim).to(dtype)
    weight = torch.rand(heads + kv_heads, dim).to(dtype) if with_norm else None
    table = torch.randn(50, dim)
    positions, slots = torch.tensor([0, 3, 49, 70, 5, 6]), torch.tensor([0, 33, 17, 5, 60, 47])
    qk = qkv[:, : heads + kv_heads].double() if weight is None else normed(qkv[:, : heads + kv_heads], weight)
    cos, sin = table[positions.clamp(max=49)].double()[:, None].chunk(2, dim=-1)
    a, b = qk.chunk(2, dim=-1)
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    mine, cache = qkv.clone(), torch.zeros(4, 3, 2, 16, kv_heads, dim, dtype=dtype)
    rotation, tokens, pages = (
        Rotation(weight, EPS, table),
        TokenBatch(positions, slots),
        torch.empty(0, dtype=torch.int32),
    )
    load_native().rope_and_write(mine, rotation, KV(cache, layer, pages), tokens)
    size = float(turned.abs().max())
    torch.testing.assert_close(mine[:, : heads + kv_heads].double() / size, turned / size, **TOLERANCE[dtype])
    assert torch.equal(mine[:, heads + kv_heads :], qkv[:, heads + kv_heads :])
    written = cache[slots // 16, layer, :, slots % 16]
    assert torch.equal(written[:, 0], mine[:, heads:-kv_heads])
    assert torch.equal(written[:, 1], mine[:, -kv_heads:])
    assert cache.count_nonzero() == written.count_nonzero(), "something else was written"

    if dtype == torch.float32:
        reference, other = qkv.clone(), torch.zeros_like(cache)
        plain.rope_and_write(reference, rotation, KV(other, layer, pages), tokens)
        torch.testing.assert_close(mine, reference)
        torch.testing.assert_close(cache, other)


def test_a_weight_of_another_dtype_is_refused():
    """Read as what it is not, it would be read past its end."""
    with pytest.raises(RuntimeError, match="expected scalar type Float but found BFloat16"):
        load_native().rms_norm(torch.ones(1, 64), torch.ones(64, dtype=torch.bfloat16), EPS)
