"""The mail of the rows: masks go out, and sampled tokens come back, without fences.

`kernels/layout.py` has the layout of a record, and `kernels/masks.py` the reason why tags suffice. One thread at a time
uses it.
"""

from __future__ import annotations

import platform

import numpy as np
import torch

from gapless.base.records import Int32s, Int64s
from gapless.base.speculative import MAX_DRAFTS
from gapless.device import Device, Ring
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

    def fetch(self) -> None:
        """Bring the masks to the device, in the program that reads them."""

    def send(self) -> None:
        """Bring the replies to the host, in the program that writes them."""

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


class CopiedMail(Mail):
    """The mail of a device that cannot use the host's memory: programs copy the records.

    What a tag guards is copied to the device after the tag, and to the host before it.
    """

    def __init__(self, device: Device, records: int, vocab: int, places: int = 1) -> None:
        super().__init__(device.ring(records, mail_bytes(vocab, places)), vocab, places)
        self._device, self._host, at = device, self.words, device.torch_device
        self.words, self._fetched = torch.zeros_like(self._host, device=at), torch.zeros_like(self._host, device=at)
        size, first = L.MAIL_ALONG - L.MAIL_TOKENS, L.MAIL_DRAFTS - L.MAIL_TOKENS
        memory = device.ring(1, records * 4 * size).memory.view(torch.int32)
        told = device.ring(1, records * 8).memory.view(torch.int64)
        self._replies, self._tags = memory[0, : records * size].view(records, size), told[0, :records]
        self._sent, self._sent_tags = (
            torch.zeros_like(self._replies, device=at),
            torch.zeros_like(self._tags, device=at),
        )
        array, self.told = self._replies.numpy(), self._tags.numpy()
        self._tokens, self._drafted = array[:, :MOST_TOKENS], array[:, first - 1]
        self._drafts = array[:, first : first + places - 1]

    def fetch(self) -> None:
        for parts in (
            ((0, L.MAIL_TOLD), (L.MAIL_AHEAD, L.MAIL_EXPECTED)),
            ((L.MAIL_ALONG, L.MAIL_AHEAD), (L.MAIL_EXPECTED, self.words.shape[1])),
        ):
            self._device.upload(self._fetched, self._host)
            for first, end in parts:
                self.words[:, first:end].copy_(self._fetched[:, first:end])

    def send(self) -> None:
        self._sent.copy_(self.words[:, L.MAIL_TOKENS : L.MAIL_ALONG])
        self._sent_tags.copy_(self.words.view(torch.int64)[:, L.MAIL_TOLD // 2])
        self._device.download(self._replies, self._sent)
        self._device.download(self._tags, self._sent_tags)


def new_mail(device: Device, records: int, vocab: int, places: int, shared: bool) -> Mail:
    """Return the mail of `records` rows, copied unless the device's programs can use the host's memory: `shared`."""
    if shared:
        return Mail(device.ring(records, mail_bytes(vocab, places)), vocab, places)
    return CopiedMail(device, records, vocab, places)


def mail_bytes(vocab: int, places: int = 1) -> int:
    """Return the bytes of one record."""
    return 4 * (L.MAIL_MASK + places * L.mask_words(vocab))
