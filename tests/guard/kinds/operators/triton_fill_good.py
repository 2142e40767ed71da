"""triton_fill_bad, mended: it reads the half that is its own."""
# runs: process

import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl


@triton.jit
def double(source, target, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    tl.store(target + at, 2 * tl.load(source + at, mask=inside), mask=inside)


def launch(source, target, count):
    double[(triton.cdiv(count, 8),)](source, target, count, BLOCK=8)


x = torch.ones(64, device="cuda")
halves = torch.zeros(64, device="cuda")
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):
    launch(x, halves[32:], 32)
launch(x, halves, 32)  # the other half, and both only read x
total = halves[:32].sum()
