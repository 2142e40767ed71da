"""What a page must hold by its digest: the entries of the tokens that the digest stands for."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from gapless.loop.loop import Loop
from gapless.memory.prefix import PrefixHasher
from gapless.testing.checksum import PRIME, entry
from gapless.testing.world import World


class Contents:
    """Entries by digest, of every full page that the requests of a run can have."""

    def __init__(self, hasher: PrefixHasher) -> None:
        self._hasher = hasher
        self._entries: dict[bytes, Tensor] = {}
        self._passed: set[tuple[int, bytes]] = set()

    def know(self, sequences: Iterable[tuple[list[int], str]], adapter: str = "", shift: int = 0) -> None:
        """Tokens of whole requests, prompt and answer, with their salts. An adapter of this digest adds `shift`."""
        size = self._hasher.page_size
        for tokens, salt in sequences:
            entries = (entry(torch.tensor(tokens), torch.arange(len(tokens))) + shift) % PRIME
            digests = self._hasher.after(self._hasher.root(salt, adapter), np.array(tokens, np.int32))
            self._entries |= {digest: entries[n * size : (n + 1) * size] for n, digest in enumerate(digests)}

    def knows(self, digest: bytes) -> bool:
        return digest in self._entries

    def check_settled(self, loop: Loop, again: bool = False) -> None:
        """Every page that a transfer may read, by a digest of these tokens, holds what that means.

        Those that have passed are looked at only `again`.
        """
        for page, digest in loop.pools[0].digest_of.items():
            if self.knows(digest) and loop.pools[0].settled(page) and (again or (page, digest) not in self._passed):
                self.check(digest, whole(loop, page), f"page {page}")
                self._passed.add((page, digest))

    def check(self, digest: bytes, page: Tensor, where: str) -> None:
        """`page` [layers, 2, page_size, 1, 1] holds what its digest says."""
        wanted, found = self._entries[digest].tolist(), page[0, 0, :, 0, 0].tolist()
        assert found == wanted, f"{where}: entries are {found} where the digest means {wanted}"


def whole(loop: Loop, page: int) -> Tensor:
    """The entries of a page of the first group, of which every rank has a part."""
    executors, ranks = [loop.launcher.executor], loop.launcher.ranks
    if isinstance(ranks, World):
        executors += ranks.executors
    parts = [executor.program.cache.data[page] for executor in executors]
    return sum(parts[1:], parts[0]) % PRIME if len(parts) > 1 else parts[0]
