"""Digests of prompt prefixes, one a full page. Equal digests mean equal model, tenant and tokens."""

from __future__ import annotations

from hashlib import sha256

from gapless.base.records import Int32s

_FORMAT = b"gapless.kv.1"


class PrefixHasher:
    """Chained SHA-256 over tagged fields: format, model, tenant salt, then the tokens of page after page."""

    def __init__(self, model: str, page_size: int) -> None:
        self._page_size = page_size
        self._head = b"".join(_field(tag, value) for tag, value in ((b"format", _FORMAT), (b"model", _bytes(model))))

    def root(self, salt: str) -> bytes:
        """The parent of a first page. `salt` keeps tenants apart."""
        return sha256(self._head + _field(b"salt", _bytes(salt))).digest()

    def page(self, parent: bytes, tokens: Int32s) -> bytes:
        """Digest of one full page of tokens behind `parent`."""
        return sha256(parent + tokens.astype("<i4", copy=False).tobytes()).digest()

    def pages(self, tokens: Int32s, salt: str) -> list[bytes]:
        """Digests of all full pages of a prompt."""
        size, parent, digests = self._page_size, self.root(salt), []
        for end in range(size, len(tokens) + 1, size):
            parent = self.page(parent, tokens[end - size : end])
            digests.append(parent)
        return digests


def _bytes(text: str) -> bytes:
    # A file name or a JSON string may hold lone surrogates.
    return text.encode("utf-8", "surrogatepass")


def _field(tag: bytes, value: bytes) -> bytes:
    # Lengths in front, so that no two lists of fields give the same bytes.
    return len(tag).to_bytes(4, "little") + tag + len(value).to_bytes(8, "little") + value
