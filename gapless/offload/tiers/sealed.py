"""The head beside a page that a server keeps, before or after it: size and checksum, sealed with namespace and key."""

from __future__ import annotations

import struct

from gapless.offload.tiers.seam import SEAL_BYTES, TierPage, seal

_HEAD = struct.Struct("<8sQq")
"""Magic, bytes of the page, checksum"""
_MAGIC = b"gaplesK1"
HEAD_BYTES = _HEAD.size + SEAL_BYTES


def head_of(namespace: bytes, page: TierPage) -> bytes:
    body = _HEAD.pack(_MAGIC, len(page.slot), page.checksum)
    return body + seal(namespace, page.key, body)


def checksum_in(head: bytes | memoryview, namespace: bytes, page: TierPage) -> int | None:
    """Return the checksum in the head of a received page, None if the head is another page's."""
    checksum = int(_HEAD.unpack(head[: _HEAD.size])[2])
    return checksum if bytes(head) == head_of(namespace, page._replace(checksum=checksum)) else None
