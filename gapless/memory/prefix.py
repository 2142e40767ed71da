"""Digests of prompt prefixes, one a full page. Equal digests mean equal model, tenant and tokens."""

from __future__ import annotations

import sys
from hashlib import sha256

from gapless.base.records import Int32s

_FORMAT = b"gapless.kv.1"


class PrefixHasher:
    """Chained SHA-256 over tagged fields: format, model, tenant salt, then the tokens of page after page.

    `model` names all other inputs of KV. Digests may leave the process only if the name has the same meaning elsewhere.
    """

    def __init__(self, model: str, page_size: int) -> None:
        self.page_size = page_size
        self._head = b"".join(_field(tag, value) for tag, value in ((b"format", _FORMAT), (b"model", _bytes(model))))

    def root(self, salt: str, adapter: str = "") -> bytes:
        """Return the parent of a first page. `salt` separates tenants, an adapter's digest its KV from all other."""
        own = _field(b"adapter", _bytes(adapter)) if adapter else b""
        return sha256(self._head + _field(b"salt", _bytes(salt)) + own).digest()

    def after(self, parent: bytes, tokens: Int32s) -> list[bytes]:
        """Return the digests of the full pages of tokens after `parent`."""
        data, size, digests = tokens.astype("<i4", copy=False).tobytes(), 4 * self.page_size, []
        for start in range(0, len(data) - size + 1, size):
            parent = sha256(parent + data[start : start + size]).digest()
            digests.append(parent)
        return digests


class PrefixChain:
    """The digests of one sequence, computed as needed.

    Requests with equal prompts share the prompt's chain; past its full pages each has its own copy.
    """

    __slots__ = ("_common", "_hasher", "_like", "_pages", "_root", "adapter", "digests", "salt")

    def __init__(self, hasher: PrefixHasher, salt: str, pages: int, adapter: str = "") -> None:
        """`pages` are the full pages of the prompt."""
        self.digests: list[bytes] = []
        self._like: PrefixChain | None = None
        self._common = 0
        self.salt = salt
        self.adapter = adapter
        self._hasher = hasher
        self._root = hasher.root(salt, adapter)
        self._pages = pages

    def begins_like(self, other: PrefixChain, pages: int) -> None:
        """Share the first full pages of another chain: their digests are computed once."""
        self._like, self._common = (other._like, min(pages, other._common)) if other._like else (other, pages)

    def up_to(self, pages: int) -> PrefixChain:
        """Return the chain for a sequence with this many full pages: a separate copy if they go past the prompt."""
        if pages <= self._pages:
            return self
        chain = PrefixChain(self._hasher, self.salt, sys.maxsize, self.adapter)
        chain.digests = self.digests[: self._pages]
        return chain

    def reach(self, count: int, tokens: Int32s) -> list[bytes]:
        """Return at least `count` digests; `tokens` are the sequence's, from its first on."""
        assert count <= self._pages, "digests past the prompt that requests share"
        size, digests = self._hasher.page_size, self.digests
        if self._like and len(digests) < count:
            common = min(count, self._common)
            digests += self._like.reach(common, tokens)[len(digests) : common]
            self._like = self._like if common < self._common else None
        if (known := len(digests)) < count:
            digests += self._hasher.after(digests[-1] if digests else self._root, tokens[known * size : count * size])
        return digests


def _bytes(text: str) -> bytes:
    # A file name or a JSON string may hold lone surrogates.
    return text.encode("utf-8", "surrogatepass")


def _field(tag: bytes, value: bytes) -> bytes:
    # Length prefixes: no two lists of fields give the same bytes.
    return len(tag).to_bytes(4, "little") + tag + len(value).to_bytes(8, "little") + value
