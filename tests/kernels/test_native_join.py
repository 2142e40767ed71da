"""Native operators that write into a given tensor, or put two tensors together."""

import pytest
import torch

from gapless.kernels import native

if native.load() is None:
    pytest.skip("the C++ kernels are not built here", allow_module_level=True)

SHAPES = ((0, 3, 8), (1, 1, 5), (7, 300, 2048), (2048, 9, 1024))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
@pytest.mark.parametrize(("first", "second", "width"), SHAPES)
def test_join_puts_the_second_after_the_first(first, second, width, dtype):
    a, b = torch.randn(first, width).to(dtype), torch.randn(second, width).to(dtype)
    assert torch.equal(torch.ops.gapless.join(a, b), torch.cat((a, b)))


def test_join_refuses_what_does_not_fit():
    for a, b in (
        (torch.zeros(2, 3), torch.zeros(2, 4)),
        (torch.zeros(2, 3), torch.zeros(2, 3).bfloat16()),
        (torch.zeros(3, 2).t(), torch.zeros(2, 3)),
    ):
        with pytest.raises(RuntimeError, match="gapless"):
            torch.ops.gapless.join(a, b)


@pytest.mark.parametrize("rows", (1, 5, 40))
def test_a_product_in_place_has_the_bits_of_a_new_one(rows):
    product = native.NativeLinear(torch.randn(192, 65).bfloat16(), torch.randn(192).bfloat16())
    x, out = torch.randn(rows, 65).bfloat16(), torch.full((rows, 192), 7.0).bfloat16()
    assert product(x, out) is out
    assert torch.equal(out, product(x))
    for wrong in (out[:, :100].contiguous(), torch.empty(rows, 384).bfloat16()[:, ::2], out.float()):
        with pytest.raises(RuntimeError, match="another shape or dtype"):
            product(x, wrong)
