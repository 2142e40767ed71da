"""Every operation in plain torch: the fallback, and the reference of the other implementations. It fuses no further
operations, which would gain nothing here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import gelu, pad, silu

from gapless.base.records import NO_TOKEN, Flag
from gapless.kernels import attention
from gapless.kernels import layout as L
from gapless.kernels.drafts import accept, drafts_of, look_up
from gapless.kernels.kinds import Activation, WeightKind
from gapless.kernels.kv import write
from gapless.kernels.linear import TorchLinear
from gapless.kernels.sampling import cut, sample
from gapless.kernels.scores import score
from gapless.kernels.seam import DecodeBatch, Kernels
from gapless.kernels.tables import Tables
from gapless.kernels.views import KV, Counts, Rotation


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return torch.layer_norm(x.float(), (x.shape[-1],), weight, bias, eps).to(x.dtype)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x.add_(delta), weight, eps)


def angles(positions: Tensor, table: Tensor) -> Tensor:
    return table.index_select(0, positions.clamp(max=table.shape[0] - 1))


def rope_and_write(qkv: Tensor, rotation: Rotation, kv: KV, slots: Tensor) -> None:
    qk_norm, eps, angles = rotation
    page_size, kv_heads, head_dim = *kv.cache.shape[3:5], qkv.shape[2]
    qk = qkv[:, : qkv.shape[1] - kv_heads]
    # Queries and keys are normed and rotated together: the weight has a row for each head.
    normed = qk.float() if qk_norm is None else torch.rms_norm(qk.float(), (head_dim,), None, eps) * qk_norm
    qk.copy_(rotate(normed, *cos_sin(angles)))
    if kv.scales is not None:
        write(kv, slots, *qkv[:, -2 * kv_heads :].chunk(2, 1))
        return
    page, offset = slots // page_size, slots % page_size
    pairs = qkv[:, -2 * kv_heads :].view(-1, 2, kv_heads, head_dim)
    kv.cache[:, kv.layer].index_put_((page[:, None], torch.arange(2, device=page.device), offset[:, None]), pairs)


def cos_sin(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosines and signed sines, each [T, 1, head_dim], for `rotate`."""
    cos, sin = angles[:, None].chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate [T, heads, head_dim]: x * cos + halves of x swapped * sin, whose left half carries the minus sign."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


_FUNCTIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    Activation.SILU: silu,
    Activation.GELU: gelu,
    Activation.GELU_TANH: partial(gelu, approximate="tanh"),
    Activation.RELU: torch.relu,
    Activation.RELU2: lambda x: torch.relu(x).square(),
}


def activate(x: Tensor, kind: Activation, gated: bool) -> Tensor:
    function = _FUNCTIONS[kind]
    if not gated:
        return function(x.float()).to(x.dtype)
    gate, up = x.chunk(2, dim=-1)
    return (function(gate.float()) * up).to(x.dtype)


def begin_decode(words: Tensor, counts: Counts, tables: Tables, page_size: int) -> DecodeBatch:
    first, writes = L.HEADER_WORDS + counts.rows, counts.page_writes
    rows = words[L.HEADER_WORDS : first].long()
    if writes:
        pairs = words[first : first + L.PAGE_WORDS * writes].view(-1, L.PAGE_WORDS)
        tables.pages.view(-1).index_copy_(0, pairs[:, 0].long(), pairs[:, 1].contiguous())
    lines = tables.state.index_select(0, rows)
    active, positions = lines[:, L.ACTIVE].bool(), lines[:, L.COMPUTED].long()
    if counts.places > 1:
        place = torch.arange(counts.places, device=rows.device)[:, None]
        active = (active & (place <= drafts_of(lines, counts.places))).flatten()
        positions = (positions + place).flatten().clamp(max=tables.history.shape[1] - 1)
        rows = rows.repeat(counts.places)
    ids = tables.history[rows, positions].long()
    slots = kv_slots(tables.pages, rows, positions, active, page_size)
    return DecodeBatch(rows, ids, positions, slots, torch.where(active, positions + 1, 1))


def kv_slots(pages: Tensor, rows: Tensor, positions: Tensor, active: Tensor, page_size: int) -> Tensor:
    """Return the KV slot of each token, [T]: slot 0, in the null page, for tokens of inert rows."""
    # An inert row's position means nothing and may be past the end.
    page = pages[rows, torch.div(torch.where(active, positions, 0), page_size, rounding_mode="floor")].long()
    return torch.where(active, page * page_size + positions % page_size, 0)


