"""Input building on the device: from row numbers and tables to ids, positions, slots and lengths."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gapless.model.seam import BatchShape, StepInputs
from gapless.step.packet import Packet
from gapless.step.tables import ACTIVE, COMPUTED, STATE_COLUMNS, Tables


class Batch(NamedTuple):
    """The batch as gathered from the tables before the forward. B rows."""

    rows: Tensor
    """[B] int64 row numbers"""
    state: Tensor
    """[B, STATE_COLUMNS] int32"""
    sizes: Tensor | None
    """[B] int64 query tokens a row; None when each has one"""
    last: Tensor | None
    """[B] int64 index of each row's last query token; None when it is the row's own index"""
    inputs: StepInputs


def apply_packet(packet: Packet, tables: Tables) -> None:
    """Admissions and page table changes go into the tables."""
    if packet.admissions.shape[0]:
        rows = packet.admissions[:, 0].long()
        tables.state.index_copy_(0, rows, packet.admissions[:, 1 : 1 + STATE_COLUMNS])
        tables.params.index_copy_(0, rows, packet.admissions[:, 1 + STATE_COLUMNS :])
    if packet.pages.shape[0]:
        tables.pages.view(-1).index_copy_(0, packet.pages[:, 0].long(), packet.pages[:, 1].contiguous())


def build(packet: Packet, tables: Tables, shape: BatchShape, page_size: int) -> Batch:
    """Everything that a forward reads, from the tables. Inert rows get the null page and a KV length of 1."""
    rows = packet.rows.long()
    state = tables.state.index_select(0, rows)
    active = state[:, ACTIVE].bool()
    start = state[:, COMPUTED].long()
    width = _page_columns(shape, page_size)
    pages = tables.pages[:, :width].index_select(0, rows)
    if not shape.chunks:
        ids = tables.history[rows, start].long()
        slots = _slots(pages, None, start, active, page_size)
        kv_lens = torch.where(active, start + 1, 1)
        return Batch(rows, state, None, None, StepInputs(ids, start, slots, pages.long(), kv_lens))
    sizes = packet.sizes.long()
    ends = sizes.cumsum(0)
    token = torch.arange(shape.tokens, device=rows.device)
    owner = torch.searchsorted(ends, token, right=True)
    positions = token - (ends - sizes)[owner] + start[owner]
    token_rows = rows[owner]
    # Prompt tokens arrive with the packet; they enter the history on their way to the forward.
    decode = shape.decode
    tables.history.index_put_((token_rows[decode:], positions[decode:]), packet.tokens)
    ids = tables.history[token_rows, positions].long()
    slots = _slots(pages, owner, positions, active[owner], page_size)
    kv_lens = torch.where(active, start + sizes, 1)
    return Batch(rows, state, sizes, ends - 1, StepInputs(ids, positions, slots, pages.long(), kv_lens))


def _slots(pages: Tensor, owner: Tensor | None, positions: Tensor, active: Tensor, page_size: int) -> Tensor:
    """[T] where each token's KV goes; slot 0, in the null page, for inert rows."""
    entry = torch.div(positions, page_size, rounding_mode="floor")
    if owner is None:
        page = pages.gather(1, entry[:, None]).squeeze(1)
    else:
        page = pages[owner, entry]
    return torch.where(active, page.long() * page_size + positions % page_size, 0)


def _page_columns(shape: BatchShape, page_size: int) -> int:
    longest = max((start + count for start, count in shape.chunks), default=0)
    return max(1, -(-max(shape.bound, longest) // page_size))
