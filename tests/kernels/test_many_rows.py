"""Products of many rows in Triton against float64."""

from __future__ import annotations

import fused_reference
import pytest
import torch
from implementations import BF16, F32, TRITON, runs
from paged import LAYER, Heads, paged, unturned
from products import EPS, Shape, close, expected, operands, random
from products import gated as gated_by
from test_few_rows import check_chain
from torch import Tensor

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

from gapless.kernels import many_rows, many_rows_triton
from gapless.kernels.arch import Arch
from gapless.kernels.linear import TorchLinear
from gapless.kernels.many_rows_triton import Following, ManyRowsTiles, tiles_for
from gapless.kernels.seam import FusedRows
from gapless.kernels.views import Rotation

Product = tuple[Shape, ManyRowsTiles, bool]
"""Its shape, its tiles, and whether it has a bias"""
# Whole tiles and ragged ones.
WHOLE = Shape(32, 64, 64), ManyRowsTiles(32, 32, 32, 1, 2), False
RAGGED = Shape(37, 80, 72), ManyRowsTiles(16, 32, 32, 1, 2), True
DEEP = Shape(37, 40, 104), ManyRowsTiles(32, 16, 16, 1, 2), True
ROWS = [33, 64, 100, 128, 129, 256]
CHAINED = 40


@pytest.fixture(autouse=True)
def hopper(request):
    if "cuda" in request.node.name and torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a GPU of compute capability 9.0 or later")


