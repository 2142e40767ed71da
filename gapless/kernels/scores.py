"""Log-probabilities of tokens in torch, from the raw logits in float32, as lines for the outbox."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from gapless.base.records import NO_TOKEN
from gapless.kernels import layout as L
from gapless.kernels.sampling import order_keys
from gapless.kernels.tables import Tables

PIECE_BYTES = 64 << 20
"""Float32 logits worked on at once. A prompt of thousands of tokens times a large vocabulary would be gigabytes."""


class Scored(NamedTuple):
    """The scored tokens, M of them, all int64."""

    rows: Tensor
    generations: Tensor
    positions: Tensor
    targets: Tensor
    """Token ids; NO_TOKEN if none was sampled."""


def score(
    logits: Tensor, index: Tensor, words: Tensor, tokens: Tensor, tables: Tables, outboxes: Tensor, start: int,
    width: int,
) -> None:  # fmt: skip
    """See `seam.Kernels.score`."""
    index = index.long()
    place, sample = index // tokens.shape[0], index % tokens.shape[0]
    rows = words[L.HEADER_WORDS : L.HEADER_WORDS + tokens.shape[0]].index_select(0, sample).long()
    state, given = tables.state.index_select(0, rows), tokens.index_select(0, sample)
    positions = state[:, L.LENGTH].long() - (given >= 0).sum(1) + place
    who = Scored(rows, state[:, L.GENERATION].long(), positions, given.gather(1, place[:, None])[:, 0].long())
    slot = (words[L.PACKET_SLOT : L.PACKET_SLOT + 1].long() - 1) % outboxes.shape[0]
    found = [
        lines(logits.index_select(0, index[piece]).float(), Scored(*(part[piece] for part in who)), width)
        for piece in pieces(len(index), logits.shape[1])
    ]
    publish(found, outboxes, slot, start)


def publish(found: list[Tensor], outboxes: Tensor, slot: Tensor, start: int) -> None:
    """Write lines into the outbox `slot`, int64 [1], from the word `start` on."""
    every: Any = torch.cat(found).view(1, -1)
    outboxes[:, start : start + every.shape[1]].index_copy_(0, slot, every)


def lines(logits: Tensor, scored: Scored, width: int) -> Tensor:
    """Return lines int32 [M, layout.score_words(width)] from float32 `logits` [M, vocab]."""
    target = scored.targets.clamp(min=0)
    logprob, rank, ids, tops = measure(logits, target, width)
    positions = torch.where(scored.targets >= 0, scored.positions, -1)
    whole = torch.stack((scored.rows, scored.generations, positions), dim=1).int()
    parts = (whole, logprob.view(torch.int32)[:, None], rank.int()[:, None], ids.int(), tops.view(torch.int32))
    return torch.cat(parts, dim=1)


def measure(logits: Tensor, target: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return log-probability and rank [M] of `target` int64 [M]; ids and log-probabilities [M, width] of the best.

    Equal logits rank by id, as in the sampler, so that a greedy token has rank 1.
    """
    logprobs = logits.log_softmax(-1)
    index = target[:, None]
    own = logits.gather(1, index)
    before = (logits > own) | ((logits == own) & (torch.arange(logits.shape[1], device=logits.device) < index))
    chosen, rank = logprobs.gather(1, index).squeeze(1), before.sum(-1) + 1
    if not width:
        return chosen, rank, index[:, :0], logprobs[:, :0]
    ids = ranked(logits, width)
    tops = logprobs.gather(1, ids)
    missing = width - ids.shape[1]
    return chosen, rank, pad(ids, (0, missing), value=NO_TOKEN), pad(tops, (0, missing), value=-torch.inf)


def ranked(logits: Tensor, count: int) -> Tensor:
    """Return the ids int64 [M, count or the whole vocabulary] of the best, equal ones by id."""
    return order_keys(logits).topk(min(count, logits.shape[1])).indices


def pieces(count: int, vocab: int) -> Iterator[slice]:
    """Yield ranges of `count` rows of logits, each within PIECE_BYTES or one row long."""
    size = max(1, PIECE_BYTES // (4 * vocab))
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
