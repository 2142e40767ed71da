"""API keys. Every route declares its callers; without a key that fits, a user route answers 401."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from enum import Enum
from ipaddress import IPv4Address, IPv6Address, ip_address
from urllib.parse import urlsplit

from starlette.requests import Request

from gapless.server.errors import ApiError


class Access(Enum):
    """Callers that a route admits."""

    PUBLIC = "public"
    USER = "user"
    OPERATOR = "operator"
    """Callers with the operator's key; where there is none, users on this machine"""


class KeyRing:
    """Holds digests of the keys, never the keys. Without keys every caller is a user."""

    def __init__(self, keys: Iterable[str], operator_keys: Iterable[str] = ()) -> None:
        self._users, self._operators = (
            [hashlib.sha256(key.encode()).digest() for key in some] for some in (keys, operator_keys)
        )

    def admit(self, request: Request, access: Access) -> str:
        """Return the tenant, a name made from the caller's key, or '' where none is needed. Raises ApiError 401."""
        if access is Access.PUBLIC:
            return ""
        if access is Access.OPERATOR and self._operators:
            return _tenant(request, self._operators, "the operator's key")
        if access is Access.OPERATOR and not _is_local(request):
            raise _unauthorized("the operator's key", "; this server has none, so it answers to its own machine alone")
        return _tenant(request, self._users + self._operators, "a valid API key") if self._users else ""


def _tenant(request: Request, known: list[bytes], what: str) -> str:
    digest = hashlib.sha256(_presented(request)).digest()
    # Bytes, and no early exit: the time taken reveals nothing about the keys.
    matches = [hmac.compare_digest(digest, one) for one in known]
    if not any(matches):
        raise _unauthorized(what)
    return digest.hex()[:32]


def _unauthorized(what: str, more: str = "") -> ApiError:
    text = f"{what} is needed: send it as 'Authorization: Bearer KEY'{more}"
    return ApiError(401, text, "authentication_error", code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _is_local(request: Request) -> bool:
    """Return whether the caller is on this machine, and means it: on a UNIX socket it has no address.

    A web page of others, in a browser here, comes under a name that they made point here (DNS rebinding), or posts
    without asking first, and then names its origin, or null.
    """
    if request.client is None or not request.client.host:
        return True
    named, origin = request.headers.get("host", ""), request.headers.get("origin")
    try:
        host = urlsplit(f"//{named}").hostname or ""
        if origin is not None and request.method == "POST" and urlsplit(origin).netloc != named:
            return False
    except ValueError:
        return False
    return _is_loopback(request.client.host) and (host == "localhost" or _address(host) is not None)


def _is_loopback(text: str) -> bool:
    address = _address(text)
    mapped = getattr(address, "ipv4_mapped", None)  # how IPv4 callers arrive on a socket for both
    return address is not None and (mapped or address).is_loopback


def _address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _presented(request: Request) -> bytes:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip().encode("latin-1")
    return request.headers.get("x-api-key", "").encode("latin-1")
