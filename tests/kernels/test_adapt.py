"""What adapters add to a product, against float64 token by token: in plain products, in layers of few rows, and
below the matrices of a model."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from implementations import BF16, F32, TRITON, Implementation, runs
from paged import LAYER, Heads, paged, unturned
from products import EPS, ROUNDING, close, gated
from torch import Tensor

from gapless.kernels import plain
from gapless.kernels.adapt import AdapterPart
from gapless.kernels.attention import decode_attention
from gapless.kernels.linear import TorchLinear
from gapless.kernels.seam import LayerProduct
from gapless.kernels.tiles import FewRowsTiles
from gapless.kernels.views import Attend, LayerRows

SHAPES = [(64, (48,), 16), (300, (96, 32, 32), 16), (1000, (200, 200), 32), (2100, (130,), 16)]
"""Inputs, outputs of each projection, rank"""
LAYER_SIZES = [(1024, (2048, 1024, 1024), 3072, 16), (896, (896, 128, 128), 2432, 16), (2048, (200, 100, 56), 1504, 64)]
"""Hidden size, columns of projections, middle, rank, on a GPU: some do not end where a tile does"""


def random_part(inputs: int, outputs: tuple[int, ...], rank: int, slots: int, dtype: torch.dtype) -> AdapterPart:
    """Tables of small numbers, whose slot 0 is zeros."""
    down = torch.randn(slots + 1, len(outputs) * rank, inputs) / inputs**0.5
    up = torch.randn(slots + 1, rank, sum(outputs))
    down[0], up[0] = 0, 0
    ends = tuple(sum(outputs[: i + 1]) for i in range(len(outputs)))
    return AdapterPart(down.to(dtype), up.to(dtype), ends)


def moved(part: AdapterPart, device: str, *more: Any) -> AdapterPart:
    return AdapterPart(part.down.to(device, *more), part.up.to(device, *more), part.ends)


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


def adapted(x: Tensor, y: Tensor, slots: Tensor, part: AdapterPart) -> Tensor:
    """float64 [T, out] on x's device; rows of slot 0 have y's numbers."""
    own, wanted = slots.cpu(), y.cpu().double()
    mine = own > 0
    wanted[mine] = by_definition(x.cpu()[mine], wanted[mine], own[mine], moved(part, "cpu"))
    return wanted.to(x.device)


def near(found: Tensor, wanted: Tensor) -> None:
    """Sums of rounded numbers about one or two in size."""
    tolerance = 2 * ROUNDING[found.dtype]
    torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


def random_weight(columns: int, depth: int) -> Tensor:
    return torch.randn(columns, depth) * depth**-0.5


def layer_of(weight: Tensor, bias: Tensor | None = None) -> TorchLinear:
    """A layer whose weight no device packs."""
    layer = TorchLinear(weight.double(), bias)
    layer.weight = weight
    return layer


def check_adapt(implementation: Implementation, dtype: torch.dtype, tokens: int, slots: int, seed: int) -> None:
    """Tokens of several adapters and of none, in any order."""
    torch.manual_seed(seed)
    device = implementation.device
    for inputs, outputs, rank in SHAPES:
        part = random_part(inputs, outputs, rank, slots, dtype)
        x, y = torch.randn(tokens, inputs).to(dtype), torch.randn(tokens, sum(outputs)).to(dtype)
        own = torch.randint(0, slots + 1, (tokens,))
        if seed % 2:
            own = own.sort().values  # blocks of one adapter, or of none
        wanted, found = by_definition(x, y, own, part), y.to(device)
        implementation.kernels.adapt(x.to(device), found, own.to(device), moved(part, device))
        error = (found.cpu().double() - wanted).abs().max().item()
        assert error < {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.15}[dtype], (inputs, outputs)
        assert torch.equal(found.cpu()[own == 0], y[own == 0])


@runs("tokens, slots", [(5, 3), (1, 1)], cpu=[(200, 8)], interpreter=[(33, 8)], cuda=[(32, 8), (1000, 4)], keep=1)
def test_tokens_get_the_sums_of_their_adapters(implementation, tokens, slots):
    for dtype in implementation.dtypes:
        for seed in range(2):
            check_adapt(implementation, dtype, tokens, slots, seed)


@runs(on=("interpreter",))
def test_tokens_get_the_sums_of_their_adapters_in_larger_blocks(implementation, monkeypatch):
    from gapless.kernels import adapt_triton

    monkeypatch.setattr(adapt_triton, "MANY_TOKENS", 64)
    check_adapt(implementation, F32, 70, 3, 0)


@runs()
def test_a_token_does_not_depend_on_the_adapters_of_others(implementation):
    for dtype in implementation.dtypes:
        torch.manual_seed(0)
        part = moved(random_part(300, (96, 32), 16, 4, F32), implementation.device, dtype)
        x, y = (torch.randn(20, width).to(implementation.device, dtype) for width in (300, 128))
        results = []
        for others in (0, 2, 4):
            own, found = torch.full((20,), others, device=implementation.device), y.clone()
            own[7] = 3
            implementation.kernels.adapt(x, found, own, part)
            results.append(found[7])
        assert all(torch.equal(results[0], other) for other in results[1:])


class LayerShape(NamedTuple):
    """A layer's sizes, as far as adapters beside its products can tell."""

    rows: int
    hidden: int
    projections: tuple[int, ...]
    """Columns of a product of the norm"""
    middle: int
    """Columns of the gates, and as many ups; inputs of the product that is added"""
    rank: int = 16


