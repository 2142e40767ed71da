"""What `gapless doctor` measures of products and attention."""

from __future__ import annotations

import torch
from kernels.native_kernels import load_native

from gapless.kernels import native
from gapless.kernels.native.speeds import speeds


def test_the_peak_grows_with_the_threads_or_stays():
    """A machine that is busy gives a second thread nothing, but takes nothing either."""
    load_native()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = max(torch.ops.gapless.vector_peak() for _ in range(5))
    finally:
        torch.set_num_threads(before)
    # One addition and one multiplication of a register a cycle, at 0.1 GHz or more; two units of 5 GHz at most.
    assert 1e8 < alone < 64 * 2 * 5e9


def test_every_dtype_has_a_product_and_an_attention():
    load_native()
    found = speeds()
    assert [speed.dtype for speed in found] == list(native.DTYPES)
    for speed in found:
        assert speed.product_share > 0 and speed.attention_share > 0 and speed.product and speed.attention
