"""Masks in torch: allowed next tokens of rows with matchers, and the replies to the mask makers.

Host and device share a record for each row, the row's mail (see `layout`). No fence orders them: the writer of a
record's part writes its tag last, and the reader reads that tag first. The host writes the masks of a row's next tokens
only after it has read the last reply, which proves that the previous masks were read.

A mask after drafts counts only for a row with these very drafts. So their source does not matter, and a row runs
without the drafts that lack masks.

If a form leaves only one text, the host expects its tokens. A row that got the first expected tokens gets the next ones
as drafts, unless its own drafts begin with them.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gapless.base.records import NO_TOKEN
from gapless.kernels import layout as L
from gapless.kernels.drafts import drafts_of
from gapless.kernels.tables import Tables


class MaskedRows(NamedTuple):
    """The F listed rows; ones without masks, and padding, are the null row."""

    rows: Tensor
    """int64 [F]"""
    tags: Tensor
    """int64 [F]"""
    state: Tensor
    """int32 [F, STATE_COLUMNS]"""

    def drafts(self, tables: Tables, most: int) -> Tensor:
        """Return int32 [F, most], the history after each row's tokens."""
        place = torch.arange(most, device=self.rows.device)
        at = (self.state[:, L.LENGTH, None] + place).clamp(max=tables.history.shape[1] - 1)
        return tables.history[self.rows[:, None], at.long()]


def mask(index: Tensor, rows: Tensor, tables: Tables, mail: Tensor, places: int) -> None:
    """See `seam.Kernels.mask`."""
    at = _masked_rows(index, rows, tables)
    place = torch.arange(places, device=mail.device)
    tags = mail.view(torch.int64)[:, L.MAIL_TAG // 2 : L.MAIL_TAG // 2 + places].index_select(0, at.rows)
    # After the tags: a mask, and the draft before it, are complete before its tag is written.
    along = mail[:, L.MAIL_ALONG : L.MAIL_ALONG + places - 1].index_select(0, at.rows)
    there = tags == at.tags[:, None] + place
    there[:, 1:] &= (along == at.drafts(tables, places - 1)) & (place[1:] <= drafts_of(at.state, places)[:, None])
    there = there.int().cumprod(1).bool() & (at.rows > 0)[:, None]
    words = tables.masks.shape[2]
    posted = mail[:, L.MAIL_MASK : L.MAIL_MASK + places * words].index_select(0, at.rows).view(-1, places, words)
    kept = torch.where(there[:, :, None], posted, tables.masks[:, :places].index_select(0, at.rows))
    tables.masks[:, :places].index_copy_(0, at.rows, kept)
    late = ~there[:, 0] & (at.rows > 0)
    tables.state[:, L.LATE].index_copy_(0, at.rows, late.int())
    if places > 1:
        length = at.state[:, L.LENGTH] + there[:, 1:].sum(1)
        drafted = torch.where(there[:, 0], length, at.state[:, L.DRAFTED])
        tables.state[:, L.DRAFTED].index_copy_(0, at.rows, drafted.int())


def reply(
    index: Tensor, rows: Tensor, tokens: Tensor, tables: Tables, mail: Tensor, drafts: int, most: int = 0
) -> None:
    """See `seam.Kernels.reply`."""
    at, given = _masked_rows(index, rows, tables), tokens.index_select(0, index)
    if most:
        _expect(at, given, tables, mail, most)
        at = at._replace(state=tables.state.index_select(0, at.rows))
    goes_on = (given[:, 0] != NO_TOKEN) & at.state[:, L.ACTIVE].bool()
    row = torch.where(goes_on, at.rows, 0)
    mail[:, L.MAIL_TOKENS : L.MAIL_TOKENS + tokens.shape[1]].index_copy_(0, row, given)
    mail[:, L.MAIL_DRAFTED].index_copy_(0, row, drafts_of(at.state, drafts + 1).int())
    mail[:, L.MAIL_DRAFTS : L.MAIL_DRAFTS + drafts].index_copy_(0, row, at.drafts(tables, drafts))
    mail.view(torch.int64)[:, L.MAIL_TOLD // 2].index_copy_(0, row, at.tags)


def banned(words: Tensor, vocab: int) -> Tensor:
    """Return bool [N, vocab], the tokens excluded by masks int32 [N, words]."""
    bit = torch.arange(32, device=words.device, dtype=torch.int32)
    return ((words[:, :, None] >> bit) & 1 == 0).flatten(1)[:, :vocab]


def _expect(at: MaskedRows, given: Tensor, tables: Tables, mail: Tensor, most: int) -> None:
    """Make drafts of the mail's expected tokens if the tokens `given` [F, W] were the expected ones."""
    count, place = (given >= 0).sum(1), torch.arange(given.shape[1], device=given.device)
    tags = mail.view(torch.int64)[:, L.MAIL_AHEAD // 2].index_select(0, at.rows)
    # After the tags, like masks.
    expected = mail[:, L.MAIL_EXPECTED].index_select(0, at.rows)
    run = mail[:, L.MAIL_RUN : L.MAIL_RUN + L.MOST_EXPECTED].index_select(0, at.rows)
    right = ((given == run[:, : given.shape[1]]) | (place >= count[:, None])).all(1)
    right &= (tags == at.tags - count) & (count > 0) & (at.rows > 0) & at.state[:, L.ACTIVE].bool()
    params, length = tables.params.index_select(0, at.rows), at.state[:, L.LENGTH]
    room = torch.minimum(params[:, L.DRAFTS], params[:, L.MAX_LEN] - 1 - length)
    left = torch.where(right, torch.minimum(expected - count, room).clamp(0, most), 0)
    number = torch.arange(most, device=given.device)
    where = (length[:, None] + number).clamp(max=tables.history.shape[1] - 1).long()
    mine, own = number < left[:, None], at.drafts(tables, most)
    drafts = torch.where(mine, run.gather(1, count[:, None] + number), own)
    tables.history.index_put_((at.rows[:, None].expand_as(where), where), drafts)
    further = (drafts == own).all(1) & (drafts_of(at.state, most + 1) >= left)
    drafted = torch.where(further, at.state[:, L.DRAFTED], length + left)
    tables.state[:, L.DRAFTED].index_copy_(0, at.rows, drafted.int())


def _masked_rows(index: Tensor, rows: Tensor, tables: Tables) -> MaskedRows:
    rows = rows.index_select(0, index).long()
    masked = tables.params[:, L.MASKED].index_select(0, rows) != 0
    masked &= torch.cat((torch.ones_like(masked[:1]), index[1:] != index[:-1]))  # a second look may find another tag
    rows = torch.where(masked, rows, 0)
    state = tables.state.index_select(0, rows)
    return MaskedRows(rows, state[:, L.GENERATION].long() << 32 | state[:, L.LENGTH].long(), state)
