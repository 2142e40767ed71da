"""API keys. Every route says who may call it; without a key that fits, a user route answers 401."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from enum import Enum

from starlette.requests import Request

from gapless.server.errors import ApiError


class Access(Enum):
    """Callers that a route admits."""

    PUBLIC = "public"
    USER = "user"


class KeyRing:
    """Holds digests of the keys, never the keys. Without keys every caller is admitted."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def __repr__(self) -> str:
        return f"KeyRing({len(self._digests)} keys)"

    def tenant(self, request: Request) -> str:
        """Name of the caller, made from its key; '' when no keys are set. Raises ApiError 401."""
        if not self._digests:
            return ""
        digest = hashlib.sha256(_presented(request)).digest()
        # Bytes, and no early exit: the time taken tells nothing about the keys.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise ApiError(
                401,
                "a valid API key is needed: send it as 'Authorization: Bearer KEY'",
                "authentication_error",
                code="invalid_api_key",
                headers={"www-authenticate": "Bearer"},
            )
        return digest.hex()[:32]


def _presented(request: Request) -> bytes:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip().encode("latin-1")
    return request.headers.get("x-api-key", "").encode("latin-1")
