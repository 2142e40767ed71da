"""Accepts the drafted tokens up to the first that the model would not have written; nothing waits for the device."""

import torch
from torch import Tensor


def accept(drafted: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """drafted, wanted int64 [rows, n] -> tokens int64 [rows, n], 0 after the accepted ones, counts int64 [rows]."""
    kept = (drafted == wanted).cumprod(1).bool()
    # drafted[kept] would wait: how many there are decides the size of the result.
    return torch.where(kept, drafted, 0), kept.sum(1)


def advance(lengths: Tensor, counts: Tensor) -> Tensor:
    """The rows' lengths, with the accepted tokens and the one that the model adds itself."""
    return lengths + counts + 1
