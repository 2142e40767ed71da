"""What adapters add to a product, in float64 token by token, and tables for it."""

from __future__ import annotations

import torch
from torch import Tensor

from gapless.kernels.adapt import AdapterPart
from gapless.kernels.seam import Kernels

SHAPES = [(64, (48,), 16), (300, (96, 32, 32), 16), (1000, (200, 200), 32), (2100, (130,), 16)]
"""Inputs, outputs of each projection, rank"""


def random_part(inputs: int, outputs: tuple[int, ...], rank: int, slots: int, dtype: torch.dtype) -> AdapterPart:
    """Tables of small numbers, whose slot 0 is zeros."""
    down = torch.randn(slots + 1, len(outputs) * rank, inputs) / inputs**0.5
    up = torch.randn(slots + 1, rank, sum(outputs))
    down[0], up[0] = 0, 0
    ends = tuple(sum(outputs[: i + 1]) for i in range(len(outputs)))
    return AdapterPart(down.to(dtype), up.to(dtype), ends)


def by_definition(x: Tensor, y: Tensor, slots: Tensor, part: AdapterPart) -> Tensor:
    """float64 [T, out]."""
    wanted = y.double()
    for token, slot in enumerate(slots.tolist()):
        inner, begin = part.down[slot].double() @ x[token].double(), 0
        for number, end in enumerate(part.ends):
            mine = inner[number * part.rank : (number + 1) * part.rank]
            wanted[token, begin:end] += mine @ part.up[slot, :, begin:end].double()
            begin = end
    return wanted


def check_adapt(kernels: Kernels, dtype: torch.dtype, device: str, tokens: int, slots: int, seed: int) -> None:
    """Tokens of several adapters and of none, in any order."""
    torch.manual_seed(seed)
    for inputs, outputs, rank in SHAPES:
        part = random_part(inputs, outputs, rank, slots, dtype)
        x, y = torch.randn(tokens, inputs).to(dtype), torch.randn(tokens, sum(outputs)).to(dtype)
        own = torch.randint(0, slots + 1, (tokens,))
        if seed % 2:
            own = own.sort().values  # blocks of one adapter, or of none
        wanted, found = by_definition(x, y, own, part), y.to(device)
        there = AdapterPart(part.down.to(device), part.up.to(device), part.ends)
        kernels.adapt(x.to(device), found, own.to(device), there)
        error = (found.cpu().double() - wanted).abs().max().item()
        assert error < {torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.15}[dtype], (inputs, outputs)
        assert torch.equal(found.cpu()[own == 0], y[own == 0])


def check_alone(kernels: Kernels, dtype: torch.dtype, device: str) -> None:
    """A token's result does not depend on the adapters of the others."""
    torch.manual_seed(0)
    part = AdapterPart(*(t.to(device) for t in random_part(300, (96, 32), 16, 4, dtype)[:2]), (96, 128))
    x, y = torch.randn(20, 300).to(device, dtype), torch.randn(20, 128).to(device, dtype)
    results = []
    for others in (0, 2, 4):
        own, found = torch.full((20,), others, device=device), y.clone()
        own[7] = 3
        kernels.adapt(x, found, own, part)
        results.append(found[7])
    assert all(torch.equal(results[0], other) for other in results[1:])
