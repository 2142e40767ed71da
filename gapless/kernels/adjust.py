"""Adjusting logits in torch: biases, penalties, allowed ids, bad words, for the rows that want them.

A row's slot counts the tokens of its history. Each call counts the new ones, so that no other code keeps counts up to
date: neither the end of a step, nor a return after a preemption.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gapless.base.params import MAX_BAD_TOKENS, MAX_BIASES
from gapless.kernels import layout as L
from gapless.kernels.tables import Adjustments, Tables

PENALTIES = tuple([L.PARAM_OF[f"{name}_penalty"] for name in ("repetition", "frequency", "presence")])
"""Columns of `params`"""


class _Rows(NamedTuple):
    """The listed rows' lines of the tables, F rows."""

    slots: Tensor
    """int64 [F], 0 for padding"""
    length: Tensor
    """int64 [F, 1]"""
    params: Tensor
    history: Tensor
    wishes: Tensor


def adjust(logits: Tensor, index: Tensor, rows: Tensor, tables: Tables, slots: Adjustments) -> None:
    """See `seam.Kernels.adjust`."""
    at = listed_rows(index, rows, tables, slots)
    counts = _count(at, slots)
    for place, own in enumerate(torch.split(logits, rows.shape[0])):
        if place:  # the draft before is a token of the row
            draft = at.history.gather(1, at.length.clamp(max=at.history.shape[1] - 1))
            counts = counts.scatter_add(1, draft, torch.ones_like(draft, dtype=torch.int32))
            at = at._replace(length=at.length + 1)
        x = own.index_select(0, index).float()
        x = _biased(x, at.wishes)
        x = _penalized(x, counts, at.params)
        x = _only_allowed(x, at.wishes)
        x = _without_bad_words(x, at)
        slots.adjusted[place].index_copy_(0, at.slots, x)


def listed_rows(index: Tensor, rows: Tensor, tables: Tables, slots: Adjustments) -> _Rows:
    rows = rows.index_select(0, index)
    params = tables.params.index_select(0, rows)
    again = torch.cat((torch.zeros_like(index[:1], dtype=torch.bool), index[1:] == index[:-1]))
    own = torch.where(again, 0, params[:, L.ADJUST_SLOT]).long()
    length = tables.state.index_select(0, rows)[:, L.LENGTH, None].long()
    history, wishes = tables.history.index_select(0, rows).long(), slots.wishes.index_select(0, own)
    return _Rows(own, length, params, history, wishes)


def _count(at: _Rows, slots: Adjustments) -> Tensor:
    """Count the uncounted tokens of the history; return the counts int32 [F, vocab]."""
    vocab, place = slots.counts.shape[1], torch.arange(at.history.shape[1], device=at.history.device)
    counted = slots.counted[:, 0].index_select(0, at.slots)[:, None]
    fresh = (place >= counted) & (place < at.length) & (at.slots > 0)[:, None]
    output, flat = place >= at.wishes[:, L.OUTPUT, None], slots.counts.view(-1)
    # Other places go to the first count of the null slot.
    where = (at.slots[:, None] * vocab + at.history).clamp(max=flat.shape[0] - 1)
    prompt = torch.where(fresh & ~output, where, 0).view(-1)
    flat.index_copy_(0, prompt, flat.index_select(0, prompt) | L.IN_PROMPT)
    made = torch.where(fresh & output, where, 0).view(-1)
    flat.index_add_(0, made, torch.ones_like(made, dtype=torch.int32))
    slots.counted[:, 0].index_copy_(0, at.slots, at.length[:, 0].int())
    return slots.counts.index_select(0, at.slots)


def _biased(x: Tensor, wishes: Tensor) -> Tensor:
    count, place = wishes[:, L.BIASES, None], torch.arange(MAX_BIASES, device=x.device)
    ids = _listed_ids(wishes, place.expand(len(x), -1), count, L.WISHES)
    biases = _word(wishes, (L.WISHES + count + place).long()).view(torch.float32)
    return x.scatter_add(1, ids, torch.where(place < count, biases, 0.0))


def _penalized(x: Tensor, counts: Tensor, params: Tensor) -> Tensor:
    repetition, frequency, presence = (params[:, column : column + 1].view(torch.float32) for column in PENALTIES)
    output = counts & (L.IN_PROMPT - 1)
    x = torch.where(counts > 0, torch.where(x > 0, x / repetition, x * repetition), x)
    return x - frequency * output - presence * (output > 0)


def _only_allowed(x: Tensor, wishes: Tensor) -> Tensor:
    count, place = wishes[:, L.ALLOWED, None], torch.arange(MAX_BIASES, device=x.device)
    ids = _listed_ids(wishes, place.expand(len(x), -1), count, L.WISHES + 2 * wishes[:, L.BIASES, None])
    least = torch.where(count > 0, -torch.inf, torch.inf)  # a row without a list keeps all
    kept = torch.full_like(x, -torch.inf).scatter_reduce(
        1, ids, torch.where(place < count, torch.inf, -torch.inf), "amax"
    )
    return torch.minimum(x, torch.maximum(kept, least))


def _without_bad_words(x: Tensor, at: _Rows) -> Tensor:
    """Ban the last token of each bad word whose other tokens end the output, prompt excluded."""
    wishes, count = at.wishes, at.wishes[:, L.BAD_WORDS, None]
    first = L.WISHES + 2 * wishes[:, L.BIASES, None] + wishes[:, L.ALLOWED, None]
    word = torch.arange(L.MOST_BAD_WORDS, device=x.device).expand(len(x), -1)
    ends = torch.where(word < count, _word(wishes, (first + word).long()), MAX_BAD_TOKENS)
    begins = torch.where(word > 0, ends.roll(1, 1), 0)
    place = torch.arange(MAX_BAD_TOKENS, device=x.device, dtype=ends.dtype).expand(len(x), -1).contiguous()
    owner = torch.searchsorted(ends, place, right=True).clamp(max=L.MOST_BAD_WORDS - 1)
    tokens = _word(wishes, (first + count + place).long())
    # The last token of a word is not compared, the others with the token as far before the end.
    back = ends.gather(1, owner) - 1 - place
    seen = at.length - back
    known = at.history.gather(1, seen.clamp(0, at.history.shape[1] - 1).long())
    differs = (back > 0) & ((seen < wishes[:, L.OUTPUT, None]) | (known != tokens))
    wrong = torch.zeros_like(ends).scatter_add(1, owner, differs.int())
    banned = (word < count) & (wrong == 0) & (ends > begins)
    last = _word(wishes, (first + count + ends - 1).long()).long().clamp(0, x.shape[1] - 1)
    return x.scatter_reduce(1, last, torch.where(banned, L.BANNED, torch.inf), "amin")


def _listed_ids(wishes: Tensor, place: Tensor, count: Tensor, first: Tensor | int) -> Tensor:
    """Return int64 [F, MAX_BIASES] ids of a list, 0 past its end."""
    return torch.where(place < count, _word(wishes, (first + place).long()), 0).long()


def _word(wishes: Tensor, place: Tensor) -> Tensor:
    return wishes.gather(1, place.clamp(max=wishes.shape[1] - 1))
