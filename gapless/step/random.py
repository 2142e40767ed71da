"""Counter-based random numbers: a value is a function of seed, position and token, and of nothing else.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC11). The key is the
request's seed; the counter is (token id // 4, position, 0, 0) and its four outputs serve four neighbouring ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox(counter: Tensor, position: Tensor, seed: Tensor, rounds: int = 10) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four uint32 words, held in int64, of shape [N, M].

    `counter` int64 [N, M] or [1, M], `position` int64 [N, 1], `seed` int32 [N, 2] with the low word first.
    """
    key0 = seed[:, :1].long() & _WORD
    key1 = seed[:, 1:].long() & _WORD
    word0, word1 = counter & _WORD, position & _WORD
    word2 = word3 = torch.zeros_like(word0)
    for _ in range(rounds):
        # An int64 product wraps as an unsigned one does; the masks undo the sign.
        product0, product1 = word0 * _MULTIPLY[0], word2 * _MULTIPLY[1]
        word0 = ((product1 >> 32) & _WORD) ^ word1 ^ key0
        word2 = ((product0 >> 32) & _WORD) ^ word3 ^ key1
        word1, word3 = product1 & _WORD, product0 & _WORD
        key0, key1 = (key0 + _WEYL[0]) & _WORD, (key1 + _WEYL[1]) & _WORD
    return word0, word1, word2, word3


def gumbel(ids: Tensor | None, vocab: int, position: Tensor, seed: Tensor) -> Tensor:
    """float32 [N, M] Gumbel noise for token `ids` [N, M], or [N, vocab] for the whole vocabulary."""
    if ids is None:
        counter = torch.arange(-(-vocab // 4), device=seed.device)[None]
        bits = torch.stack(philox(counter, position, seed), dim=-1).flatten(1)[:, :vocab]
    else:
        words = torch.stack(philox(ids >> 2, position, seed), dim=-1)
        bits = words.gather(-1, (ids & 3)[..., None]).squeeze(-1)
    # The 24 bits that a float32 holds exactly, moved off zero and one.
    uniform = ((bits >> 8).float() + 0.5) * 2.0**-24
    return -torch.log(-torch.log(uniform))
