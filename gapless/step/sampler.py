"""The sampler: greedy, temperature, top-k, top-p, min-p, with a seed a request. Reads nothing on the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gapless.kernels.random import gumbel
from gapless.step.tables import RowParams

_UNITS = 2.0**40
"""Weight of the best token as a whole number: a million tokens of its weight still add up in 63 bits."""


class SampleMode(NamedTuple):
    """What the batch may need, known to the host from the rows' settings. Each mode is a program of its own."""

    random: bool = False
    """Some row has a temperature."""
    filters: bool = False
    """Some random row has top-k, top-p or min-p."""
    candidates: int = 0
    """When positive, every random row keeps fewer tokens than this by its top-k."""
    bans: bool = False
    """Some row has a minimum length, before which its stop ids are banned."""


def sample(logits: Tensor, params: RowParams, length: Tensor, mode: SampleMode) -> Tensor:
    """Token ids, int64 [N], from float32 `logits` [N, vocab] of rows whose known tokens are `length` int32 [N].

    A row's token is the same, bit for bit, whatever `mode` is wide enough for it and whatever the other rows hold.
    """
    if mode.bans:
        ban_stops(logits, params, length)
    greedy = logits.argmax(-1)
    if not mode.random:
        return greedy
    hot = params.temperature > 0
    # Distances from the best: no temperature, however small, makes these overflow.
    scores = (logits - logits.amax(-1, keepdim=True)) / torch.where(hot, params.temperature, 1.0)
    position = length.long()[:, None]
    if not mode.filters:
        drawn = (scores + gumbel(None, logits.shape[1], position, params.seed)).argmax(-1)
    else:
        drawn = _draw_filtered(scores, params, position, mode.candidates)
    return torch.where(hot.squeeze(1), drawn, greedy)


def ban_stops(logits: Tensor, params: RowParams, length: Tensor) -> None:
    """Below the minimum length the stop ids cannot be drawn. In place."""
    vocab, stops = logits.shape[1], params.stop_ids
    banned = (length + 1 <= params.min_len)[:, None] & (stops >= 0) & (stops < vocab)
    # A minimum with +inf changes nothing, so padding needs no index of its own.
    limit = torch.where(banned, -torch.inf, torch.inf)
    logits.scatter_reduce_(1, stops.long().clamp(0, vocab - 1), limit, "amin")


def _draw_filtered(scores: Tensor, params: RowParams, position: Tensor, candidates: int) -> Tensor:
    vocab = scores.shape[1]
    best_first, ids = ranked(scores, candidates)
    if ids.shape[1] < vocab:
        noise = gumbel(ids, vocab, position, params.seed)
    else:
        noise = gumbel(None, vocab, position, params.seed).gather(1, ids)
    noisy = _filter(best_first, params) + noise
    # Of equal ones the smallest id, as argmax finds it without filters.
    best = noisy == noisy.amax(-1, keepdim=True)
    return torch.where(best, ids, vocab - 1).amin(-1)


def ranked(scores: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
    """Scores and ids, best first, and equal scores by id. All of them, or the best `candidates`."""
    bits = scores.view(torch.int32)
    # As integers, floats of one sign are in order; negative ones are turned round. No two keys are equal.
    key = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    key -= torch.arange(scores.shape[1], device=scores.device)
    if 0 < candidates < scores.shape[1]:
        ids = key.topk(candidates).indices
    else:
        ids = key.argsort(-1, descending=True)
    return scores.gather(1, ids), ids


def _filter(scores: Tensor, params: RowParams) -> Tensor:
    """Best-first `scores` [N, M], zero at the best, with what top-k, top-p and min-p drop set to -inf.

    Top-p counts what top-k leaves. The best token always stays.
    """
    rank = torch.arange(scores.shape[1], device=scores.device)
    scores = scores.masked_fill((params.top_k > 0) & (rank >= params.top_k), -torch.inf)
    weight = scores.exp()
    # Sums of whole numbers do not depend on the order of their terms, nor on how many zeros follow.
    units = (weight * _UNITS).long()
    before = units.cumsum(-1) - units
    reached = before.double() >= params.top_p.double() * units.sum(-1, keepdim=True).double()
    drop = (reached & (params.top_p < 1.0)) | (weight < params.min_p)
    return scores.masked_fill(drop & (rank > 0), -torch.inf)
