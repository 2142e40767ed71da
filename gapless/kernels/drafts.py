"""Drafts in torch: a row's possible next tokens, in its history after its length, and their acceptance.

A step with P places a row runs its last token and its drafts, and samples after each, with the noise of that position.
So the token sampled after a right draft is the very token that a later step would have sampled.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gapless.base.records import NO_TOKEN, REJECTED, RIGHT
from gapless.kernels import layout as L
from gapless.kernels.tables import Tables


def drafts_of(state: Tensor, places: int) -> Tensor:
    """Return the number of drafts that each row runs in a step of `places` places, int32 [N], from its line of
    `state`."""
    return (state[:, L.DRAFTED] - state[:, L.LENGTH]).clamp(0, places - 1)


def accept(tokens: Tensor, finite: Tensor, rows: Tensor, tables: Tables, width: int) -> Tensor:
    """See `seam.Kernels.accept`."""
    places = max(1, tokens.shape[0] // max(1, rows.shape[0]))  # a step may sample nothing
    state = tables.state.index_select(0, rows)
    place = torch.arange(places - 1, device=rows.device)
    drafted = place < drafts_of(state, places)[:, None]
    sampled, good = tokens.view(places, -1).T, finite.view(places, -1).T
    at = (state[:, L.LENGTH, None] + place).clamp(max=tables.history.shape[1] - 1)
    right = drafted & (tables.history[rows.long()[:, None], at.long()] == sampled[:, :-1])
    kept = (right & good[:, 1:]).long().cumprod(1).bool()
    if places == 1 and width > 1:
        drafted = drafts_of(state, 2)[:, None] > 0
        first = tables.history[rows.long(), state[:, L.LENGTH].clamp(max=tables.history.shape[1] - 1).long()]
        right = torch.where(first[:, None] == sampled, RIGHT, REJECTED)
        given = torch.cat((sampled, torch.where(drafted, right, NO_TOKEN)), dim=1)
        return torch.nn.functional.pad(given, (0, width - 2), value=NO_TOKEN)
    others = torch.where(drafted, REJECTED, NO_TOKEN)
    given = torch.cat((sampled[:, :1], torch.where(kept, sampled[:, 1:], others)), dim=1)
    return torch.nn.functional.pad(given, (0, width - places), value=NO_TOKEN)


def look_up(rows: Tensor, tables: Tables, most: int, shortest: int, longest: int) -> Tensor:
    """See `seam.Kernels.look_up`."""
    rows = rows.long()
    state, params, history = (table.index_select(0, rows) for table in tables[:3])
    length = state[:, L.LENGTH, None].long()
    end = torch.arange(history.shape[1], device=rows.device)  # ends of possible matches, starts of their continuations
    same, whole = torch.zeros_like(history), torch.ones_like(history, dtype=torch.bool)
    for back in range(1, longest + 1):
        last = history.gather(1, (length - back).clamp(min=0))
        whole &= (end >= back) & (history.roll(back, dims=1) == last)
        same += whole.int()
    same = torch.where((end > 0) & (end < length) & (same >= shortest), same, 0).long()
    best = (same * history.shape[1] + end * (same > 0)).amax(1, keepdim=True)
    start = best % history.shape[1]
    asked = torch.minimum(params[:, L.DRAFTS], params[:, L.MAX_LEN] - 1 - state[:, L.LENGTH]).clamp(0, most)
    asked = torch.where((start[:, 0] > 0) & state[:, L.ACTIVE].bool(), asked, 0)
    found = start + torch.arange(most, device=rows.device) % (length - start).clamp(min=1)
    at = (length + torch.arange(most, device=rows.device)).clamp(max=history.shape[1] - 1)
    mine = torch.arange(most, device=rows.device) < asked[:, None]
    drafts = torch.where(mine, history.gather(1, found), history.gather(1, at))
    tables.history.index_put_((rows[:, None].expand_as(at), at), drafts)
    drafted = torch.where(params[:, L.DRAFTS] > 0, state[:, L.LENGTH] + asked, state[:, L.DRAFTED])
    tables.state[:, L.DRAFTED].index_copy_(0, rows, drafted.int())
    return torch.where(asked > 0, best[:, 0] // history.shape[1], 0).int()


def ask(rows: Tensor, tables: Tables, drafts: int) -> None:
    """See `seam.Kernels.ask`."""
    rows = rows.long()
    length = tables.state[:, L.LENGTH].index_select(0, rows)
    params = tables.params.index_select(0, rows)
    room = torch.minimum(params[:, L.DRAFTS], params[:, L.MAX_LEN] - 1 - length).clamp(0, drafts)
    tables.state[:, L.DRAFTED].index_copy_(0, rows, length + room)


def keep_drafts(ids: Tensor, positions: Tensor, rows: Tensor, slots: Tensor, tables: Tables) -> None:
    """See `seam.Kernels.keep_drafts`."""
    at = torch.add(positions, rows, alpha=tables.history.shape[1])
    tables.history.view(-1).index_copy_(0, torch.where(slots > 0, at, 0), ids.int())
