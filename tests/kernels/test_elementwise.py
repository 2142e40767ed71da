"""Norms, rotation with KV write and the MLP's gate, against direct computation in float64."""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple

import pytest
import torch
from implementations import F32, runs
from native_kernels import load_native
from products import normed, random
from torch import Tensor

from gapless.kernels.kinds import Activation
from gapless.kernels.views import KV, Rotation

# Half a unit in the last place, with room for float32 sums.
ROUNDING = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


FUNCTIONS = {
    Activation.SILU: lambda x: x * x.sigmoid(),
    Activation.GELU: lambda x: x * torch.special.ndtr(x),
    Activation.GELU_TANH: lambda x: x * (1 + ((2 / math.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh()) / 2,
    Activation.RELU: lambda x: x.clamp(min=0),
    Activation.RELU2: lambda x: x.clamp(min=0) ** 2,
}


def close(found: Tensor, expected: Tensor, room: int = 1) -> None:
    """`expected` is float64; errors are relative to the value or, where that is small, to one."""
    tolerance = room * ROUNDING[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)


@runs(
    "rows, width", [(1, 1), (2, 7), (3, 64), (5, 1000)], native=[(100, 40), (5, 1024)], interpreter=[(2, 4096)],
    cuda=[(257, 1024), (5, 2560), (64, 8192)],
)  # fmt: skip
def test_rms_norms_equal_float64(implementation, rows, width):
    for dtype in implementation.dtypes:
        x, weight, delta = (
            random(shape, kind, implementation.device, seed, spread)
            for seed, shape, kind, spread in (
                (1, (rows, width), dtype, 3.0), (2, (width,), F32, 1.0), (3, (rows, width), dtype, 1.0)
            )
        )  # fmt: skip
        before, total = delta.clone(), (x.double() + delta.double()).to(dtype)
        sum_ = x.clone()
        out = implementation.kernels.add_rms_norm(sum_, delta, weight, 1e-5)
        assert torch.equal(sum_, total), "the sum is rounded once"
        close(out, normed(total, weight, 1e-5))
        assert torch.equal(delta, before)
        # A sum that was not rounded first would differ in many places.
        assert (out != implementation.kernels.rms_norm(sum_, weight, 1e-5)).float().mean() < 0.02
        if rows > 1:
            x[0] = 0.0  # what an inert row may hold
            x[1] = 2e4  # its squares overflow float16
        close(implementation.kernels.rms_norm(x, weight, 1e-6), normed(x, weight, 1e-6))


@runs("rows, width", [(1, 3), (4, 512), (3, 1300)], native=[(7, 40), (7, 3072)], cuda=[(300, 1300), (64, 3072)])
def test_activations_of_every_kind_equal_float64(implementation, rows, width):
    for dtype, gated, (kind, function) in itertools.product(implementation.dtypes, (True, False), FUNCTIONS.items()):
        x = random((rows, 2 * width if gated else width), dtype, implementation.device, 4, 4.0)
        x[0, 0], x[0, 1], x[-1, -1] = -200.0, 60.0, torch.nan
        gelu = "GELU" in kind.name  # 1 + erf(x) of a negative x cancels
        gate, up = x.double().chunk(2, dim=-1) if gated else (x.double(), 1.0)
        close(implementation.kernels.activate(x, kind, gated), function(gate) * up, room=4 if gelu else 1)


@runs("rows, width", [(1, 1), (2, 7), (3, 1000)], native=[(100, 40), (5, 1024)], cuda=[(257, 1024), (5, 2560)])
def test_layer_norms_equal_float64(implementation, rows, width):
    for dtype, weighted, biased in itertools.product(implementation.dtypes, (True, False), (True, False)):
        x = random((rows, width), dtype, implementation.device, 1, 3.0) + 20  # a mean far from zero
        weight, bias = (random((width,), F32, implementation.device, seed) for seed in (2, 3))
        weight, bias = weight if weighted else None, bias if biased else None
        x[0] = 5.0  # without a deviation
        wide = [None if part is None else part.double() for part in (weight, bias)]
        want = torch.nn.functional.layer_norm(x.double(), (width,), *wide, 1e-5)
        close(implementation.kernels.layer_norm(x, weight, bias, 1e-5), want, room=4)


class RopeShape(NamedTuple):
    tokens: int
    heads: int
    kv_heads: int
    width: int
    page_size: int
    norm: bool
    layers: int = 3
    pages: int = 7


@runs(
    "shape",
    [
        RopeShape(tokens=1, heads=1, kv_heads=1, width=2, page_size=1, norm=False),
        RopeShape(tokens=9, heads=4, kv_heads=2, width=16, page_size=4, norm=True),
        RopeShape(tokens=6, heads=5, kv_heads=1, width=24, page_size=5, norm=False),
        RopeShape(tokens=3, heads=16, kv_heads=8, width=128, page_size=16, norm=True),
    ],
    native=[
        RopeShape(tokens=6, heads=4, kv_heads=2, width=width, page_size=16, norm=width > 20) for width in (20, 64, 80)
    ],
    cuda=[
        RopeShape(tokens=70, heads=16, kv_heads=8, width=128, page_size=16, norm=True),
        RopeShape(tokens=70, heads=32, kv_heads=4, width=80, page_size=32, norm=False),
    ],
)
def test_rotation_and_cache_writes_equal_float64(implementation, shape):
    """Every layer of a cache in turn: only the slots of this layer change, and they hold the rotated keys."""
    tokens, heads, kv_heads, width, page_size, norm, layers, pages = shape
    device, turned = implementation.device, heads + kv_heads
    for dtype in implementation.dtypes:
        generator = torch.Generator().manual_seed(5)
        angles = random((tokens, 2 * width), F32, device, 6)[:, width:]  # rows that are apart
        angles = angles if norm else angles[:1].expand(tokens, width)  # or all the same
        qk_norm = random((turned, width), F32, device, 7) if norm else None
        slots = distinct_slots(tokens, pages, page_size, generator).to(device)
        cache = random((pages, layers, 2, page_size, kv_heads, width), dtype, device, 8)
        for layer in range(layers):
            qkv = random((tokens, turned + kv_heads, width), dtype, device, 9 + layer)
            q_k, v = rotated(qkv[:, :turned], qk_norm, angles), qkv[:, turned:].clone()
            expected = cache.clone()
            before, kv = cache.clone(), KV(cache, layer, torch.empty(0, dtype=torch.int32, device=device))
            implementation.kernels.rope_and_write(qkv, Rotation(qk_norm, 1e-6, angles), kv, slots)
            close(qkv[:, :turned], q_k)
            assert torch.equal(qkv[:, turned:], v), "values stay as they are"
            for token, slot in enumerate(slots.tolist()):
                page, offset = divmod(slot, page_size)
                if page:
                    expected[page, layer, :, offset] = torch.stack((qkv[token, heads:turned], v[token]))
            assert torch.equal(cache[1:], expected[1:])
            assert torch.equal(cache[0, :, :, 1:], before[0, :, :, 1:]), (
                "inert tokens write the null page's first entry"
            )


@runs("tokens, width", [(1, 2), (70, 80)], cuda=[(300, 128)])
def test_angles_are_the_rows_of_a_table(implementation, tokens, width):
    table = random((50, width), F32, implementation.device, 6)
    positions = torch.randint(50, (tokens,), generator=torch.Generator().manual_seed(1)).to(implementation.device)
    positions[0] = 53  # an inert row past the end
    found = implementation.kernels.angles(positions, table)
    assert torch.equal(found, table[positions.clamp(max=49)])


def distinct_slots(tokens: int, pages: int, page_size: int, generator: torch.Generator) -> Tensor:
    """The last entry of a page, the first of the next, twice slot 0, and others that differ from them."""
    border = 2 * page_size
    others = [slot for slot in range(page_size, pages * page_size) if slot not in (border - 1, border)]
    order = torch.randperm(len(others), generator=generator).tolist()
    return torch.tensor([border - 1, border, 0, 0, *(others[i] for i in order)][:tokens])


def rotated(x: Tensor, qk_norm: Tensor | None, angles: Tensor) -> Tensor:
    x = x.double() if qk_norm is None else normed(x, qk_norm, 1e-6)
    cos, sin = angles.double()[:, None].chunk(2, dim=-1)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


def test_a_weight_of_another_dtype_is_refused():
    """Read as what it is not, it would be read past its end."""
    with pytest.raises(RuntimeError, match="expected scalar type Float but found BFloat16"):
        load_native().rms_norm(torch.ones(1, 64), torch.ones(64, dtype=torch.bfloat16), 1e-6)
