"""Counter-based random numbers: a value is a function of seed, position and token alone.

Philox4x32-10 of Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3" (SC11). The key is the
request's seed; the counter is (token id // 4, position, 0, 0) and its four outputs serve four neighbouring ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

PhiloxWords = tuple[Tensor, Tensor, Tensor, Tensor]

_MULTIPLY = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
_BELOW_ONE = 1.0 - 2.0**-24


def philox(counter: PhiloxWords, key: tuple[Tensor, Tensor]) -> PhiloxWords:
    """Apply the cipher: four words of output for four of counter and two of key.

    All are uint32 held in int64, of any shapes that broadcast.
    """
    (word0, word1, word2, word3), (key0, key1) = counter, key
    for _ in range(10):
        # An int64 product wraps as an unsigned one does; the masks undo the sign.
        product0, product1 = word0 * _MULTIPLY[0], word2 * _MULTIPLY[1]
        word0 = ((product1 >> 32) & _WORD) ^ word1 ^ key0
        word2 = ((product0 >> 32) & _WORD) ^ word3 ^ key1
        word1, word3 = product1 & _WORD, product0 & _WORD
        key0, key1 = (key0 + _WEYL[0]) & _WORD, (key1 + _WEYL[1]) & _WORD
    return word0, word1, word2, word3


def gumbel(ids: Tensor | None, vocab: int, position: Tensor, seed: Tensor) -> Tensor:
    """Return float32 [N, M] Gumbel noise, always finite, for token `ids` int64 [N, M], or [N, vocab] for all of them.

    `position` int64 [N, 1]; `seed` int32 [N, 2] with the low word first.
    """
    if ids is None:
        block = torch.arange(-(-vocab // 4), device=seed.device)[None]
        bits = torch.stack(_draw(block, position, seed), dim=-1).flatten(1)[:, :vocab]
    else:
        words = torch.stack(_draw(ids >> 2, position, seed), dim=-1)
        bits = words.gather(-1, (ids & 3)[..., None]).squeeze(-1)
    # A float32 is finest near zero, and a small uniform is a large noise: the winners of a draw rarely tie.
    uniform = ((bits.float() + 0.5) * 2.0**-32).clamp(max=_BELOW_ONE)
    return -torch.log(-torch.log1p(-uniform))


def _draw(block: Tensor, position: Tensor, seed: Tensor) -> PhiloxWords:
    zero = torch.zeros_like(block)
    key = (seed[:, :1].long() & _WORD, seed[:, 1:].long() & _WORD)
    return philox((block, position, zero, zero), key)
