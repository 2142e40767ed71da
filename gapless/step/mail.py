"""The mail of the slots, on the host: masks go out, and the tokens that rows got come back, with no fence between.

`kernels/layout.py` says what a record holds, and `kernels/masks.py` why tags are enough. One thread at a time uses it.
"""

from __future__ import annotations

import platform

import numpy as np
import torch

from gapless.base.records import Int32s, Int64s
from gapless.device import Ring
from gapless.kernels.layout import MAIL_MASK, MAIL_TAG, MAIL_TOKEN, MAIL_TOLD, mask_words

IN_ORDER = platform.machine().lower() in ("x86_64", "amd64", "i386", "i686")


def tag_of(owner: int, length: int) -> int:
    """Return the tag of a row that has `length` tokens; `wishes.owner_of` numbers owners."""
    return owner << 32 | length


class Mail:
    """Records in memory that host and device both read and write, one a slot. What is written has its tag last.

    The interpreter stores an aligned int64 at once, and processors of the x86 family keep stores, and loads, in order:
    on others (`IN_ORDER` is false) only threads that need no interpreter may write to it and read it.
    """

    def __init__(self, ring: Ring, vocab: int) -> None:
        """`ring` has a slot for each record, of `mail_bytes(vocab)`."""
        self.words = ring.memory.view(torch.int32)
        """int32 [slots, words], for the device."""
        array = self.words.numpy()
        tags = array.view(np.int64)
        self.tags, self.told = tags[:, MAIL_TAG // 2], tags[:, MAIL_TOLD // 2]
        """int64 [slots] the tags of masks, and those of replies."""
        self._tokens = array[:, MAIL_TOKEN]
        self._masks = array[:, MAIL_MASK : MAIL_MASK + mask_words(vocab)]

    def post(self, slot: int, tag: int, words: Int32s) -> None:
        """Write the mask of the token that comes after those of `tag`."""
        self._masks[slot] = words
        self.tags[slot] = tag

    def new_mask(self) -> Int32s:
        """Return words for a mask."""
        return np.zeros(self._masks.shape[1], np.int32)

    def addresses(self) -> tuple[int, int, int, int]:
        """Return where the first record's tag, its reply's tag, token and mask are."""
        return self.tags.ctypes.data, self.told.ctypes.data, self._tokens.ctypes.data, self._masks.ctypes.data

    def replies(self, awaited: Int64s) -> list[tuple[int, int]]:
        """Return the slots whose rows' last tokens have the tags `awaited` [slots], and these tokens."""
        slots = (self.told == awaited).nonzero()[0]
        return list(zip(slots.tolist(), self._tokens[slots].tolist(), strict=True))


def mail_bytes(vocab: int) -> int:
    """Return what one record takes."""
    return 4 * (MAIL_MASK + mask_words(vocab))
