"""The sampler: greedy, temperature, top-k, top-p, min-p, with a seed a request. Reads nothing on the host."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gapless.step.random import gumbel
from gapless.step.tables import RowParams


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
    """Token ids, int64 [N], from float32 `logits` [N, vocab] of rows whose known tokens are `length` int32 [N]."""
    if mode.bans:
        ban_stops(logits, params, length)
    greedy = logits.argmax(-1)
    if not mode.random:
        return greedy
    hot = params.temperature > 0
    scores = logits / torch.where(hot, params.temperature, 1.0)
    position = length.long()[:, None]
    if not mode.filters:
        drawn = (scores + gumbel(None, logits.shape[1], position, params.seed)).argmax(-1)
    else:
        scores, ids = _ranked(scores, mode.candidates)
        scores = _filter(scores, params)
        best = (scores + gumbel(ids, logits.shape[1], position, params.seed)).argmax(-1, keepdim=True)
        drawn = ids.gather(1, best).squeeze(1)
    return torch.where(hot.squeeze(1), drawn, greedy)


def ban_stops(logits: Tensor, params: RowParams, length: Tensor) -> None:
    """Below the minimum length the stop ids cannot be drawn. In place."""
    banned = (length + 1 <= params.min_len)[:, None] & (params.stop_ids >= 0)
    ids = params.stop_ids.long().clamp(min=0)
    # A minimum with +inf changes nothing, so padding needs no index of its own.
    logits.scatter_reduce_(1, ids, torch.where(banned, -torch.inf, torch.inf), "amin")


def _ranked(scores: Tensor, candidates: int) -> tuple[Tensor, Tensor]:
    """Scores and ids, best first; equal scores by id, so that the order does not depend on how it was found."""
    if not 0 < candidates < scores.shape[1]:
        ranked, ids = torch.sort(scores, stable=True, dim=-1, descending=True)
        return ranked, ids
    ids = scores.topk(candidates, sorted=False).indices.sort(-1).values
    ranked, order = torch.sort(scores.gather(1, ids), stable=True, dim=-1, descending=True)
    return ranked, ids.gather(1, order)


def _filter(scores: Tensor, params: RowParams) -> Tensor:
    """Best-first `scores` [N, M] with what top-k, top-p and min-p drop set to -inf. The best token always stays."""
    rank = torch.arange(scores.shape[1], device=scores.device)
    drop = (params.top_k > 0) & (rank >= params.top_k)
    scores = scores.masked_fill(drop, -torch.inf)
    probability = scores.softmax(-1)
    before = probability.cumsum(-1) - probability
    drop = (before >= params.top_p) & (params.top_p < 1.0)
    drop |= probability < params.min_p * probability[:, :1]
    return scores.masked_fill(drop & (rank > 0), -torch.inf)
