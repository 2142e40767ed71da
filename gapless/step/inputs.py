"""Input building on the device: from row numbers and tables to ids, positions, slots and lengths."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gapless.kernels import plain
from gapless.kernels.drafts import drafts_of
from gapless.kernels.layout import ACTIVE, ADAPTER_SLOT, COMPUTED, STATE_COLUMNS
from gapless.kernels.seam import Kernels, MixedBatch
from gapless.kernels.tables import Tables
from gapless.kernels.views import Counts
from gapless.model.seam import BatchShape, GroupInputs, KVCache, StepInputs
from gapless.step.packet import Packet, PacketShape


class Batch(NamedTuple):
    """The batch as gathered from the tables before the forward. B rows."""

    inputs: StepInputs
    last: Tensor | None = None
    """[B] int64 index of each row's last query token; None when it is the row's own index"""


def apply_admissions(packet: Packet, tables: Tables) -> None:
    """Write new rows to the tables."""
    rows = packet.admissions[:, 0].long()
    tables.state.index_copy_(0, rows, packet.admissions[:, 1 : 1 + STATE_COLUMNS])
    tables.params.index_copy_(0, rows, packet.admissions[:, 1 + STATE_COLUMNS :])


def apply_pages(writes: Tensor, tables: Tables) -> None:
    """Write changes of the page table, int32 [count, PAGE_WORDS]."""
    tables.pages.view(-1).index_copy_(0, writes[:, 0].long(), writes[:, 1].contiguous())


def fused_batch(
    kernels: Kernels, words: Tensor, packet: PacketShape, tables: Tables, shape: BatchShape, page_size: int
) -> Batch:
    """Return a batch of decode rows with a token at each place; the same kernels write the packet's admissions and page
    table changes."""
    begin = kernels.begin_mixed if shape.chunks else kernels.begin_decode
    assert begin is not None
    sizes = packet.rows, shape.decode // shape.places, packet.page_writes, packet.admissions, shape.tokens, shape.places
    begun = begin(words, Counts(*sizes), tables, page_size)
    starts, last = (begun.starts, begun.last) if isinstance(begun, MixedBatch) else (None, None)
    inputs = StepInputs(
        begun.ids, begun.positions, begun.slots, begun.kv_lens, begun.rows, tables.pages,
        _page_columns(shape, page_size, tables), starts, places=shape.places,
    )  # fmt: skip
    return Batch(inputs, last)


def mixed_batch(packet: Packet, tables: Tables, shape: BatchShape, page_size: int) -> Batch:
    """Return a batch with chunks. Inert rows get the null page and a KV length of 1."""
    rows, sizes, place = _rows_of_batch(packet, shape)
    state = tables.state.index_select(0, rows)
    active = state[:, ACTIVE].bool() & (place <= drafts_of(state, shape.places))
    # Places without drafts may lie past the end.
    start = torch.minimum(state[:, COMPUTED] + place, tables.history.shape[1] - sizes)
    ends = sizes.cumsum(0)
    token = torch.arange(shape.tokens, device=rows.device)
    owner = torch.searchsorted(ends, token, right=True)
    positions = token - (ends - sizes)[owner] + start[owner]
    token_rows = rows[owner]
    # Prompt tokens arrive with the packet and enter the history here, before the forward.
    decode = shape.decode
    tables.history.index_put_((token_rows[decode:], positions[decode:]), packet.tokens)
    ids = tables.history[token_rows, positions].long()
    slots = plain.kv_slots(tables.pages, token_rows, positions, active[owner], page_size)
    kv_lens = torch.where(active, start + sizes, 1)
    starts = torch.cat((torch.zeros_like(ends[:1]), ends))
    columns = _page_columns(shape, page_size, tables)
    inputs = StepInputs(
        ids, positions, slots, kv_lens, rows, tables.pages, columns, starts, places=shape.places
    )  # fmt: skip
    return Batch(inputs, (ends - 1).clamp(min=0))


def _rows_of_batch(packet: Packet, shape: BatchShape) -> tuple[Tensor, Tensor, Tensor]:
    """Return row numbers, query token counts and places of a batch with chunks, all int64 [B]."""
    rows, sizes = packet.rows.long(), packet.sizes.long()
    if shape.places == 1:
        return rows, sizes, torch.zeros_like(rows)
    decode = shape.decode // shape.places
    rows, sizes = (torch.cat((column[:decode].repeat(shape.places), column[decode:])) for column in (rows, sizes))
    place = torch.zeros_like(rows)
    place[: shape.decode] = torch.arange(shape.decode, device=rows.device) // decode
    return rows, sizes, place


def sampled_tokens(batch: Batch, shape: BatchShape, samples: int) -> Tensor | None:
    """Return the index of the token that each place of `samples` rows samples from, int64 [P * samples].

    The places of a row with a chunk are all its last token: results after the first are unused. None if every token
    samples, in order.
    """
    if batch.last is None:
        return None
    count = samples - shape.decode // shape.places
    last = batch.last[: shape.decode + count]
    if shape.places == 1:
        return last
    decode, chunks = last[: shape.decode].view(shape.places, -1), last[shape.decode :]
    return torch.cat((decode, chunks.expand(shape.places, count)), dim=1).flatten()


def split_groups(batch: Batch, cache: KVCache) -> Batch:
    """Return the batch with inputs for every page group of the cache.

    The page table is cut into the groups' parts; each group after the first gets slots from its own part.
    """
    if not cache.others:
        return batch
    inputs = batch.inputs
    first, *others = inputs.page_table.chunk(1 + len(cache.others), dim=1)
    rows = _token_rows(inputs)
    # Page 0 is the null page: only tokens of inert rows, or of no row, have slots in it.
    active = inputs.slots >= cache.page_size
    positions = torch.where(active, inputs.positions, 0)
    made = [GroupInputs(plain.kv_slots(part, rows, positions, active, cache.page_size), part) for part in others]
    columns = min(inputs.columns, first.shape[1])
    return batch._replace(inputs=inputs._replace(page_table=first, columns=columns, others=tuple(made)))


def _token_rows(inputs: StepInputs) -> Tensor:
    """Return the page table line of each token's row, [T]; any line for tokens after the last row's."""
    if inputs.starts is None:
        return inputs.rows
    token = torch.arange(inputs.ids.shape[0], device=inputs.rows.device)
    owner = torch.searchsorted(inputs.starts[1:], token, right=True)
    return inputs.rows[owner.clamp(max=inputs.rows.shape[0] - 1)]


def with_adapters(batch: Batch, tables: Tables) -> Batch:
    """Return the batch with each token's adapter slot."""
    slots = tables.params[:, ADAPTER_SLOT].index_select(0, _token_rows(batch.inputs)).long()
    return batch._replace(inputs=batch.inputs._replace(adapters=slots))


def _page_columns(shape: BatchShape, page_size: int, tables: Tables) -> int:
    longest = max((start + count for start, count in shape.chunks), default=0)
    return min(max(1, -(-max(shape.bound, longest) // page_size)), tables.pages.shape[1])
