"""Chunked attention: a token reads from the beginning of its chunk on. A checksum model stands for the layers."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from gapless.memory.groups import PageGroup
from gapless.testing.checksum import ChecksumModel

CHUNK = 24


class ChunkRule(NamedTuple):
    """A token reads the tokens of its chunk of `window` tokens, up to its own."""

    window: int
    kind: str = "chunk"

    def passed(self, tokens: int, page_size: int) -> range:
        return range(max(0, tokens - 1) // self.window * self.window // page_size)


class ChunkModel(ChecksumModel):
    """Its next token is a hash of all entries of the chunk, so a page given up too early changes it."""

    def groups(self) -> tuple[PageGroup, ...]:
        return (PageGroup("chunk", ChunkRule(CHUNK)),)

    def reads(self, position: Tensor, own: Tensor) -> Tensor:
        return (position <= own) & (position >= own // CHUNK * CHUNK)
