"""Measures products and attention against the peak of the processor's vector unit, for `gapless doctor`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch

from gapless.kernels import native
from gapless.kernels.native.choice import Way
from gapless.kernels.views import Attend

SPEED_TURNS = 5
PRODUCT_TOKENS, PRODUCT_WIDTH = 192, 1024
"""Rows of a product [PRODUCT_TOKENS, PRODUCT_WIDTH] @ [PRODUCT_WIDTH, PRODUCT_WIDTH], not bound by memory"""
PROMPT, ATTENTION_HEADS, ATTENTION_DIM, ATTENTION_PAGE = 512, 4, 128, 16


class Speed(NamedTuple):
    """The path of prompts in one dtype, and its speed: 1 is the peak of the vector unit in float32."""

    dtype: torch.dtype
    product: str
    product_share: float
    attention: str
    attention_share: float


def speeds() -> list[Speed]:
    """Measure each dtype, about 0.2 s in all. The operators are loaded."""
    unit, peak = torch.ops.gapless.vector_unit(), max(torch.ops.gapless.vector_peak() for _ in range(SPEED_TURNS))
    found = []
    for dtype in native.NATIVE_DTYPES:
        way = native.ways(dtype)[0]
        product = 2 * PRODUCT_TOKENS * PRODUCT_WIDTH**2 / _seconds(_product(dtype, way))
        attention = (
            2 * ATTENTION_HEADS * ATTENTION_DIM * PROMPT**2 / _seconds(_attention(dtype))
        )  # half of the pairs, two products
        attends = Way.FLOATS if way is Way.BF16_DOT and torch.ops.gapless.floats_attend(ATTENTION_DIM) else way
        names = (unit if one is Way.FLOATS else one.name.lower() for one in (way, attends))
        found.append(Speed(dtype, next(names), product / peak, next(names), attention / peak))
    return found


def _product(dtype: torch.dtype, way: Way) -> Callable[[], object]:
    packed = torch.ops.gapless.linear_pack.default(torch.ones(PRODUCT_WIDTH, PRODUCT_WIDTH, dtype=dtype))
    x = torch.ones(PRODUCT_TOKENS, PRODUCT_WIDTH, dtype=dtype)
    return partial(torch.ops.gapless.linear.default, x, packed, PRODUCT_WIDTH, None, way)


def _attention(dtype: torch.dtype) -> Callable[[], object]:
    """Return a call of the attention of one prompt."""
    pages = PROMPT // ATTENTION_PAGE
    q = torch.ones(PROMPT, ATTENTION_HEADS, ATTENTION_DIM, dtype=dtype)
    cache = torch.ones(pages, 1, 2, ATTENTION_PAGE, ATTENTION_HEADS, ATTENTION_DIM, dtype=dtype)
    table = torch.arange(pages, dtype=torch.int32)[None]
    row, starts, lens = torch.tensor([0]), torch.tensor([0, PROMPT]), torch.tensor([PROMPT])
    attend = torch.ops.gapless.prefill_attention.default
    return lambda: attend(q, cache, 0, table, None, row, starts, lens, None, *Attend(ATTENTION_DIM**-0.5), PROMPT)


def _seconds(call: Callable[[], object]) -> float:
    """Return the least time of a few calls, the first left out."""
    call()
    times = []
    for _ in range(SPEED_TURNS):
        start = perf_counter()
        call()
        times.append(perf_counter() - start)
    return min(times)
