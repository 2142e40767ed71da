"""Programs of random operators over a few buffers, each a function of its seed."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import Tensor

ROWS, WIDTH = 4, 8
Make = Callable[[Tensor, Tensor, Tensor, random.Random], Tensor]


def buffers(seed: int) -> list[Tensor]:
    """Two float tensors [4, 8], rows int64 [4], a cache bf16 [4, 8] and int32 state [4]."""
    generator = torch.Generator().manual_seed(seed)
    floats = [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(2)]
    rows = torch.randint(0, ROWS, (ROWS,), generator=generator)
    return [*floats, rows, torch.zeros(ROWS, WIDTH, dtype=torch.bfloat16), torch.arange(ROWS, dtype=torch.int32)]


def attention(a: Tensor, b: Tensor) -> Tensor:
    key = b[None, None]
    return torch.nn.functional.scaled_dot_product_attention(a[None, None], key, key)[0, 0]


MAKE: tuple[Make, ...] = (
    lambda a, b, rows, r: a + b * r.randrange(1, 4),
    lambda a, b, rows, r: a.mul(0.5).sub(1),
    lambda a, b, rows, r: torch.nn.functional.linear(a, b.T @ b),
    lambda a, b, rows, r: (a @ b.transpose(0, 1)) @ b,
    lambda a, b, rows, r: torch.cat([b[:, 4:], a[:, :4]], -1),
    lambda a, b, rows, r: torch.stack(a.split(4, -1)[::-1], 1).flatten(1),
    lambda a, b, rows, r: torch.cat([x.sigmoid() for x in b.chunk(2, 1)], 1),
    lambda a, b, rows, r: a.to(torch.bfloat16).float(),
    lambda a, b, rows, r: a.double().cumsum(-1).float(),
    lambda a, b, rows, r: torch.where(a > b, a, -b),
    lambda a, b, rows, r: a.index_select(0, rows),
    lambda a, b, rows, r: a[rows] + 1,
    lambda a, b, rows, r: a.clone().index_add_(0, rows, b, alpha=2),
    lambda a, b, rows, r: a.clone().index_put_((rows, rows), b[:, 0], accumulate=True),
    lambda a, b, rows, r: a.view(2, 2, WIDTH).permute(1, 0, 2).reshape(ROWS, WIDTH),
    lambda a, b, rows, r: a.softmax(-1) * b.amax(-1, keepdim=True),
    lambda a, b, rows, r: a.max(-1).indices.float()[:, None] + b,
    lambda a, b, rows, r: b.sort(-1).values.flip(0),
    lambda a, b, rows, r: b.topk(WIDTH, dim=-1).values.contiguous(),
    lambda a, b, rows, r: attention(a, b),
    lambda a, b, rows, r: a.masked_fill(a.isnan() | (b < 0), 0.25),
    lambda a, b, rows, r: torch.zeros_like(a).add_(torch.arange(WIDTH, dtype=torch.float32)).add_(b),
    lambda a, b, rows, r: a.gather(1, rows[:, None].expand(-1, WIDTH)) + b.scatter(0, rows[None].expand(1, -1), 0.5),
    lambda a, b, rows, r: torch.nn.functional.rms_norm(a, (WIDTH,)) - b.unsqueeze(1).squeeze(1),
    lambda a, b, rows, r: torch.clamp(a, min=-2, max=2).pow(2),
)  # fmt: skip


def random_program(seed: int) -> Callable[..., None]:
    """A program on what `buffers` gives, which it changes."""

    def program(first: Tensor, second: Tensor, rows: Tensor, cache: Tensor, state: Tensor) -> None:
        choose = random.Random(seed)
        known = [first, second]
        for _ in range(choose.randrange(3, 16)):
            a, b = choose.choice(known), choose.choice(known)
            made = choose.choice(MAKE)(a, b, rows, choose)
            known.append(made.clamp(-1e3, 1e3))
            _write(choose, known, rows, cache, state)
        first.copy_(known[-1])

    return program


def _write(choose: random.Random, known: list[Tensor], rows: Tensor, cache: Tensor, state: Tensor) -> None:
    value = known[-1]
    kind = choose.randrange(7)
    if kind == 0:
        cache.index_copy_(0, rows, value.to(cache.dtype))
    elif kind == 1:
        known.append(cache.float() + value)
    elif kind == 2:
        state[1:].add_(1)
        known.append(value + state[:, None])
    elif kind == 3:
        known[0][1:3].mul_(0.5)
    elif kind == 4:
        # In place on what an earlier operator made, through a view of it.
        value.view(-1)[::3].add_(1)
    elif kind == 5:
        rows.add_(state).remainder_(ROWS)
