"""The product on AMX, its tile operations emulated: against a direct computation in the same order, to the bit."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch.nn.functional import pad

SIZES = [(1, 2), (16, 7), (17, 64), (31, 30), (33, 34), (48, 96), (63, 100), (64, 256), (65, 127), (130, 1026)]
"""(outputs, inputs): around the vector of 16, the piece of 64, the pair and the tile of 32 inputs"""
ROWS = [1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 64, 65, 130]
MARGIN = 80
SMALLEST = 2.0**-126


@pytest.fixture(scope="module")
def library(emulated_amx):
    loaded = ctypes.CDLL(str(emulated_amx))
    loaded.packed_size.restype, loaded.product.restype = ctypes.c_int64, ctypes.c_char_p
    return loaded


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def among_nans(*shape: int) -> torch.Tensor:
    """A view of zeros; what is around it is NaN, so that a number read from there is seen."""
    *rows, columns = shape
    whole = torch.full((*rows, columns + 2 * MARGIN), torch.nan, dtype=torch.bfloat16)
    view = whole[..., MARGIN : MARGIN + columns]
    return view.zero_()


class Layer:
    """The emulated product with one weight, packed between NaNs."""

    def __init__(self, library, weight, bias=None):
        self.library, self.bias = library, bias
        self.outputs, self.inputs = weight.shape
        self.packed = among_nans(library.packed_size(*map(ctypes.c_int64, weight.shape)))
        library.pack_weight(*arguments(weight, self.outputs, self.inputs, self.packed))

    def __call__(self, x, threads=1):
        rows = among_nans(len(x), self.inputs + self.inputs % 2)
        rows[:, : self.inputs] = x
        out = among_nans(len(x) * self.outputs)
        around = [out.as_strided((MARGIN,), (1,), at) for at in (0, MARGIN + len(out))]
        shape = (self.packed, self.outputs, self.inputs, self.bias, out, threads)
        assert self.library.product(*arguments(rows, rows.stride(0), len(x), *shape)) == b""
        assert all(edge.isnan().all() for edge in around)
        return out.view(len(x), self.outputs).clone()


def arguments(*values):
    """For C: pointers of tensors, 64-bit integers."""
    return [
        ctypes.c_void_p(value if value is None else value.data_ptr()) if not isinstance(value, int) else
        ctypes.c_int64(value) for value in values
    ]  # fmt: skip


def made(outputs, inputs, rows):
    weight = (torch.randn(outputs, inputs) / inputs**0.5).bfloat16()
    return weight, torch.randn(outputs).bfloat16(), torch.randn(rows, inputs).bfloat16()


def flushed(x):
    return torch.where(x.abs() < SMALLEST, 0.0, x)


def direct(weight, bias, x):
    """In the order of TDPBF16PS: of each 32 inputs a chain of the even and one of the odd products, and their sum.

    float64 holds a product of bfloat16 numbers exactly, and its sum with a float32 number well enough that rounding the
    sum to float32 is the one rounding of a fused operation.
    """
    more = -weight.shape[1] % 32
    weight, x = (flushed(pad(matrix.double(), (0, more))) for matrix in (weight, x))
    sums = torch.zeros(len(x), len(weight))
    for start in range(0, weight.shape[1], 32):
        chains = []
        for first in (start, start + 1):
            chain = torch.zeros_like(sums)
            for i in range(first, start + 32, 2):
                chain = flushed((chain.double() + x[:, i, None] * weight[:, i]).float())
            chains.append(chain)
        sums = flushed(sums + flushed(chains[0] + chains[1]))
    return (sums if bias is None else sums + bias.float()).bfloat16()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
def test_the_sums_are_those_of_a_direct_computation(library, outputs, inputs, biased):
    weight, bias, x = made(outputs, inputs, max(ROWS))
    bias = bias if biased else None
    layer, want = Layer(library, weight, bias), direct(weight, bias, x)
    for rows in ROWS:
        assert torch.equal(layer(x[-rows:]), want[-rows:]), rows


def test_rows_at_once_are_each_row_alone(library):
    weight, bias, x = made(80, 70, 130)
    layer = Layer(library, weight, bias)
    alone = torch.cat([layer(row[None]) for row in x])
    for rows in range(1, 131):
        assert torch.equal(layer(x[:rows]), alone[:rows]), rows


def test_another_order_of_sums_gives_other_bits():
    """The direct computation tells the order of AMX from that of the vectors: else the tests above would say less."""
    weight, _, x = made(130, 1026, 130)
    chain = torch.zeros(130, 130)
    for i in range(1026):
        chain = (chain.double() + x[:, i, None].double() * weight[:, i].double()).float()
    assert not torch.equal(direct(weight, None, x), chain.bfloat16())


def test_denormal_numbers_are_zero(library):
    weight, _, x = made(40, 70, 20)
    weight, x = weight * 2.0**-60, x * 2.0**-63
    weight[:, :9], x[:, :9] = 2.0**-130, 2.0**30
    got, want = Layer(library, weight)(x), direct(weight, None, x)
    assert torch.equal(got, want)
    assert bool((want == 0).any()) and bool((want != 0).any())


def test_a_nan_stays_in_its_row(library):
    weight, _, x = made(64, 70, 40)
    layer = Layer(library, weight)
    clean = layer(x)
    x[3, 5], x[20, 69] = torch.nan, torch.inf
    got, others = layer(x), [row for row in range(40) if row not in (3, 20)]
    assert got[3].isnan().all() and not got[20].isfinite().any()
    assert torch.equal(got[others], clean[others])


def test_threads_give_the_same_bits(library):
    weight, bias, x = made(640, 448, 35)
    layer = Layer(library, weight, bias)
    assert torch.equal(layer(x, threads=3), layer(x))