def real(*rows: int) -> list[LayerShape]:
    return [LayerShape(count, *sizes) for count in rows for sizes in LAYER_SIZES]


def ops_of(x: Tensor, slots: Tensor) -> Any:
    """Operations of few rows, whose terms of rows without an adapter, which no kernel may read, are NaN."""
    from gapless.kernels.few_rows import AdaptedOps

    class Poisoned(AdaptedOps):
        def _normed(self, weight, part):
            y, inner = super()._normed(weight, part)
            inner[slots == 0] = torch.nan
            return y, inner

        def add(self, y, product, norm):
            super().add(y, product, norm)
            self.left[0][:, slots == 0] = torch.nan
            return norm

    return Poisoned(x, rows_of(slots), EPS)


def rows_of(slots: Tensor) -> LayerRows:
    """Rows with adapters whose tokens and pages nothing reads."""
    return LayerRows(*[torch.empty(0)] * 4, adapters=slots)


def check_layer(dtype: torch.dtype, device: str, shape: LayerShape) -> None:
    """A layer's products with adapters of three slots and of none. What no row may read is NaN."""
    torch.manual_seed(0)
    rows, hidden, projections, middle, rank = shape
    own = torch.randint(0, 4, (rows,))
    own[-1], there = 3, torch.tensor([0, 1, 3, 4])[own]  # no row has slot 2
    parts = [random_part(n, out, rank, 5, dtype) for n, out in
             ((hidden, projections), (hidden, (middle, middle)), (middle, (hidden,)))]  # fmt: skip
    for part in parts:
        part.down[2], part.up[2], part.up[0], part.down[0] = torch.nan, torch.nan, torch.nan, torch.nan
        part.up.mul_(0.5)
    qkv, gate_up, down = [moved(part, device) for part in parts]
    wide = layer_of(
        random_weight(sum(projections), hidden).to(device, dtype), torch.randn(sum(projections)).to(device, dtype)
    )
    gates, back = (
        layer_of(random_weight(*size).to(device, dtype)) for size in ((2 * middle, hidden), (hidden, middle))
    )
    slots, norm = there.to(device), (torch.randn(hidden) * 0.3 + 1).to(device, dtype)
    x, y = torch.randn(rows, hidden).to(device, dtype), torch.randn(rows, middle).to(device, dtype)
    want_x = adapted(y, x.double() + y.double() @ back.weight.double().T, slots, down)

    ops = ops_of(x, slots)
    found = ops.product(ops.add(y, LayerProduct(back, down), norm), LayerProduct(wide, qkv))
    near(ops.x, want_x)
    want = ops.x.double() * torch.rsqrt(ops.x.double().square().mean(-1, keepdim=True) + EPS) * norm.double()
    near(ops.end(norm), want)
    normed = ops.end(norm).double()
    near(found, adapted(want, normed @ wide.weight.double().T + wide.bias.double(), slots, qkv))
    product = normed @ gates.weight.double().T
    near(ops.gated(norm, LayerProduct(gates, gate_up)), gated(adapted(want, product, slots, gate_up)))
    before = ops.x.double()
    ops.add(y, LayerProduct(back, down), norm)
    near(ops.x, adapted(y, before + y.double() @ back.weight.double().T, slots, down))
    assert ops.left is None and torch.equal(ops.x, ops.x) and ops.end(norm).isfinite().all()


