"""The mail of the rows on the host: masks go out, and sampled tokens come back, without fences.

`kernels/layout.py` has the layout of a record, and `kernels/masks.py` the reason why tags suffice. One thread at a time
uses it.
"""

from __future__ import annotations

import platform

import numpy as np
import torch

from gapless.base.records import Int32s, Int64s
from gapless.base.speculative import MAX_DRAFTS
from gapless.device import Ring
from gapless.kernels import layout as L

MOST_TOKENS = 1 + MAX_DRAFTS
"""Tokens of a reply"""
IN_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


def tag_of(generation: int, length: int) -> int:
    """Return the tag of a row that has `length` tokens."""
    return generation << 32 | length


class Mail:
    """Records in memory that host and device both read and write, one a row. The tag is always written last.

    The interpreter stores an aligned int64 atomically, and processors of the x86 family keep stores, and loads, in
    order: on others (`IN_ORDER` is false) only threads without the interpreter may access it.
    """

    def __init__(self, ring: Ring, vocab: int, places: int = 1) -> None:
        """`ring` has a slot for each record, of `mail_bytes(vocab, places)`."""
        self.words = ring.memory.view(torch.int32)
        """int32 [rows, words], for the device."""
        array = self.words.numpy()
        tags = array.view(np.int64)
        self.tags, self.told = tags[:, L.MAIL_TAG // 2 : L.MAIL_TAG // 2 + places], tags[:, L.MAIL_TOLD // 2]
        """int64 [rows, places] tags of masks, and [rows] of replies."""
        self._tokens = array[:, L.MAIL_TOKENS : L.MAIL_TOKENS + MOST_TOKENS]
        self._drafted = array[:, L.MAIL_DRAFTED]
        self._drafts, self._along = (array[:, at : at + places - 1] for at in (L.MAIL_DRAFTS, L.MAIL_ALONG))
        self._ahead, self._expected = tags[:, L.MAIL_AHEAD // 2], array[:, L.MAIL_EXPECTED]
        self._run = array[:, L.MAIL_RUN : L.MAIL_RUN + L.MOST_EXPECTED]
        size = L.mask_words(vocab)
        self._masks = array[:, L.MAIL_MASK : L.MAIL_MASK + places * size].reshape(len(array), places, size)

    def post(self, row: int, tag: int, words: Int32s, place: int = 0, draft: int = 0) -> None:
        """Write the mask after `place` drafts, the last of them `draft`, for the row whose tokens have `tag`."""
        self._masks[row, place] = words
        if place:
            self._along[row, place - 1] = draft
        self.tags[row, place] = tag + place

    def post_ahead(self, row: int, tag: int, tokens: list[int]) -> None:
        """Write the expected tokens after `tag`, MOST_EXPECTED at most."""
        self._run[row, : len(tokens)] = tokens
        self._expected[row] = len(tokens)
        self._ahead[row] = tag

    @property
    def drafts(self) -> int:
        """Most drafts of a row in a step."""
        return int(self.tags.shape[1]) - 1

    def new_mask(self) -> Int32s:
        return np.zeros(self._masks.shape[2], np.int32)

    def mask_of(self, row: int) -> Int32s:
        """Return the last posted mask of the row's next token."""
        mask: Int32s = self._masks[row, 0]
        return mask

    def replied(self, followed: Int64s) -> bool:
        """Return whether there are `replies`."""
        count = self.told - followed
        return bool(np.count_nonzero((count > 0) & (count <= MOST_TOKENS)))

    def replies(self, followed: Int64s) -> list[tuple[int, list[int], list[int]]]:
        """Return rows with tokens beyond their tag in `followed` [rows]: row, new tokens, next drafts."""
        count = self.told - followed
        return [
            (row, self._tokens[row, : count[row]].tolist(), self._drafts[row, : self._drafted[row]].tolist())
            for row in ((count > 0) & (count <= MOST_TOKENS)).nonzero()[0].tolist()
        ]


def mail_bytes(vocab: int, places: int = 1) -> int:
    """Return the bytes of one record."""
    return 4 * (L.MAIL_MASK + places * L.mask_words(vocab))
