"""The device tables: one row per running request, advanced by the device itself."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gapless.kernels.layout import PARAM_COLUMNS, STATE_COLUMNS, WISH_WORDS, mask_words

COUNTED_TILE = 2048
"""Tokens of the vocabulary that one program of a GPU counts at least: with 1,024 one row takes 1 us less, and many 1.6
times as long"""


class Tables(NamedTuple):
    """All int32, at fixed addresses. Row 0 is the null row.

    `state` [rows, STATE_COLUMNS]: generation, active, length (tokens known to the device), computed (tokens with KV),
    down to which logit (bits of a float32), and to which id among tokens that have it, a token may be drawn, whether
    the mask of the next token is late, up to which length the history holds drafts of tokens to come.
    `params` [rows, PARAM_COLUMNS]: bounds, sampling settings, stop ids (padded with NO_TOKEN).
    `history` [rows, max_len]: token ids. `pages` [rows, groups * max_pages]: the page table, one part a page group.
    `masks` [rows, P, mask_words]: which tokens may come next, and after each draft, of a MASKED row that is not LATE.
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
        """Tables for `rows` requests, the null row not counted; without a vocabulary no row may be MASKED."""
        zeros = partial(torch.zeros, rows + 1, dtype=torch.int32, device=device)
        masks = zeros(places, mask_words(vocab))
        return cls(zeros(STATE_COLUMNS), zeros(PARAM_COLUMNS), zeros(max_len), zeros(max_pages), masks)


def slot_bytes(vocab: int, places: int = 1) -> int:
    """Return what one slot of `Adjustments` takes."""
    return 4 * ((1 + places) * vocab + WISH_WORDS + -(-vocab // COUNTED_TILE) + 1)


class Adjustments(NamedTuple):
    """Slots for rows whose logits are adjusted before sampling, at fixed addresses. Slot 0 is the null row's."""

    wishes: Tensor
    """int32 [slots, WISH_WORDS] biases, allowed ids and bad words, as in `layout`"""
    counts: Tensor
    """int32 [slots, vocab] how often the output has each token, and IN_PROMPT"""
    counted: Tensor
    """int32 [slots, tiles] tokens of the history that are in the counts, for each part of the vocabulary that a program
    works on; where one works on all, the first"""
    owners: Tensor
    """int32 [slots] the row that leases each"""
    adjusted: Tensor
    """float32 [P, slots, vocab] the adjusted logits of this step, after the row's last token and after each draft"""

    @classmethod
    def new(cls, slots: int, vocab: int, device: torch.device, places: int = 1) -> Adjustments:
        """Memory for `slots` rows of `places` tokens in a step, the null row not counted."""
        zeros = partial(torch.zeros, slots + 1, dtype=torch.int32, device=device)
        tiles = -(-vocab // COUNTED_TILE)
        adjusted = torch.zeros(places, slots + 1, vocab, dtype=torch.float32, device=device)
        return cls(zeros(WISH_WORDS), zeros(vocab), zeros(tiles), zeros(), adjusted)