@runs(
    "shape",
    [
        LayerShape(3, 80, (48,), 40, 32), LayerShape(1, 64, (40, 24), 48), LayerShape(2, 64, (40, 24), 48),
        LayerShape(7, 100, (70, 30, 30), 52), LayerShape(13, 48, (24, 24), 40),
    ],
    on=TRITON, keep=2, cuda=real(1, 3, 6, 32),
)  # fmt: skip
def test_a_layer_of_few_rows_has_the_sums_of_its_adapters(implementation, shape):
    for dtype in set(implementation.dtypes) - ({F32} if implementation.name == "cuda" else set()):  # it serves halves
        check_layer(dtype, implementation.device, shape)


@runs(on=("interpreter",))
def test_a_layer_in_parts_has_the_sums_of_its_adapters(implementation, monkeypatch):
    """Several shares of the inputs, several parts of the ranks, and several splits of the product."""
    from gapless.kernels import adapt_fused_triton, few_rows_triton

    monkeypatch.setattr(adapt_fused_triton, "MOST_INPUTS", {32: 512})
    monkeypatch.setattr(adapt_fused_triton, "HELD", 512)
    tiles = FewRowsTiles(64, 32, 1, 2, 3)
    monkeypatch.setattr(few_rows_triton, "choose_tiles", lambda *_: tiles)
    check_layer(F32, "cpu", LayerShape(5, 64, (40, 12, 12), 560, 32))


@runs("rows", on=TRITON, interpreter=[2, 5, 10], cuda=[2, 16, 32])
def test_a_row_does_not_depend_on_the_adapters_of_others(implementation, rows, monkeypatch):
    if implementation.name == "interpreter":
        from gapless.kernels import adapt_fused_triton

        monkeypatch.setattr(adapt_fused_triton, "MOST_HELD", 5)
    torch.manual_seed(0)
    device = implementation.device
    dtype = F32 if device == "cpu" else BF16
    qkv, down = (moved(random_part(n, out, 16, 4, dtype), device) for n, out in ((96, (44, 44)), (80, (96,))))
    wide, back = (layer_of(random_weight(*size).to(device, dtype)) for size in ((88, 96), (96, 80)))
    x, y, norm = (torch.randn(*size).to(device, dtype) for size in ((rows, 96), (rows, 80), (96,)))
    found = []
    for others in (0, 2, 3):
        slots, start = torch.full((rows,), others, device=device), x.clone()
        slots[0] = 3
        ops = ops_of(start, slots)
        added = ops.add(y, LayerProduct(back, down), norm)
        product = LayerProduct(wide, qkv)
        results = [ops.product(added, product), ops.x, ops.end(norm), ops.gated(norm, product)]
        found.append([result[0] for result in results])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@runs(
    "shape", [LayerShape(7, 80, (72, 24, 24), 40, 32), LayerShape(1, 64, (40, 24), 48)], on=TRITON,
    cuda=[LayerShape(rows, 2048, (2048, 512, 512), 4096) for rows in (1, 2, 33, 256)],
)  # fmt: skip
def test_a_joined_product_and_its_second_half_have_the_sums_of_adapters(implementation, shape):
    """Slot 2, which no row has, is NaN, and so are the lines of `up` that no row may read."""
    for dtype in implementation.dtypes:
        check_joined(implementation, dtype, shape)


