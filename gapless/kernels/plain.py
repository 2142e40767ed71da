"""Every operation in plain torch: what runs where nothing better does, and what the others are held against."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu

from gapless.base.records import Flag
from gapless.kernels.attention import decode_attention
from gapless.kernels.layout import (
    ACTIVE,
    COMPUTED,
    GENERATION,
    HEADER_WORDS,
    LENGTH,
    MAX_LEN,
    MAX_STEP_WORD,
    NO_TOKEN,
    OUTBOX_COLUMNS,
    PACKET_SLOT,
    PACKET_STEP,
    PAGE_WORDS,
    SEED_HIGH,
    SEED_LOW,
    STOP_IDS,
    TEMPERATURE,
)  # fmt: skip
from gapless.kernels.linear import Linear
from gapless.kernels.random import gumbel
from gapless.kernels.seam import DecodeBatch, FewRows, Kernels
from gapless.kernels.seam import Linear as AnyLinear


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.rms_norm(x, (x.shape[-1],), weight, eps)  # computed in float32 whatever the dtype of x


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x.add_(delta), weight, eps)


def rope_and_write(
    qkv: Tensor, qk_norm: Tensor | None, eps: float, positions: Tensor, table: Tensor, slots: Tensor, cache: Tensor,
    layer: int,
) -> None:  # fmt: skip
    page_size, kv_heads, head_dim = cache.shape[3:]
    qk = qkv[:, : qkv.shape[1] - kv_heads]
    # Queries and keys are normed and rotated together: the weight has a row for each head.
    normed = qk if qk_norm is None else torch.rms_norm(qk, (head_dim,), None, eps) * qk_norm
    qk.copy_(rotate(normed, *cos_sin(positions, table, qkv.dtype)))
    page, offset = slots // page_size, slots % page_size
    pairs = qkv[:, -2 * kv_heads :].view(-1, 2, kv_heads, head_dim)
    cache[:, layer].index_put_((page[:, None], torch.arange(2, device=page.device), offset[:, None]), pairs)


def cos_sin(positions: Tensor, table: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and signed sines, each [T, 1, head_dim], for `rotate`."""
    # An inert row's position means nothing and may lie past the end.
    rows = table.index_select(0, positions.clamp(max=table.shape[0] - 1)).to(dtype)[:, None]
    cos, sin = rows.chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [T, heads, head_dim]: x * cos + halves of x swapped * sin, whose left half carries the minus sign."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate) * up


def normed_linear(x: Tensor, norm: Tensor, eps: float, linear: AnyLinear) -> Tensor:
    return linear(rms_norm(x, norm, eps))


def normed_silu_mul(x: Tensor, norm: Tensor, eps: float, linear: AnyLinear) -> Tensor:
    return silu_mul(linear(rms_norm(x, norm, eps)))


def linear_add(x: Tensor, y: Tensor, linear: AnyLinear) -> None:
    x.add_(linear(y))


def decode(
    qkv: Tensor, qk_norm: Tensor | None, eps: float, positions: Tensor, table: Tensor, slots: Tensor, cache: Tensor,
    layer: int, page_table: Tensor, rows: Tensor, kv_lens: Tensor, scale: float,
) -> Tensor:  # fmt: skip
    rope_and_write(qkv, qk_norm, eps, positions, table, slots, cache, layer)
    return decode_attention(qkv[:, : -2 * cache.shape[4]], cache, layer, page_table, rows, kv_lens, scale)


def sample(logits: Tensor, rows: Tensor, state: Tensor, params: Tensor, random: bool) -> tuple[Tensor, Tensor]:
    logits = logits.float()
    best = logits.amax(-1, keepdim=True)
    finite, greedy = best.squeeze(1).isfinite(), logits.argmax(-1)
    if not random:
        return greedy, finite
    params = params.index_select(0, rows)
    temperature = params[:, TEMPERATURE : TEMPERATURE + 1].view(torch.float32)
    hot = temperature > 0
    # Distances from the best: no temperature, however small, makes these overflow.
    scores = (logits - best) / torch.where(hot, temperature, 1.0)
    position = state[:, LENGTH].index_select(0, rows).long()[:, None]
    drawn = (scores + gumbel(None, logits.shape[1], position, params[:, SEED_LOW : SEED_HIGH + 1])).argmax(-1)
    return torch.where(hot.squeeze(1), drawn, greedy), finite


