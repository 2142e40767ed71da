"""Products of large weights by stream K against float64, and layers of them against the general way."""

from __future__ import annotations

import pytest
import torch
from implementations import BF16, TRITON, runs
from products import EPS, Shape, close, expected, normed, operands, random
from products import gated as gated_by

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

from gapless.kernels import few_rows, stream, stream_triton
from gapless.kernels.arch import Arch
from gapless.kernels.linear import TorchLinear
from gapless.kernels.seam import LayerProduct
from gapless.kernels.tiles import StreamTiles
from gapless.kernels.views import LayerRows

# Blocks of one program and of several, a program with one unit and with several blocks, ragged ends.
CASES = [
    (Shape(5, 40, 96), StreamTiles(16, 16, 16, 1, 2, 2, 1)), (Shape(3, 40, 70), StreamTiles(16, 16, 32, 1, 2, 1, 1)),
    (Shape(17, 64, 64), StreamTiles(32, 16, 16, 1, 2, 2, 0)), (Shape(9, 100, 32), StreamTiles(16, 16, 32, 1, 2, 1, 1)),
    (Shape(2, 12, 128), StreamTiles(16, 16, 16, 1, 2, 1, 1)), (Shape(2, 20, 16), StreamTiles(16, 32, 16, 1, 2, 1, 1)),
]  # fmt: skip
REAL = [Shape(rows, *size) for rows in (2, 16, 17, 32) for size in ((6144, 4096), (4096, 12288), (1000, 1000))]


def check(device: str, dtype: torch.dtype, shape: Shape, tiles: StreamTiles | None) -> None:
    """Twice in a row: what the first leaves does not disturb the second, and both give the same."""
    x, layer, _ = operands(device, dtype, shape, True)
    norm, want = random((shape.columns,), torch.float32, device, 4, 0.3) + 1, expected(x, layer, None)
    x[0] = 0.0  # what an inert row may hold
    want, found = expected(x, layer, None), []
    for _ in range(2):
        plain, half = (x.new_full((shape.rows, shape.columns // part), float("nan")) for part in (1, 2))
        stream_triton.launch(x, layer.weight, layer.bias, plain, tiles=tiles)
        stream_triton.launch(x, layer.weight, layer.bias, half, gated=True, tiles=tiles)
        sums = random((shape.rows, shape.columns), dtype, device, 5)
        parts = stream_triton.launch(x, layer.weight, None, None, tiles=tiles)
        after = stream_triton.add_norm(sums, parts, shape.depth, layer.bias, norm, EPS, tiles=tiles)
        found.append((plain, half, sums, after))
    assert all(map(torch.equal, *found))
    plain, half, sums, after = found[0]
    close(plain, want)
    close(half, gated_by(want))
    close(sums, random((shape.rows, shape.columns), dtype, device, 5).double() + want)
    close(after, normed(sums, norm))


@runs("case", CASES, on=("interpreter",), keep=4)
def test_a_product_equals_the_direct_computation_when_programs_share_its_blocks(implementation, case):
    for dtype in implementation.dtypes:
        check("cpu", dtype, *case)


@runs("shape", REAL, on=("cuda",))
def test_a_product_of_a_real_size_equals_the_direct_computation(implementation, shape):
    check("cuda", BF16, shape, None)


@runs("shape", on=TRITON, interpreter=[Shape(3, 32, 32)], cuda=[Shape(20, 4096, 4096)])
def test_operations_of_a_layer_compute_the_same_as_those_of_few_rows(implementation, shape, monkeypatch):
    if implementation.name == "interpreter":
        monkeypatch.setattr(stream_triton, "choose_tiles", lambda *_: StreamTiles(16, 16, 16, 1, 2, 1, 0))
    x, layer, norm = operands(implementation.device, implementation.half, shape, True)
    rows, product, found = LayerRows(*[torch.empty(0)] * 4), LayerProduct(layer), []
    for make in (stream.StreamOps, few_rows.FewRowsOps):
        ops = make(x.clone(), rows, EPS)
        first = ops.product(ops.norm(norm), product)
        y = ops.add(ops.gated(ops.norm(norm), product).repeat(1, 2), product, norm)
        second = ops.gated(y, product)
        ops.add(first, product, norm)
        found.append((first, second, ops.x.clone(), ops.end(norm)))
    for one, other in zip(*found, strict=True):
        close(one / 8, other.double() / 8)


@runs(on=("cuda",))
def test_a_padded_batch_gives_the_same_bits(implementation):
    x, layer, _ = operands("cuda", BF16, Shape(16, 4096, 4096), False)
    whole = stream.stream_linear(x, layer.weight, None, False)
    assert torch.equal(stream.stream_linear(x[:9], layer.weight, None, False), whole[:9])


@runs(on=("cuda",))
def test_a_chain_as_one_graph_gives_the_bits_of_launches_that_begin_late(implementation):
    start = random((16, 4096), BF16, "cuda", 1)
    norm = random((4096,), torch.float32, "cuda", 2)
    wide, narrow = (random(shape, BF16, "cuda", 3, 0.02) for shape in ((24576, 4096), (4096, 12288)))

    def chain(early: bool) -> torch.Tensor:
        x, y = start * 1, start * 1
        for _ in range(20):
            half = x.new_empty(16, 12288)
            stream_triton.launch(y, wide, None, half, gated=True, early=early)
            parts = stream_triton.launch(half, narrow, None, None, early=early)
            y = stream_triton.add_norm(x, parts, 12288, None, norm, EPS, early=early)
        return x

    want = chain(False)
    assert want.isfinite().all() and torch.equal(chain(True), want)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(True)
    for _ in range(10):
        graph.replay()
        assert torch.equal(found, want)


@pytest.mark.parametrize("major, several", [(9, (32, 1)), (8, (0, 1)), (10, (0, 1))])
def test_models_with_large_weights_run_several_rows_by_stream_k_when_the_gpu_is_hopper(monkeypatch, major, several):
    gpu = Arch("nvidia", (major, 0), 132, 227 << 10)
    monkeypatch.setattr(few_rows, "arch", lambda device: gpu)

    def layer(columns: int, depth: int) -> LayerProduct:
        return LayerProduct(TorchLinear(torch.empty(columns, depth, dtype=torch.bfloat16, device="meta")))

    def most(*products: LayerProduct) -> tuple[int, int]:
        return stream.most_rows(products), few_rows.most_plain_rows(products)

    small = layer(4096, 4096)
    assert most(small, small) == (0, 32)
    assert most(small, layer(24576, 4096)) == several
    assert most(LayerProduct(lambda x, out=None: x), layer(24576, 4096)) == (0, 0)
