"""Drafts from other answers, in torch: the token that followed the end of a history before, in a table on the device.

The table is a hash table without chains: a new context overwrites the entry of another. An entry names its tenant in
full, so a row never gets another tenant's tokens; digests of a tenant's own contexts may collide, which costs a wrong
draft.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gapless.kernels import layout as L
from gapless.kernels.tables import Tables
from gapless.kernels.views import Recall

_WORD = 0xFFFFFFFF


def new_suffixes(lengths: int, entries: int, device: torch.device) -> Tensor:
    """Return an empty table for the first `lengths` of SUFFIX_LENGTHS, of `entries` (a power of two) each."""
    assert entries & (entries - 1) == 0
    return torch.zeros(lengths, entries + 1, L.SUFFIX_WORDS, dtype=torch.int32, device=device)


def remember(rows: Tensor, tokens: Tensor, tables: Tables, suffixes: Tensor) -> None:
    """See `seam.Kernels.remember`."""
    rows = rows.long()
    tenant = tables.params[:, L.TENANT].index_select(0, rows).long()
    first = tables.state[:, L.LENGTH].index_select(0, rows).long() - (tokens >= 0).sum(1)
    order = torch.arange(1, len(rows) + 1, dtype=torch.int32, device=rows.device)
    spare = suffixes.shape[1] - 1
    ends = first[:, None] + torch.arange(tokens.shape[1], device=rows.device)
    digests = _digests(tables.history, rows[:, None], tenant[:, None], ends, suffixes.shape[0])
    for place, (token, *own) in enumerate(zip(tokens.unbind(1), *[each.unbind(1) for each in digests], strict=True)):
        for entries, length, digest in zip(suffixes, L.SUFFIX_LENGTHS, own, strict=False):
            may = (token >= 0) & (tenant > 0) & (first + place >= length)
            at = torch.where(may, digest % spare, spare)
            entries[:, L.CLAIM].scatter_reduce_(0, at, order, "amax")
            mine = may & (entries[:, L.CLAIM].index_select(0, at) == order)
            at = torch.where(mine, at, spare)
            lines = _noted(entries.index_select(0, at), tenant, digest, token)
            entries.index_copy_(0, at, lines)  # the spare entry takes all other writes
            entries[spare].zero_()


def _noted(old: Tensor, tenant: Tensor, digest: Tensor, token: Tensor) -> Tensor:
    """Return entries int32 [N, SUFFIX_WORDS] that record `token` as the one that followed."""
    known = _is_of(old, tenant, digest)
    seen, same = torch.where(known, old[:, L.SEEN] + 1, 1), torch.where(known, old[:, L.SAME], 1)
    agrees = known & (old[:, L.NEXT] == token)
    same = same + agrees.int()
    taken = ~known | (~agrees & (2 * same < seen))
    seen, same = (torch.where(taken, 1, count) for count in (seen, same))
    halved = (seen >= L.SEEN_MOST).int()
    following = torch.where(taken, token, old[:, L.NEXT])
    words = tenant, _signed(digest), following, seen >> halved, same >> halved, torch.zeros_like(seen)
    return torch.stack([word.int() for word in words], dim=1)


def recall(rows: Tensor, same: Tensor, tables: Tables, suffixes: Tensor, asked: Recall) -> None:
    """See `seam.Kernels.recall`."""
    rows = rows.long()
    state, params = tables.state.index_select(0, rows).long(), tables.params.index_select(0, rows).long()
    length, tenant, last = state[:, L.LENGTH], params[:, L.TENANT], tables.history.shape[1] - 1
    most = torch.minimum(params[:, L.DRAFTS], params[:, L.MAX_LEN] - 1 - length).clamp(0, asked.most)
    most = torch.where(state[:, L.ACTIVE] != 0, most, 0)
    spare, match, going, drafted = suffixes.shape[1] - 1, same.long(), most > 0, torch.zeros_like(length)
    for place in range(asked.most):
        end, found, token = length + place, torch.zeros_like(length), torch.zeros_like(length)
        ends = _digests(tables.history, rows, tenant, end, suffixes.shape[0])
        for entries, size, digest in zip(suffixes, L.SUFFIX_LENGTHS, ends, strict=False):
            entry = entries.index_select(0, digest % spare).long()
            often = 1000 * entry[:, L.SAME] >= asked.least * entry[:, L.SEEN]
            known = _is_of(entry, tenant, digest) & (tenant > 0) & (end >= size) & often
            found, token = torch.where(known, size, found), torch.where(known, entry[:, L.NEXT], token)
        if place == 0:
            going &= found > match
            match = torch.where(going, found, match)
        going = going & (found > 0) & (place < torch.minimum(most, asked.factor * match // 1000))
        at = end.clamp(max=last)
        old = tables.history[rows, at]
        tables.history.index_put_((rows, at), torch.where(going, token.int(), old))
        drafted += going.int()
    own = torch.minimum(state[:, L.DRAFTED], length + asked.factor * same // 1000)
    end = torch.where(drafted > 0, length + drafted, own)
    tables.state[:, L.DRAFTED].index_copy_(0, rows, torch.where(most > 0, end, state[:, L.DRAFTED]).int())


def _digests(history: Tensor, rows: Tensor, tenant: Tensor, end: Tensor, lengths: int) -> list[Tensor]:
    """Return the digests int64 of the last tokens before `end` in these rows, for each length."""
    digest, found = tenant * L.DIGEST_BEGIN & _WORD, []
    for back in range(1, L.SUFFIX_LENGTHS[lengths - 1] + 1):
        token = history[rows, (end - back).clamp(0, history.shape[1] - 1)]
        digest = ((digest ^ token) * L.DIGEST_MIX) & _WORD
        digest = digest ^ digest >> L.DIGEST_SHIFT
        if back in L.SUFFIX_LENGTHS:
            found.append(digest)
    return found


def _is_of(entries: Tensor, tenant: Tensor, digest: Tensor) -> Tensor:
    return (entries[:, L.OWN_TENANT] == tenant) & (entries[:, L.DIGEST] == _signed(digest))


def _signed(digest: Tensor) -> Tensor:
    return torch.where(digest > 0x7FFFFFFF, digest - (1 << 32), digest)