def finish(
    words: Tensor, rows: Tensor, sizes: Tensor | None, tokens: Tensor, finite: Tensor, tables: Tables, lines: Tensor,
    out: Tensor,
) -> None:  # fmt: skip
    rows = rows.long()
    before = tables.state.index_select(0, rows)
    given = take(tokens, finite, before[: tokens.shape[0]], tables.params.index_select(0, rows[: tokens.shape[0]]))
    generations = before[: tokens.shape[0], L.GENERATION].clone()
    out.copy_(given.tokens)
    advance(rows, before, sizes, given, tables)
    whole = (rows[: tokens.shape[0]].int(), generations, given.flags)
    _publish(words, torch.cat((torch.stack(whole, dim=1), given.tokens), dim=1), lines)
    next_header(words, lines.shape[0])


class TakenTokens(NamedTuple):
    """Tokens taken by N sampled rows. All int32."""

    tokens: Tensor
    """[N, W], NO_TOKEN after the taken ones"""
    counts: Tensor
    """[N]"""
    flags: Tensor
    """[N]"""


def take(tokens: Tensor, finite: Tensor, line: Tensor, params: Tensor) -> TakenTokens:
    """Return the tokens that each row takes, by its state `line` before the step."""
    active = line[:, L.ACTIVE].bool()
    places = line[:, L.LENGTH, None] + torch.arange(1, tokens.shape[1] + 1, device=tokens.device)
    there = (tokens >= 0) & (line[:, L.LATE, None] == 0)
    stops = there & (params[:, None, L.STOP_IDS : L.FIRST_PARAM] == tokens[:, :, None]).any(-1)
    full = there & (places >= params[:, L.MAX_LEN, None])
    goes_on = there & ~stops & ~full
    # The first is taken if there is one, every other one if all to its left continue.
    before = torch.cat((torch.ones_like(there[:, :1]), goes_on[:, :-1]), dim=1).long().cumprod(1).bool()
    taken = there & before & (active & finite)[:, None]
    counts = taken.sum(1).int()
    flags = torch.where((taken & full).any(1), int(Flag.LENGTH), int(Flag.LIVE))
    flags = torch.where((taken & stops).any(1), int(Flag.STOP), flags)
    flags = torch.where(counts == 0, int(Flag.HELD), flags)
    flags = torch.where(finite, flags, int(Flag.ERROR))
    flags = torch.where(active, flags, int(Flag.INERT)).int()
    return TakenTokens(torch.where(taken, tokens, tokens.clamp(max=NO_TOKEN)).int(), counts, flags)


def advance(rows: Tensor, line: Tensor, sizes: Tensor | None, given: TakenTokens, tables: Tables) -> None:
    """Append tokens, move lengths, and make finished rows inert. `line` is the rows' state, and used up."""
    count, active = len(given.tokens), line[:, L.ACTIVE].clone()
    line[:, L.COMPUTED] += active if sizes is None else active * sizes
    length, taken = line[:count, L.LENGTH].clone(), given.tokens >= 0
    # A place without a token rewrites the null row's history, so that every index is in range; with a valid token,
    # since the null row pads batches.
    column = torch.where(taken, length[:, None] + torch.arange(given.tokens.shape[1], device=rows.device), 0)
    tables.history.index_put_((torch.where(taken, rows[:count, None], 0), column.long()), given.tokens.clamp(min=0))
    line[:count, L.LENGTH] += given.counts
    line[:count, L.COMPUTED] = torch.where(active[:count] != 0, line[:count, L.LENGTH] - 1, line[:count, L.COMPUTED])
    line[:count, L.ACTIVE] *= ((given.flags == int(Flag.LIVE)) | (given.flags == int(Flag.HELD))).int()
    tables.state.index_copy_(0, rows, line)


def _publish(words: Tensor, table: Tensor, lines: Tensor) -> None:
    step, slot = words[L.PACKET_STEP : L.PACKET_STEP + 1], words[L.PACKET_SLOT : L.PACKET_SLOT + 1]
    size = L.line_words(table.shape[1] - L.LINE_TOKENS)
    header = pad(torch.stack((step, torch.full_like(step, table.shape[0])), dim=1), (0, size - 2))
    out = torch.cat((header, pad(table, (0, size - table.shape[1]), value=NO_TOKEN))).view(1, -1)
    lines[:, : out.shape[1]].index_copy_(0, slot.long(), out)


def next_header(words: Tensor, slots: int) -> None:
    """Advance the packet to the next step and outbox, so that a chain runs on without another packet."""
    words[L.PACKET_STEP : L.PACKET_STEP + 1].add_(1).bitwise_and_(L.MAX_STEP_WORD)
    words[L.PACKET_SLOT : L.PACKET_SLOT + 1].add_(1).remainder_(slots)


KERNELS = Kernels(
    "torch", {WeightKind.DENSE: TorchLinear}, rms_norm, layer_norm, add_rms_norm, angles, rope_and_write, activate,
    attention.decode_attention, attention.prefill_attention, cut, sample, begin_decode, finish, score, accept, look_up,
    chunk_attention=attention.chunk_attention,
)  # fmt: skip