def begin_decode(
    words: Tensor, count: int, writes: int, state: Tensor, history: Tensor, pages: Tensor, page_size: int
) -> DecodeBatch:
    rows = words[HEADER_WORDS : HEADER_WORDS + count].long()
    if writes:
        first = HEADER_WORDS + count
        pairs = words[first : first + PAGE_WORDS * writes].view(-1, PAGE_WORDS)
        pages.view(-1).index_copy_(0, pairs[:, 0].long(), pairs[:, 1].contiguous())
    lines = state.index_select(0, rows)
    active, positions = lines[:, ACTIVE].bool(), lines[:, COMPUTED].long()
    ids = history[rows, positions].long()
    slots = kv_slots(pages, rows, positions, active, page_size)
    return DecodeBatch(rows, ids, positions, slots, torch.where(active, positions + 1, 1))


def kv_slots(pages: Tensor, rows: Tensor, positions: Tensor, active: Tensor, page_size: int) -> Tensor:
    """[T] where each token's KV goes; slot 0, in the null page, for tokens of inert rows."""
    page = pages[rows, torch.div(positions, page_size, rounding_mode="floor")].long()
    return torch.where(active, page * page_size + positions % page_size, 0)


def finish(
    words: Tensor, rows: Tensor, sizes: Tensor | None, tokens: Tensor, finite: Tensor, state: Tensor, params: Tensor,
    history: Tensor, lines: Tensor,
) -> Tensor:  # fmt: skip
    count = tokens.shape[0]
    before = state.index_select(0, rows)
    active = before[:count, ACTIVE].bool()
    flags = _flags(tokens, finite, active, before[:count, LENGTH], params.index_select(0, rows[:count]))
    tokens = torch.where(active & finite, tokens, NO_TOKEN).int()
    generations = before[:count, GENERATION].clone()
    advance(rows, before, sizes, tokens, flags, state, history)
    _publish(words, torch.stack((rows[:count].int(), generations, tokens, flags), dim=1), lines)
    next_header(words, lines.shape[0])
    return tokens


def _flags(tokens: Tensor, finite: Tensor, active: Tensor, length: Tensor, params: Tensor) -> Tensor:
    flags = torch.where(length + 1 >= params[:, MAX_LEN], int(Flag.LENGTH), int(Flag.LIVE))
    flags = torch.where((params[:, STOP_IDS:] == tokens[:, None]).any(-1), int(Flag.STOP), flags)
    flags = torch.where(finite, flags, int(Flag.ERROR))
    return torch.where(active, flags, int(Flag.INERT)).int()


def advance(
    rows: Tensor, line: Tensor, sizes: Tensor | None, tokens: Tensor, flags: Tensor, state: Tensor, history: Tensor
) -> None:
    """Append tokens, move lengths, and make finished rows inert. `line` is the rows' state, and used up."""
    count, active = tokens.shape[0], line[:, ACTIVE]
    line[:, COMPUTED] += active if sizes is None else active * sizes.int()
    length, written = line[:count, LENGTH], tokens >= 0
    # A row without a token rewrites the null row's history, so that every index is in range; with a token that an
    # embedding takes, since the null row pads batches.
    place = torch.where(written, rows[:count], 0), torch.where(written, length, 0).long()
    history.index_put_(place, tokens.clamp(min=0))
    length += written.int()
    active[:count] *= (flags == int(Flag.LIVE)).int()
    state.index_copy_(0, rows, line)


def _publish(words: Tensor, table: Tensor, lines: Tensor) -> None:
    step, slot = words[PACKET_STEP : PACKET_STEP + 1], words[PACKET_SLOT : PACKET_SLOT + 1]
    count, zero = torch.full_like(step, table.shape[0]), torch.zeros_like(step)
    header = torch.stack((step, count, zero, zero), dim=1)
    out = torch.cat((header, table)).view(1, -1)
    lines[:, : (1 + table.shape[0]) * OUTBOX_COLUMNS].index_copy_(0, slot.long(), out)


def next_header(words: Tensor, slots: int) -> None:
    """The packet says the next step and its outbox: what a chain runs from, without another packet."""
    words[PACKET_STEP : PACKET_STEP + 1].add_(1).bitwise_and_(MAX_STEP_WORD)
    words[PACKET_SLOT : PACKET_SLOT + 1].add_(1).remainder_(slots)


KERNELS = Kernels(
    "torch", Linear, rms_norm, add_rms_norm, rope_and_write, silu_mul, None, None, sample, begin_decode, finish
)

FEW_ROWS = FewRows(32, normed_linear, normed_silu_mul, linear_add, decode)
"""What fused ones are held against. Here they gain nothing: KERNELS does without them."""
