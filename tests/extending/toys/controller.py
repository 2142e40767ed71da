"""A limit of 64 prompt tokens beside decoding rows, whatever such steps take."""

from __future__ import annotations

from gapless.pace.chunk_limit import ChunkLimit


class FixedChunks(ChunkLimit):
    def tokens(self, rows: int, waiting: int) -> int:
        return 64