def check_divided(device: str, dtype: torch.dtype, product: Product, gated: bool, early: bool) -> None:
    """A norm that the product finishes."""
    shape, tiles, biased = product
    x, layer, norm = operands(device, dtype, shape, biased)
    x[0] = 0.0  # what an inert row may hold
    squares = x.float().square().view(len(x), 4, -1).sum(-1)
    out = x.new_full((shape.rows, shape.columns // (2 if gated else 1)), float("nan"))
    many_rows_triton.launch(
        x * norm, layer.weight, layer.bias, out, tiles, squares=squares, eps=EPS, gated=gated, early=early
    )
    want = expected(x, layer, norm)
    if gated:
        want = gated_by(want)
    close(out, want)


def check_added(device: str, dtype: torch.dtype, product: Product, early: bool) -> None:
    """Twice in a row: what the first leaves behind does not disturb the second, and both give the same."""
    shape, tiles, biased = product
    y, layer, _ = operands(device, dtype, shape, biased)
    before = random((shape.rows, shape.columns), dtype, device, 5)
    norm = random((shape.columns,), dtype, device, 6)
    found = []
    for _ in range(2):
        x = before.clone()
        squares = torch.full((len(x), -(-shape.columns // tiles.columns)), float("nan"), device=device)
        following = Following(norm, torch.full_like(x, float("nan")), squares)
        many_rows_triton.launch(y, layer.weight, layer.bias, x, tiles, following=following, early=early)
        close(x, before.double() + expected(y, layer, None))
        assert torch.equal(following.scaled, x * norm)
        torch.testing.assert_close(squares.sum(1), x.float().square().sum(1))
        found += [x, squares]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


def check_operators(ours: FusedRows, device: str, dtype: torch.dtype, rows: int, width: int, inner: int) -> None:
    """Down, the next layer's gate_up, and the first product of all, with the tiles of the engine."""
    y, down, _ = operands(device, dtype, Shape(rows, width, inner), True)
    _, gate_up, norm = operands(device, dtype, Shape(rows, 2 * inner, width), True)
    x = random((rows, width), dtype, device, 5)
    want = x.double() + expected(y, down, None)
    found = ours.linear_add(x, y, down, norm)
    close(x, want)
    want = expected(x, gate_up, norm)
    close(ours.linear(found, EPS, gate_up), want)
    close(ours.silu_mul(found, EPS, gate_up), gated_by(want))
    close(ours.linear(ours.first(x, norm, EPS), EPS, gate_up), want)


def check_alone(device: str, dtype: torch.dtype, product: Product) -> None:
    """A row's result does not depend on its neighbours, nor on how many they are where the tiles are the same."""
    shape, tiles, biased = product
    y, layer, _ = operands(device, dtype, shape, biased)
    x = random((shape.rows, shape.columns), dtype, device, 5)
    found = []
    for rows, others in ((shape.rows, 1.0), (shape.rows, 3.0), (shape.rows - 1, 1.0)):
        out, changed = x[:rows].clone(), y[:rows] * others
        changed[:3] = y[:3]
        squares = torch.empty((rows, -(-shape.columns // tiles.columns)), device=device)
        following = Following(x[0], torch.empty_like(out), squares)
        many_rows_triton.launch(changed, layer.weight, layer.bias, out, tiles, following=following)
        found.append(torch.cat((out[:3].float(), squares[:3]), dim=1))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def check_decode(
    ours: FusedRows, device: str, dtype: torch.dtype, heads: Heads, lengths: list[int], norm: bool
) -> None:
    """Rotated, written and read, beside the same in float32 and plain torch; nothing else of the cache is written."""
    batch, scale = paged(heads, lengths, dtype=dtype, device=device), heads.dim**-0.5
    turn = unturned(heads, batch, norm)
    wide = batch._replace(cache=batch.cache.to(torch.float32, copy=True))
    rotation = Rotation(*(part.float() if isinstance(part, Tensor) else part for part in turn.rotation))
    qkv = turn.qkv.to(torch.float32, copy=True)
    want = fused_reference.MANY_ROWS.decode(qkv, rotation, wide.kv, turn.tokens, wide.batch, scale)
    before = batch.cache.clone()
    found = ours.decode(turn.qkv, turn.rotation, batch.kv, turn.tokens, batch.batch, scale)
    # Values of several times one are rounded when they are rotated, written and summed.
    close(found, want.double())
    torch.testing.assert_close(batch.cache.float(), wide.cache, rtol=2e-2, atol=2e-2, equal_nan=True)
    page, entry = turn.tokens.slots // batch.cache.shape[3], turn.tokens.slots % batch.cache.shape[3]
    for cache in (before, batch.cache):
        cache[page, LAYER, :, entry] = 0
    torch.testing.assert_close(batch.cache, before, rtol=0, atol=0, equal_nan=True)


@runs("product", [RAGGED, WHOLE], on=("interpreter",), keep=1)
def test_a_product_divided_by_a_norm_equals_the_direct_computation(implementation, product):
    for dtype in implementation.dtypes:
        for gated in (False, True):
            check_divided("cpu", dtype, product, gated, False)


@runs("product", [RAGGED, WHOLE, DEEP], on=("interpreter",), keep=1)
def test_a_product_added_to_the_residual_equals_the_direct_computation(implementation, product):
    for dtype in implementation.dtypes:
        check_added("cpu", dtype, product, False)


@runs("rows", on=("cuda",), cuda=ROWS)
@pytest.mark.parametrize("early", [False, True])
def test_products_of_a_real_size_equal_the_direct_computation(implementation, rows, early):
    for columns, depth, gated in ((4096, 1024, False), (6144, 1024, True), (1240, 1000, True), (200, 5000, False)):
        product = Shape(rows, columns, depth), tiles_for(rows, columns, gated), columns == 1240
        check_divided("cuda", BF16, product, gated, early)
    for columns, depth in ((1024, 2048), (1024, 3072), (4096, 1024), (80, 264)):
        check_added("cuda", BF16, (Shape(rows, columns, depth), tiles_for(rows, columns), columns == 80), early)


@runs("rows", on=TRITON, interpreter=[33, 70, 130], cuda=ROWS, keep=1)
def test_the_operators_compute_the_same_as_their_references(implementation, rows):
    if implementation.name == "cuda":
        check_operators(many_rows.MANY_ROWS, "cuda", BF16, rows, 1024, 3072)
    else:
        check_operators(many_rows.MANY_ROWS, "cpu", F32, rows, 64, 96)
        check_operators(fused_reference.MANY_ROWS, "cpu", F32, rows, 64, 96)


REAL = [
    (Shape(rows, columns, depth), tiles_for(rows, columns), False)
    for rows in (64, 128, 256)
    for columns, depth in ((4096, 1024), (1024, 3072))
]


@runs("product", on=TRITON, interpreter=[DEEP, WHOLE], cuda=REAL, keep=1)
def test_a_row_is_the_same_beside_any_neighbours(implementation, product):
    check_alone(implementation.device, F32 if implementation.name == "interpreter" else BF16, product)


@runs(
    "heads, lengths, norm", on=TRITON, keep=1,
    interpreter=[
        (heads, [1, 2, 16, 17, 70, *range(3, 40)], norm)
        for heads in (Heads(3, 1, 24), Heads(4, 2, 16))
        for norm in (True, False)
    ],
    cuda=[
        (heads, [1, *((2, 700, 16, 17, 255, 1100, 40)[i % 7] for i in range(rows - 1))], heads.dim == 128)
        for heads in (Heads(16, 8, 128), Heads(28, 4, 128), Heads(8, 2, 64))
        for rows in (33, 130, 256)
    ],
)  # fmt: skip
def test_decode_of_many_rows_equals_the_reference(implementation, heads, lengths, norm):
    """Rows whose neighbours begin pages, end them, and are one entry long."""
    for dtype in implementation.dtypes if implementation.name == "interpreter" else (BF16,):
        check_decode(many_rows.MANY_ROWS, implementation.device, dtype, heads, lengths, norm)


@runs("rows", on=("cuda",), cuda=[64, 256])
def test_a_chain_of_products_of_many_rows_is_one_graph(implementation, rows):
    """None reads the one before it too soon, however early it begins."""
    start, norm = random((rows, 1024), BF16, "cuda", 1), random((1024,), BF16, "cuda", 2)
    wide, narrow = (random(shape, BF16, "cuda", 3, 0.03) for shape in ((6144, 1024), (1024, 3072)))
    gated, added = tiles_for(rows, 6144, True), tiles_for(rows, 1024)

    def chain(early: bool) -> Tensor:
        x = start * 1
        scaled, squares = x * norm, x.float().square().view(rows, 16, -1).sum(-1)
        for _ in range(CHAINED):
            y = x.new_empty(rows, 3072)
            many_rows_triton.launch(scaled, wide, None, y, gated, squares=squares, eps=EPS, gated=True, early=early)
            left = Following(norm, torch.empty_like(x), squares.new_empty(rows, 1024 // added.columns))
            many_rows_triton.launch(y, narrow, None, x, added, following=left, early=early)
            scaled, squares = left.scaled, left.squares
        return x

    check_chain(chain, start)


@pytest.mark.parametrize(
    ("capability", "shared", "served"), [((9, 0), 227, True), ((12, 0), 99, False), ((8, 0), 163, False)], ids=str
)
def test_torch_multiplies_on_gpus_of_small_blocks_or_without_a_copy_engine(
    capability: tuple[int, int], shared: int, served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their tiles fit into large blocks alone, and the copy engine came with Hopper."""
    monkeypatch.setattr(many_rows, "arch", lambda device: Arch("nvidia", capability, 132, shared << 10))
    layer = TorchLinear(torch.empty(256, 256, dtype=torch.bfloat16, device="meta"))
    assert many_rows.MANY_ROWS.serves(layer) == served


def test_torch_multiplies_matrices_that_are_large_or_odd() -> None:
    """A large one does not run at once, the copy engine reads rows that begin at multiples of 16 bytes, and a tile is
    not wider than the matrix."""
    large = many_rows_triton.MOST_MANY_WEIGHT // 1024 + 1
    found = [
        many_rows_triton.serves(torch.empty(*shape, dtype=torch.bfloat16, device="meta"))
        for shape in ((6144, 1024), (large, 1024), (64, 1000), (64, 1001), (64, 64))
    ]
    assert found == [True, False, True, False, False]
