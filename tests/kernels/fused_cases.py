"""Norms, rotation and activation in Triton against direct computation in float64.

Run on the CPU in Triton's interpreter (tests/kernels/interpreted) and on a GPU (tests/gpu).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gapless.kernels import activation_triton, norm_triton, rope_triton

# Half a unit in the last place, with room for float32 sums.
ROUNDING = {torch.float32: 3e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def random(shape: tuple[int, ...], dtype: torch.dtype, device: str, seed: int = 0, spread: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * spread).to(dtype).to(device)


def close(found: Tensor, expected: Tensor) -> None:
    """`expected` is float64; errors are relative to the value or, where that is small, to one."""
    tolerance = ROUNDING[found.dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def check_rms_norm(device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight = random((rows, width), dtype, device, 1, 3.0), random((width,), dtype, device, 2)
    if rows > 1:
        x[0] = 0.0  # what an inert row may hold
        x[1] = 2e4  # its squares overflow float16
    close(norm_triton.triton_rms_norm(x, weight, 1e-6), normed(x, weight, 1e-6))


def check_add_rms_norm(device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    x, weight = random((rows, width), dtype, device, 1, 3.0), random((width,), dtype, device, 2)
    delta = random((rows, width), dtype, device, 3)
    total = (x.double() + delta.double()).to(dtype)
    before = delta.clone()
    out = norm_triton.triton_add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(x, total), "the sum is rounded once"
    close(out, normed(total, weight, 1e-5))
    assert torch.equal(delta, before)
    # A sum that was not rounded first would differ in many places.
    again = norm_triton.triton_rms_norm(x, weight, 1e-5)
    assert (out != again).float().mean() < 0.02


def check_silu_mul(device: str, dtype: torch.dtype, rows: int, width: int) -> None:
    x = random((rows, 2 * width), dtype, device, 4, 4.0)
    x[0, 0], x[0, 1] = -200.0, 200.0
    gate, up = x.double().chunk(2, dim=-1)
    close(activation_triton.triton_silu_mul(x), gate * gate.sigmoid() * up)


class RopeShape(NamedTuple):
    tokens: int
    heads: int
    kv_heads: int
    width: int
    page_size: int
    norm: bool
    layers: int = 3
    pages: int = 7
    max_len: int = 50


def check_rope_and_write(device: str, dtype: torch.dtype, shape: RopeShape) -> None:
    """Every layer of a cache in turn: only the slots of this layer change, and they hold the rotated keys."""
    tokens, heads, kv_heads, width, page_size, norm, layers, pages, max_len = shape
    generator = torch.Generator().manual_seed(5)
    table = random((max_len, width), torch.float32, device, 6)
    qk_norm = random((heads + kv_heads, width), dtype, device, 7) if norm else None
    positions = torch.randint(max_len, (tokens,), generator=generator)
    positions[0] = max_len + 3  # an inert row past the end
    slots = distinct_slots(tokens, pages, page_size, generator)
    positions, slots = positions.to(device), slots.to(device)
    cache = random((pages, layers, 2, page_size, kv_heads, width), dtype, device, 8)
    for layer in range(layers):
        qkv = random((tokens, heads + 2 * kv_heads, width), dtype, device, 9 + layer)
        q_k, v = rotated(qkv, qk_norm, positions, table, heads + kv_heads), qkv[:, heads + kv_heads :].clone()
        before = cache.clone()
        rope_triton.triton_rope_and_write(qkv, qk_norm, 1e-6, positions, table, slots, cache, layer)
        close(qkv[:, : heads + kv_heads], q_k)
        assert torch.equal(qkv[:, heads + kv_heads :], v), "values stay as they are"
        expected = before.clone()
        for token in range(tokens):
            page, offset = divmod(int(slots[token]), page_size)
            if page:
                expected[page, layer, 0, offset] = qkv[token, heads : heads + kv_heads]
                expected[page, layer, 1, offset] = v[token]
        assert torch.equal(cache[1:], expected[1:])
        assert torch.equal(cache[0, :, :, 1:], before[0, :, :, 1:]), "inert tokens write the null page's first entry"


def distinct_slots(tokens: int, pages: int, page_size: int, generator: torch.Generator) -> Tensor:
    """The last entry of a page, the first of the next, twice slot 0, and others that differ from them."""
    border = 2 * page_size
    others = [slot for slot in range(page_size, pages * page_size) if slot not in (border - 1, border)]
    order = torch.randperm(len(others), generator=generator).tolist()
    return torch.tensor([border - 1, border, 0, 0, *(others[i] for i in order)][:tokens])


def rotated(qkv: Tensor, qk_norm: Tensor | None, positions: Tensor, table: Tensor, turned: int) -> Tensor:
    x = qkv[:, :turned].double()
    if qk_norm is not None:
        x = normed(x, qk_norm, 1e-6)
    cos, sin = table[positions.clamp(max=table.shape[0] - 1)].double()[:, None].chunk(2, dim=-1)
    left, right = x.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)