def check_joined(implementation: Implementation, dtype: torch.dtype, shape: LayerShape) -> None:
    from gapless.kernels.joined_rows import JoinedOps, most_rows

    torch.manual_seed(shape.rows)
    device = implementation.device
    rows, hidden, projections, middle, rank = shape
    slots = torch.tensor([0, 1, 3, 4])[torch.randint(0, 4, (rows,))].to(device)
    slots[-1] = 3
    x, norm = torch.randn(rows, hidden).to(device, dtype), (torch.randn(hidden) * 0.3 + 1).to(device, dtype)
    ops, products = JoinedOps(torch.randn(rows, hidden).to(device, dtype), rows_of(slots), EPS), []
    for columns in (projections, (middle, middle), (hidden,)):
        part = random_part(hidden, columns, rank, 5, dtype)
        part.up[0] = part.up[2] = torch.nan
        part.down[2] = torch.nan
        wide = sum(columns)
        whole = torch.cat((random_weight(wide, hidden), part.down.view(-1, hidden).float())).to(device, dtype)
        bias = torch.cat((torch.randn(wide), torch.zeros(len(whole) - wide))).to(device, dtype)
        plain = layer_of(whole[:wide], bias[:wide])
        part = AdapterPart(whole[wide:].view(part.down.shape), part.up.to(device), part.ends)
        products.append(LayerProduct(plain, part))
        joint = ops.product(x, products[-1])
        near(joint.product, x.double() @ plain.weight.double().T + plain.bias.double())
        near(plain(x), joint.product.double())
        near(joint.inner[:, 3], x.double() @ part.down[3].double().T)
    apart = products[0]._replace(part=part._replace(down=part.down.clone()))
    assert [most_rows(products), most_rows([*products, apart])] == [256, 0]

    def wanted(product: LayerProduct) -> Tensor:
        """The sum, from the first half as it was rounded."""
        joint, part = ops.product(x, product), product.part
        total, (inner, own) = joint.product.double(), (joint.inner.double(), slots.tolist())
        for row in (row for row, slot in enumerate(own) if slot):
            sums = inner[row, own[row]].view(-1, rank)
            for one, begin, end in zip(sums, (0, *part.ends), part.ends, strict=False):
                total[row, begin:end] += one @ part.up[own[row], :, begin:end].double()
        return total

    near(ops.gated(x, products[1]), gated(wanted(products[1])))
    total = ops.x.double() + wanted(products[2])
    normed = ops.add(x, products[2], norm)
    near(ops.x, total)
    want = ops.x.double()
    near(normed, want * torch.rsqrt(want.square().mean(-1, keepdim=True) + EPS) * norm.double())


@runs(
    "heads, lengths", on=TRITON, interpreter=[(Heads(4, 2, 16), [9, 2, 16, 17, 5])],
    cuda=[(Heads(32, 8, 128), [700, 2, 16, 17, 255, 1100, 40] * 5)],
)  # fmt: skip
def test_joined_queries_keys_and_values_are_read_as_by_plain_torch(implementation, heads, lengths):
    """With adapters, rotated, written and read, beside plain torch in float32."""
    from gapless.kernels.joined_rows import JoinedOps, Joint

    device, dtype = implementation.device, F32 if implementation.device == "cpu" else BF16
    batch, scale = paged(heads, lengths, dtype=dtype, device=device), heads.dim**-0.5
    turn = unturned(heads, batch, True)
    columns = tuple(heads.dim * count for count in (heads.query, heads.kv, heads.kv))
    slots = torch.tensor([0, 1, 3])[torch.arange(len(lengths)) % 3].to(device)
    part = random_part(64, columns, 16, 3, dtype)
    part = AdapterPart(part.down.to(device), part.up.to(device) * 0.3, part.ends)
    flat = turn.qkv.flatten(1)
    both = torch.cat((flat, (torch.randn(len(lengths), 4 * 48) * 0.3).to(device, dtype)), dim=1)
    joint = Joint(both[:, : flat.shape[1]], both[:, flat.shape[1] :].view(len(lengths), 4, 48), slots, part.up)
    wide = batch._replace(cache=batch.cache.to(F32, copy=True))
    want = []
    for adds in (False, True):
        total = flat.to(F32, copy=True)
        for row, slot in enumerate(slots.tolist() if adds else ()):
            sums = joint.inner[row, slot].float().view(3, 16) if slot else torch.zeros(3, 16, device=device)
            for one, begin, end in zip(sums, (0, *part.ends), part.ends, strict=False):
                total[row, begin:end] += one @ part.up[slot, :, begin:end].float()
        qkv = total.view(turn.qkv.shape)
        plain.rope_and_write(qkv, turn.rotation, wide.kv, turn.slots)
        want.append(decode_attention(qkv[:, : heads.query], wide.kv, wide.batch, Attend(scale)))
    assert (want[0] - want[1]).abs().max() > 0.1, "adapters change what is read"
    rows = LayerRows(turn.slots, batch.batch, batch.cache, batch.page_table, slots)
    close(JoinedOps(flat, rows, EPS).attend(joint, turn.rotation, LAYER, Attend(scale)), want[1].double())
