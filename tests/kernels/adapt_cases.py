"""What adapters add to a product, in float64 token by token, and tables for it."""

from __future__ import annotations

from typing import NamedTuple

import fused_reference
import torch
from few_rows_cases import ROUNDING, close
from paged import Heads, paged, unturned
from torch import Tensor

from gapless.kernels import plain
from gapless.kernels.adapt import AdapterPart, Joint, Shrunk
from gapless.kernels.linear import TorchLinear
from gapless.kernels.seam import AdaptedRows, JoinedRows, Kernels
from gapless.kernels.views import KV, Rotation, TokenBatch

SHAPES = [(64, (48,), 16), (300, (96, 32, 32), 16), (1000, (200, 200), 32), (2100, (130,), 16)]
"""Inputs, outputs of each projection, rank"""
EPS = 1e-5


def random_part(inputs: int, outputs: tuple[int, ...], rank: int, slots: int, dtype: torch.dtype) -> AdapterPart:
    """Tables of small numbers, whose slot 0 is zeros."""
    down = torch.randn(slots + 1, len(outputs) * rank, inputs) / inputs**0.5
    up = torch.randn(slots + 1, rank, sum(outputs))
    down[0], up[0] = 0, 0
    ends = tuple(sum(outputs[: i + 1]) for i in range(len(outputs)))
    return AdapterPart(down.to(dtype), up.to(dtype), ends)


def by_definition(x: Tensor, y: Tensor, slots: Tensor, part: AdapterPart) -> Tensor:
    """float64 [T, out]."""
    wanted, x, down, up = y.double(), x.double(), part.down.double(), part.up.double()
    for token, slot in enumerate(slots.tolist()):
        inner, begin = down[slot] @ x[token], 0
        for number, end in enumerate(part.ends):
            mine = inner[number * part.rank : (number + 1) * part.rank]
            wanted[token, begin:end] += mine @ up[slot, :, begin:end]
            begin = end
    return wanted


def check_adapt(kernels: Kernels, dtype: torch.dtype, device: str, tokens: int, slots: int, seed: int) -> None:
    """Tokens of several adapters and of none, in any order."""
    torch.manual_seed(seed)
    for inputs, outputs, rank in SHAPES:
        part = random_part(inputs, outputs, rank, slots, dtype)
        x, y = torch.randn(tokens, inputs).to(dtype), torch.randn(tokens, sum(outputs)).to(dtype)
        own = torch.randint(0, slots + 1, (tokens,))
        if seed % 2:
            own = own.sort().values  # blocks of one adapter, or of none
        wanted, found = by_definition(x, y, own, part), y.to(device)
        there = AdapterPart(part.down.to(device), part.up.to(device), part.ends)
        kernels.adapt(x.to(device), found, own.to(device), there)
        error = (found.cpu().double() - wanted).abs().max().item()
        assert error < {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.15}[dtype], (inputs, outputs)
        assert torch.equal(found.cpu()[own == 0], y[own == 0])


def check_alone(kernels: Kernels, dtype: torch.dtype, device: str) -> None:
    """A token's result does not depend on the adapters of the others."""
    torch.manual_seed(0)
    part = AdapterPart(*(t.to(device) for t in random_part(300, (96, 32), 16, 4, dtype)[:2]), (96, 128))
    x, y = torch.randn(20, 300).to(device, dtype), torch.randn(20, 128).to(device, dtype)
    results = []
    for others in (0, 2, 4):
        own, found = torch.full((20,), others, device=device), y.clone()
        own[7] = 3
        kernels.adapt(x, found, own, part)
        results.append(found[7])
    assert all(torch.equal(results[0], other) for other in results[1:])


class FewShape(NamedTuple):
    """A layer's sizes, as far as adapters beside products of few rows can tell."""

    rows: int
    hidden: int
    projections: tuple[int, ...]
    """Columns of a product of the norm"""
    middle: int
    """Columns of the gates, and as many ups; inputs of the product that is added"""
    rank: int = 16


