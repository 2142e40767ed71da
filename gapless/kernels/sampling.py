"""Sampling in torch: greedy, temperature, top-k, top-p and min-p, row by row, with a seed a request.

`cut` finds the cut of a row's filters, by search over values; `sample` draws among the tokens above it. Each row's
settings are read from the tables, so one program serves all.
"""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import torch
from torch import Tensor

from gapless.device import facts
from gapless.kernels import layout as L
from gapless.kernels.masks import banned
from gapless.kernels.random import gumbel
from gapless.kernels.tables import Tables
from gapless.kernels.views import Filters

UNITS = 2.0**40
"""Weight of the best token as a whole number: a million tokens of its weight still add up in 63 bits."""


def sample(logits: Tensor, rows: Tensor, tables: Tables, adjusted: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """See `seam.Kernels.sample`."""
    state, params = tables.state.index_select(0, rows), tables.params.index_select(0, rows)
    places, place = logits.shape[0] // max(1, rows.shape[0]), None
    if places > 1:
        place = torch.arange(logits.shape[0], device=rows.device) // rows.shape[0]
        state, params = at_place(state.repeat(places, 1), place), params.repeat(places, 1)
        rows = rows.repeat(places)
    if adjusted is not None:
        slots = params[:, L.ADJUST_SLOT]
        if place is not None:
            slots = torch.where(slots > 0, place.int() * adjusted.shape[1] + slots, 0)
        logits = torch.ops.gapless.own_logits.default(logits, adjusted.flatten(0, 1), slots)
    logits = _allowed(logits, state, params, tables.masks, rows, place)
    tokens: Tensor = torch.ops.gapless.draw.default(logits, state, params)
    return tokens, logits.amax(-1).isfinite()


def at_place(state: Tensor, place: Tensor) -> Tensor:
    """Return the lines of `state` [N, columns] as if `place` drafts of each row were its tokens."""
    cut = (L.CUT_VALUE + 2 * place)[:, None] + torch.arange(2, device=place.device)
    now = state[:, L.GENERATION : L.CUT_VALUE]
    length = torch.where(torch.arange(L.CUT_VALUE, device=place.device) == L.LENGTH, place[:, None], 0)
    return torch.cat((now + length.int(), state.gather(1, cut.long())), dim=1)


def _draw(logits: Tensor, state: Tensor, params: Tensor) -> Tensor:
    """Draw tokens int64 [N] from float32 `logits` and the rows' lines of the tables."""
    best, temperature = logits.amax(-1, keepdim=True), _real(params, L.TEMPERATURE)
    hot = temperature > 0
    # Distances from the best: no temperature, however small, makes these overflow.
    scores = (logits - best) / torch.where(hot, temperature, 1.0)
    value, ids = _real(state, L.CUT_VALUE), torch.arange(logits.shape[1], device=logits.device)
    kept = (logits > value) | ((logits == value) & (ids <= state[:, L.CUT_ID : L.CUT_ID + 1]))
    position, seed = state[:, L.LENGTH : L.LENGTH + 1].long(), params[:, L.SEED_LOW : L.SEED_HIGH + 1]
    noisy = (scores + gumbel(None, logits.shape[1], position, seed)).masked_fill(~kept, -torch.inf)
    return torch.where(hot.squeeze(1), noisy.argmax(-1), logits.argmax(-1))


def _draw_hot(logits: Tensor, state: Tensor, params: Tensor) -> Tensor:
    """Do as `_draw`, but make noise for rows with a temperature alone: here the host may read tables at once."""
    tokens, is_hot = logits.argmax(-1), (_real(params, L.TEMPERATURE) > 0).squeeze(1)
    hot = is_hot.nonzero().squeeze(1)  # san: ok(on the CPU alone)
    if hot.numel():
        tokens[hot] = _draw(logits[hot], state[hot], params[hot])
    return tokens


def _own_logits(logits: Tensor, adjusted: Tensor, slots: Tensor) -> Tensor:
    """Return float32 [N, vocab]: adjusted logits for rows with a slot."""
    return torch.where(slots[:, None] > 0, adjusted.index_select(0, slots), logits.float())


def _own_logits_of_few(logits: Tensor, adjusted: Tensor, slots: Tensor) -> Tensor:
    """Do as `_own_logits`, but look up rows with a slot alone: here the host may read tables at once."""
    asking = slots.nonzero().squeeze(1)  # san: ok(the CPU's implementation)
    logits = logits.to(torch.float32, copy=True)
    if asking.numel():
        logits[asking] = adjusted[slots[asking]]
    return logits


def _leave_masked(x: Tensor, state: Tensor, params: Tensor, masks: Tensor, rows: Tensor, place: Tensor | None) -> None:
    """Write -inf to the tokens excluded by the masks of MASKED rows that are not LATE."""
    masked, own = (params[:, L.MASKED] != 0) & (state[:, L.LATE] == 0), rows.long() * masks.shape[1]
    own = own if place is None else own + place
    x.masked_fill_(banned(masks.flatten(0, 1).index_select(0, own), x.shape[1]) & masked[:, None], -torch.inf)


def _leave_masked_of_few(
    x: Tensor, state: Tensor, params: Tensor, masks: Tensor, rows: Tensor, place: Tensor | None
) -> None:
    """Do the same, but read rows with masks alone: here the host may read tables at once."""
    asking = params[:, L.MASKED].nonzero().squeeze(1)  # san: ok(the CPU's implementation)
    if asking.numel():
        some, place = x[asking], None if place is None else place[asking]
        _leave_masked(some, state[asking], params[asking], masks, rows[asking], place)
        x[asking] = some


def reach_by_bits(key: Tensor, amount: Tensor, target: Tensor) -> Tensor:
    """Return int64 [F, 1], the key where the sum of amounts, largest key first, reaches `target`: by bisection."""
    low = torch.zeros_like(target)
    for bit in reversed(range(32 + _bits(key.shape[1]))):
        enough = torch.where(key >= low + (1 << bit), amount, 0).sum(-1, keepdim=True) >= target
        low = low + (enough.long() << bit)
    return low


def reach_in_order(key: Tensor, amount: Tensor, target: Tensor) -> Tensor:
    """Do as `reach_by_bits`, for targets above 0, by sorting: less work on a CPU, more memory."""
    order = key.argsort(descending=True)
    reached = amount.gather(1, order).cumsum(-1) >= target
    return key.gather(1, order).where(reached, 0).amax(-1, keepdim=True)


def share_in_floats(top_p: Tensor, total: Tensor) -> Tensor:
    """Return int64 [F, 1], a share (float32) of a total (int64), rounded up: by float64, to 53 bits."""
    return (top_p.double() * total.double()).ceil().long()


def share_in_integers(top_p: Tensor, total: Tensor) -> Tensor:
    """Do as `share_in_floats`, for shares above 0 and totals below 2 ** 62, exactly: not every device has float64."""
    bits = top_p.view(torch.int32).long()
    mantissa, shift = (bits & 0x7FFFFF) | 0x800000, (126 - (bits >> 23)).clamp(0, 62)
    product = mantissa * (total & 0xFFFFFF)
    whole, rest = mantissa * (total >> 24) + (product >> 24), product & 0xFFFFFF
    part = (whole & ((1 << shift) - 1)) | rest
    return torch.where(top_p < 1.0, (whole >> shift) + (part > 0).long(), total)


# Operators of torch, so that a recorded step reads its rows at each replay, and holds no search bit by bit.
_LIBRARY = torch.library.Library("gapless", "FRAGMENT")
_LIBRARY.define("draw(Tensor logits, Tensor state, Tensor params) -> Tensor")
_LIBRARY.impl("draw", _draw_hot, facts.HOST_KEY)
_LIBRARY.impl("draw", _draw, facts.ANY_KEY)
_LIBRARY.define("own_logits(Tensor logits, Tensor adjusted, Tensor slots) -> Tensor")
_LIBRARY.impl("own_logits", _own_logits_of_few, facts.HOST_KEY)
_LIBRARY.impl("own_logits", _own_logits, facts.ANY_KEY)
_LIBRARY.define(
    "leave_masked(Tensor(a!) x, Tensor state, Tensor params, Tensor masks, Tensor rows, Tensor? place) -> ()"
)
_LIBRARY.impl("leave_masked", _leave_masked_of_few, facts.HOST_KEY)
_LIBRARY.impl("leave_masked", _leave_masked, facts.ANY_KEY)
_LIBRARY.define("reach(Tensor key, Tensor amount, Tensor target) -> Tensor")
_LIBRARY.impl("reach", reach_in_order, facts.HOST_KEY)
_LIBRARY.impl("reach", reach_by_bits, facts.ANY_KEY)
_LIBRARY.define("share(Tensor top_p, Tensor total) -> Tensor")
_LIBRARY.impl("share", share_in_floats, facts.HOST_KEY)
_LIBRARY.impl("share", share_in_integers, facts.ANY_KEY)


def cut(logits: Tensor, index: Tensor, rows: Tensor, tables: Tables, filters: Filters) -> None:
    """See `seam.Kernels.cut`. All filters are searched for at once."""
    place, vocab = index // rows.shape[0], logits.shape[1]
    rows = rows.index_select(0, index % rows.shape[0])
    state, params = at_place(tables.state.index_select(0, rows), place), tables.params.index_select(0, rows)
    logits = _allowed(logits.index_select(0, index), state, params, tables.masks, rows, place)
    best, temperature = logits.amax(-1, keepdim=True), _real(params, L.TEMPERATURE)
    hot = temperature > 0
    weight = ((logits - best) / torch.where(hot, temperature, 1.0)).exp()
    units, key = (weight * UNITS).long(), order_keys(logits)
    top_k, top_p = params[:, L.TOP_K : L.TOP_K + 1].long(), _real(params, L.TOP_P)
    top_k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    last_k = torch.ops.gapless.reach.default(key, torch.ones_like(key), top_k)
    units = units.masked_fill(key < last_k, 0)
    total = units.sum(-1, keepdim=True)
    needed = torch.ops.gapless.share.default(top_p, total).clamp(min=1)
    last_p = torch.where(top_p < 1.0, torch.ops.gapless.reach.default(key, units, torch.minimum(needed, total)), 0)
    min_p = _real(params, L.MIN_P)
    kept = (key >= last_k) & (key >= last_p) & (weight >= min_p)
    last = torch.where(kept, key, key.amax(-1, keepdim=True)).amin(-1, keepdim=True)
    ids = (vocab - 1 - last % (1 << _bits(vocab))).clamp(0, vocab - 1)
    value = logits.gather(1, ids)
    # Later steps may leave the cut of a row without filters as it is: the least of these logits must not bound theirs.
    asks = (top_k < vocab) | (top_p < 1.0) | (min_p > 0.0)
    # A search that reached an excluded token reached everything.
    narrow = asks & hot & best.isfinite() & (value > -torch.inf)
    value, ids = torch.where(narrow, value.view(torch.int32), L.KEEP_VALUE), torch.where(narrow, ids, L.KEEP_ID)
    found = torch.where(rows[:, None] == 0, state[:, L.CUT_VALUE : L.CUT_ID + 1], torch.cat((value, ids.int()), dim=1))
    column = (L.CUT_VALUE + 2 * place)[:, None] + torch.arange(2, device=place.device)
    tables.state.index_put_((rows.long()[:, None], column.long()), found)


def _real(params: Tensor, column: int) -> Tensor:
    """Return a column of reals, float32 [N, 1]."""
    return params[:, column : column + 1].view(torch.float32)


def _allowed(
    logits: Tensor, state: Tensor, params: Tensor, masks: Tensor, rows: Tensor, place: Tensor | None
) -> Tensor:
    """Return a float32 copy of `logits`: stop ids below the minimum length, and masked tokens, are -inf.

    The rows int32 [N] have `masks` [rows, P, words], each at its place, or all at the first.
    """
    vocab, stops = logits.shape[1], params[:, L.STOP_IDS : L.FIRST_PARAM]
    early = state[:, L.LENGTH : L.LENGTH + 1] + 1 <= params[:, L.MIN_LEN : L.MIN_LEN + 1]
    banned = early & (stops >= 0) & (stops < vocab)
    # A minimum with +inf changes nothing, so padding needs no index of its own.
    limit = torch.where(banned, -torch.inf, torch.inf)
    x = logits.float().scatter_reduce(1, stops.long().clamp(0, vocab - 1), limit, "amin")
    if masks.shape[2]:
        torch.ops.gapless.leave_masked.default(x, state, params, masks, rows, place)
    return x


def _bits(vocab: int) -> int:
    return max(1, (vocab - 1).bit_length())


def order_keys(logits: Tensor) -> Tensor:
    """Return int64 [F, vocab] >= 0, no two equal: larger for a larger logit and, of equal ones, for a smaller id."""
    bits, vocab = (logits + 0.0).view(torch.int32), logits.shape[1]  # a zero has two signs, and they are equal
    # As integers, floats of one sign are in order; negative ones are turned round.
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() + 2**31
    return (order << _bits(vocab)) + torch.arange(vocab - 1, -1, -1, device=logits.device)
