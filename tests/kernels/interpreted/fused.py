"""Norms, rotation and activation in Triton's interpreter; run by tests/kernels/test_fused_triton.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from fused_cases import RopeShape, check_add_rms_norm, check_rms_norm, check_rope_and_write, check_silu_mul

# exp(200) is infinite in numpy as on a GPU, and the result is right.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp")

DTYPES = [torch.float32, torch.float16]


@pytest.mark.parametrize("rows, width", [(1, 1), (2, 7), (3, 64), (5, 1000), (2, 4096)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norms_equal_float64(dtype, rows, width):
    check_rms_norm("cpu", dtype, rows, width)
    check_add_rms_norm("cpu", dtype, rows, width)


@pytest.mark.parametrize("rows, width", [(1, 3), (4, 512), (3, 1300)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_product_equal_float64(dtype, rows, width):
    check_silu_mul("cpu", dtype, rows, width)


@pytest.mark.parametrize(
    "shape",
    [
        RopeShape(tokens=1, heads=1, kv_heads=1, width=2, page_size=1, norm=False),
        RopeShape(tokens=9, heads=4, kv_heads=2, width=16, page_size=4, norm=True),
        RopeShape(tokens=6, heads=5, kv_heads=1, width=24, page_size=5, norm=False),
        RopeShape(tokens=3, heads=16, kv_heads=8, width=128, page_size=16, norm=True),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_and_cache_writes_equal_the_reference(dtype, shape):
    check_rope_and_write("cpu", dtype, shape)
