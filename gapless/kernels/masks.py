"""Masks in torch: which tokens may come next, for rows whose matchers decide; and the replies to those who make them.

Host and device share a record for each slot, the slot's mail (`layout` says what it holds). No fence orders them: the
writer of a record's part writes its tag last, and the reader looks at that tag first. The host writes the mask of a
row's next token only after it has read the last one, whose reply proves that the mask before was read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gapless.kernels import layout as L
from gapless.kernels.tables import Adjustments, Tables


class MaskedRows(NamedTuple):
    """The listed rows that get masks, F rows. Others, and padding, have the null row and its slot."""

    rows: Tensor
    """int64 [F]"""
    slots: Tensor
    """int64 [F]"""
    tags: Tensor
    """int64 [F]"""


def mask(index: Tensor, rows: Tensor, tables: Tables, slots: Adjustments, mail: Tensor) -> None:
    """See `seam.Kernels.mask`."""
    at = _masked_rows(index, rows, tables, slots)
    late = mail.view(torch.int64)[:, L.MAIL_TAG // 2].index_select(0, at.slots) != at.tags
    # After the tags: a mask is complete before its tag says so.
    logits = slots.logits[0]  # a row with masks has no drafts
    vocab, masked = logits.shape[1], (at.slots > 0)[:, None]
    words = mail[:, L.MAIL_MASK : L.MAIL_MASK + L.mask_words(vocab)].index_select(0, at.slots)
    bits = (words[:, :, None] >> torch.arange(32, device=words.device, dtype=torch.int32)) & 1
    banned = (bits == 0).flatten(1)[:, :vocab] & masked & ~late[:, None]
    x = logits.index_select(0, at.slots)
    logits.index_copy_(0, at.slots, x.masked_fill(banned, -torch.inf))
    tables.state[:, L.LATE].index_copy_(0, at.rows, (late & (at.slots > 0)).int())


def reply(index: Tensor, rows: Tensor, tokens: Tensor, tables: Tables, slots: Adjustments, mail: Tensor) -> None:
    """See `seam.Kernels.reply`."""
    at = _masked_rows(index, rows, tables, slots)
    token = tokens[:, 0].index_select(0, index)
    given = (token != L.NO_TOKEN) & tables.state[:, L.ACTIVE].index_select(0, at.rows).bool()
    slot = torch.where(given, at.slots, 0)
    mail[:, L.MAIL_TOKEN].index_copy_(0, slot, token)
    mail.view(torch.int64)[:, L.MAIL_TOLD // 2].index_copy_(0, slot, at.tags)


def _masked_rows(index: Tensor, rows: Tensor, tables: Tables, slots: Adjustments) -> MaskedRows:
    rows = rows.index_select(0, index).long()
    own = tables.params[:, L.ADJUST_SLOT].index_select(0, rows).long()
    owner = slots.wishes[:, L.OWNER].index_select(0, own).long()
    masked = owner > 0
    masked &= torch.cat((torch.ones_like(masked[:1]), index[1:] != index[:-1]))  # a second look may find another tag
    rows, own = torch.where(masked, rows, 0), torch.where(masked, own, 0)
    length = tables.state[:, L.LENGTH].index_select(0, rows).long()
    return MaskedRows(rows, own, owner << 32 | length)
