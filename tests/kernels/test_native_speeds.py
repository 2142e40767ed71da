"""What `gapless doctor` measures of products and attention."""

from __future__ import annotations

import torch
from kernels.native_kernels import load_native

from gapless.device import build
from gapless.kernels import native
from gapless.kernels.native.speeds import speeds


def test_the_kernels_are_compiled_for_all_of_this_processor():
    """The fallback to less of it is for old compilers: code that no compiler takes must not hide behind it."""
    load_native()
    assert build.outcomes[native.NAME].fallback == ""


def test_the_peak_is_one_that_a_processor_can_have():
    load_native()
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        peak = max(torch.ops.gapless.vector_peak() for _ in range(5))
    finally:
        torch.set_num_threads(before)
    # From four lanes, one multiply-add a cycle, at 0.1 GHz to sixteen lanes, two of them, at 6 GHz.
    assert 4 * 2 * 1e8 < peak < 16 * 4 * 6e9


def test_every_dtype_has_a_product_and_an_attention():
    load_native()
    found = speeds()
    assert [speed.dtype for speed in found] == list(native.NATIVE_DTYPES)
    for speed in found:
        assert speed.product_share > 0 and speed.attention_share > 0 and speed.product and speed.attention