def check_few(ways: AdaptedRows, dtype: torch.dtype, device: str, shape: FewShape, seed: int = 0) -> None:
    """A layer's products with adapters of three slots and of none. What no row may read is NaN."""
    torch.manual_seed(seed)
    rows, hidden, projections, middle, rank = shape
    own = torch.randint(0, 4, (rows,))
    own[-1], there = 3, torch.tensor([0, 1, 3, 4])[own]  # no row has slot 2
    parts = [random_part(n, out, rank, 5, dtype) for n, out in
             ((hidden, projections), (hidden, (middle, middle)), (middle, (hidden,)))]  # fmt: skip
    for part in parts:
        part.down[2], part.up[2], part.up[0], part.down[0] = torch.nan, torch.nan, torch.nan, torch.nan
        part.up.mul_(0.5)
    layers = [TorchLinear(w.double(), b) for w, b in
              ((random_weight(sum(projections), hidden), torch.randn(sum(projections)).to(dtype)),
               (random_weight(2 * middle, hidden), None), (random_weight(hidden, middle), None))]  # fmt: skip
    for layer in layers:
        layer.weight = layer.weight.to(dtype).to(device)
        layer.bias = None if layer.bias is None else layer.bias.to(device)
    qkv, gate_up, down = [AdapterPart(part.down.to(device), part.up.to(device), part.ends) for part in parts]
    slots, norm = there.to(device), (torch.randn(hidden) * 0.3 + 1).to(device, dtype)
    x, y = torch.randn(rows, hidden).to(device, dtype), torch.randn(rows, middle).to(device, dtype)
    want_x = adapted(y, x.double() + y.double() @ layers[2].weight.double().T, slots, down)

    left = ways.linear_add(x, y, layers[2], slots, down)
    left.inner[:, slots == 0] = torch.nan
    x, normed, inner = ways.norm(x, left, norm, EPS, slots, qkv)
    assert inner is not None
    inner.inner[:, slots == 0] = torch.nan
    near(x, want_x)
    want = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + EPS) * norm.double()
    near(normed, want)
    wide = normed.double() @ layers[0].weight.double().T + layers[0].bias.double()
    near(ways.linear(normed, inner, layers[0]), wide if ways.rotate else adapted(want, wide, slots, qkv))

    same, normed, inner = ways.norm(x, None, norm, EPS, slots, gate_up)
    assert torch.equal(same, x) and inner is not None
    inner.inner[:, slots == 0] = torch.nan
    product = normed.double() @ layers[1].weight.double().T
    if ways.rotate:  # what adapters add comes to the rounded product
        rounded = ways.linear(normed, inner, layers[1])
        near(rounded, product)
        product = rounded.double()
    wide = adapted(want, product, slots, gate_up)
    near(ways.silu_mul(normed, inner, layers[1]), wide[:, :middle] * wide[:, :middle].sigmoid() * wide[:, middle:])
    last, again, nothing = ways.norm(x, left, norm, EPS, slots, None)
    near(last, adapted(y, x.double(), slots, down))
    assert nothing is None and again.isfinite().all()


class RotatedShape(NamedTuple):
    rows: int
    heads: int
    kv_heads: int
    head_dim: int
    rank: int = 16


