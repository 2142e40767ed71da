"""The device tables: one row per running request, advanced by the device itself."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gapless.kernels.layout import PARAM_COLUMNS, STATE_COLUMNS, WISH_WORDS, mask_words

COUNTED_TILE = 2048
"""Least tokens of the vocabulary counted by one program of a GPU: with 1,024 one row takes 1 us less, and many 1.6
times as long"""


class Tables(NamedTuple):
    """All int32, at fixed addresses. Row 0 is the null row.

    `state` [rows, STATE_COLUMNS]: generation, active, length (tokens known to the device), computed (tokens with KV),
    whether the mask of the next token is late, the length with drafts, the lowest logit (bits of a float32) and, among
    tokens with it, the highest id that may be drawn. `params` [rows, PARAM_COLUMNS]: bounds, stop
    ids (padded with NO_TOKEN). `history` [rows, max_len]: token ids. `pages` [rows, groups * max_pages]: the page
    table, one part a page group. `masks` [rows, P, mask_words]: the allowed tokens, next and after each draft, of a
    MASKED row that is not LATE.
    """

    state: Tensor
    params: Tensor
    history: Tensor
    pages: Tensor
    masks: Tensor

    @classmethod
    def new(
        cls, rows: int, max_len: int, max_pages: int, device: torch.device, vocab: int = 0, places: int = 1
    ) -> Tables:
        """Return tables for `rows` requests besides the null row; without a vocabulary no row may be MASKED."""
        zeros = partial(torch.zeros, rows + 1, dtype=torch.int32, device=device)
        masks = zeros(places, mask_words(vocab))
        return cls(zeros(STATE_COLUMNS), zeros(PARAM_COLUMNS), zeros(max_len), zeros(max_pages), masks)


def slot_bytes(vocab: int, places: int = 1) -> int:
    """Return the bytes of one slot of `Adjustments`."""
    return 4 * ((1 + places) * vocab + WISH_WORDS + -(-vocab // COUNTED_TILE) + 1)


class Adjustments(NamedTuple):
    """Slots for rows with adjusted logits, at fixed addresses. Slot 0 is the null row's."""

    wishes: Tensor
    """int32 [slots, WISH_WORDS] biases, allowed ids and bad words, as in `layout`"""
    counts: Tensor
    """int32 [slots, vocab] count of each token in the output, and IN_PROMPT"""
    counted: Tensor
    """int32 [slots, tiles] counted tokens of the history, for each program's part of the vocabulary; in the first if
    one program works on all"""
    owners: Tensor
    """int32 [slots] the leasing row of each"""
    adjusted: Tensor
    """float32 [P, slots, vocab] the adjusted logits of this step, after the row's last token and after each draft"""

    @classmethod
    def new(cls, slots: int, vocab: int, device: torch.device, places: int = 1) -> Adjustments:
        """Return memory for `slots` rows of `places` tokens in a step, besides the null row."""
        zeros = partial(torch.zeros, slots + 1, dtype=torch.int32, device=device)
        tiles = -(-vocab // COUNTED_TILE)
        adjusted = torch.zeros(places, slots + 1, vocab, dtype=torch.float32, device=device)
        return cls(zeros(WISH_WORDS), zeros(vocab), zeros(tiles), zeros(), adjusted)