def check_rotated(ways: AdaptedRows, dtype: torch.dtype, device: str, shape: RotatedShape) -> None:
    """Queries, keys and values with adapters of three slots and of none. What no row may read is NaN."""
    torch.manual_seed(shape.rows)
    rows, heads, kv_heads, width, rank = shape
    columns = (heads * width, kv_heads * width, kv_heads * width)
    slots = torch.tensor([0, 1, 3, 4])[torch.randint(0, 4, (rows,))]  # no row has slot 2
    slots[-1] = 4
    part = random_part(64, columns, rank, 5, dtype)
    part.up[0] = part.up[2] = torch.nan
    inner = torch.randn(1, rows, 3 * rank) * 0.3
    given = torch.randn(rows, sum(columns)).to(dtype)
    wide = given.double()
    for row, slot in enumerate(slots.tolist()):
        sums = inner[0, row].double().view(3, rank)
        up = part.up[slot].double().split(columns, dim=1)
        if slot > 0:
            wide[row] += torch.cat([one @ lines for one, lines in zip(sums, up, strict=True)])
    inner[:, slots == 0] = torch.nan
    moved = AdapterPart(part.down.to(device), part.up.to(device), part.ends)
    own = Shrunk(inner.to(device), slots.to(device), moved)
    table, weights = torch.randn(30, width), torch.randn(heads + kv_heads, width).to(dtype)
    batch = TokenBatch(torch.randint(0, 30, (rows,)), torch.arange(rows) + 4)
    there = TokenBatch(*(tensor.to(device) for tensor in batch))
    pages = torch.zeros(0, dtype=torch.int32)
    want_cache = torch.zeros(rows // 4 + 2, 2, 2, 4, kv_heads, width, dtype=torch.float64)
    cache = want_cache.to(device, dtype)
    assert ways.rotate is not None
    for qk_norm in (weights, None):
        want, found = wide.clone().view(rows, -1, width), given.view(rows, -1, width).to(device, copy=True)
        scale = None if qk_norm is None else qk_norm.double()
        plain.rope_and_write(want, Rotation(scale, EPS, table), KV(want_cache, 1, pages), batch)
        scale = None if qk_norm is None else qk_norm.to(device)
        ways.rotate(found, own, Rotation(scale, EPS, table.to(device)), KV(cache, 1, pages.to(device)), there)
        turned = heads + kv_heads
        near(found[:, :turned].cpu(), want[:, :turned])
        near(cache.cpu(), want_cache)


def check_joined(ways: JoinedRows, dtype: torch.dtype, device: str, shape: FewShape) -> None:
    """Products with the first halves of adapters of three slots and of none, and what adds the second halves. Slot 2,
    which no row has, is NaN, and so are the lines of `up` that no row may read."""
    torch.manual_seed(shape.rows)
    rows, hidden, projections, middle, rank = shape
    slots = torch.tensor([0, 1, 3, 4])[torch.randint(0, 4, (rows,))].to(device)
    slots[-1] = 3
    x, norm = torch.randn(rows, hidden).to(device, dtype), (torch.randn(hidden) * 0.3 + 1).to(device, dtype)
    joints = []
    for columns in (projections, (middle, middle), (hidden,)):
        part = random_part(hidden, columns, rank, 5, dtype)
        part.up[0] = part.up[2] = torch.nan
        part.down[2] = torch.nan
        wide, size = sum(columns), sum(columns) + part.down.numel() // hidden
        whole = torch.cat((random_weight(wide, hidden), part.down.view(-1, hidden).float())).to(device, dtype)
        bias = torch.cat((torch.randn(wide), torch.zeros(size - wide))).to(device, dtype)[:wide]
        layer = TorchLinear(whole[:wide].double(), bias)
        layer.weight = whole[:wide]
        part = AdapterPart(whole[wide:].view(part.down.shape), part.up.to(device), part.ends)
        joint = ways.linear(x, layer, slots, part)
        near(joint.product, x.double() @ layer.weight.double().T + bias.double())
        near(layer(x), joint.product.double())
        near(joint.inner[:, 3], x.double() @ part.down[3].double().T)
        joints.append(joint)

    def wanted(joint: Joint) -> Tensor:
        """The sum, from the first half as it was rounded."""
        total, (inner, own) = joint.product.double(), (joint.inner.double(), slots.tolist())
        for row in (row for row, slot in enumerate(own) if slot):
            sums = inner[row, own[row]].view(-1, rank)
            begins = (0, *joint.part.ends)
            for one, begin, end in zip(sums, begins, joint.part.ends, strict=False):
                total[row, begin:end] += one @ joint.part.up[own[row], :, begin:end].double()
        return total

    gate, up = wanted(joints[1]).split(middle, dim=1)
    near(ways.silu_mul(joints[1]), gate * gate.sigmoid() * up)
    start = torch.randn(rows, hidden).to(device, dtype)
    total = start.double() + wanted(joints[2])
    normed = ways.add_rms_norm(start, joints[2], norm, EPS)
    near(start, total)
    want = start.double()
    near(normed, want * torch.rsqrt(want.square().mean(-1, keepdim=True) + EPS) * norm.double())


def check_joined_decode(ways: JoinedRows, dtype: torch.dtype, device: str, heads: Heads, lengths: list[int]) -> None:
    """Queries, keys and values with adapters, rotated, written and read, beside plain torch in float32."""
    batch, scale = paged(heads, lengths, dtype=dtype, device=device), heads.dim**-0.5
    turn, columns = (
        unturned(heads, batch, True),
        tuple(heads.dim * count for count in (heads.query, heads.kv, heads.kv)),
    )
    slots = torch.tensor([0, 1, 3])[torch.arange(len(lengths)) % 3].to(device)
    part = random_part(64, columns, 16, 3, dtype)
    part = AdapterPart(part.down.to(device), part.up.to(device) * 0.3, part.ends)
    flat = turn.qkv.flatten(1)
    both = torch.cat((flat, (torch.randn(len(lengths), 4 * 48) * 0.3).to(device, dtype)), dim=1)
    joint = Joint(both[:, : flat.shape[1]], both[:, flat.shape[1] :].view(len(lengths), 4, 48), slots, part)
    wide = batch._replace(cache=batch.cache.to(torch.float32, copy=True))
    rotation = Rotation(*(value.float() if isinstance(value, Tensor) else value for value in turn.rotation))
    exact = Joint(
        joint.product.float(), joint.inner.float(), slots, AdapterPart(*(t.float() for t in part[:2]), part.ends)
    )
    want = fused_reference.JOINED_ROWS.decode(exact, rotation, wide.kv, turn.tokens, wide.batch, scale)
    bare = fused_reference.decode(turn.qkv.float(), rotation, wide.kv, turn.tokens, wide.batch, scale)
    assert (bare - want).abs().max() > 0.1, "adapters change what is read"
    found = ways.decode(joint, turn.rotation, batch.kv, turn.tokens, batch.batch, scale)
    close(found, want.double())


def check_few_alone(ways: AdaptedRows, dtype: torch.dtype, device: str, rows: int) -> None:
    """A row's results do not depend on what adapters the others have, also where they have none."""
    torch.manual_seed(0)
    first = random_part(96, (44, 44), 16, 4, dtype)
    second = random_part(80, (96,), 16, 4, dtype)
    qkv, down = [AdapterPart(part.down.to(device), part.up.to(device), part.ends) for part in (first, second)]
    wide, back = (TorchLinear(random_weight(*size).double(), None) for size in ((88, 96), (96, 80)))
    for layer in (wide, back):
        layer.weight = layer.weight.to(device, dtype)
    x, y, norm = (torch.randn(*size).to(device, dtype) for size in ((rows, 96), (rows, 80), (96,)))
    found = []
    for others in (0, 2, 3):
        slots, start = torch.full((rows,), others, device=device), x.clone()
        slots[0] = 3
        left = ways.linear_add(start, y, back, slots, down)
        changed, normed, inner = ways.norm(start, left, norm, EPS, slots, qkv)
        assert inner is not None
        results = [changed, normed, ways.linear(normed, inner, wide), ways.silu_mul(normed, inner, wide)]
        found.append([result[0] for result in results])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


def random_weight(columns: int, depth: int) -> Tensor:
    return torch.randn(columns, depth) * depth**-0.5


def adapted(x: Tensor, y: Tensor, slots: Tensor, part: AdapterPart) -> Tensor:
    """float64 [T, out] on x's device; rows of slot 0 have y's numbers."""
    own = slots.cpu()
    wanted = y.cpu().double()
    mine = own > 0
    moved = AdapterPart(part.down.cpu(), part.up.cpu(), part.ends)
    wanted[mine] = by_definition(x.cpu()[mine], wanted[mine], own[mine], moved)
    return wanted.to(x.device)


def near(found: Tensor, wanted: Tensor) -> None:
    """Sums of rounded numbers about one or two in size."""
    tolerance = 2 * ROUNDING[found.dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)
