"""Addresses as they may be shown."""

from __future__ import annotations


def hide_password(url: str) -> str:
    """A URL without a user's name and password, and without its query, which may hold a key.

    It need not be a proper URL: a person may have left out the scheme, or not escaped the password.
    """
    scheme, found, rest = url.partition("://")
    if not found:
        scheme, rest = "", url
    where = rest.partition("?")[0].partition("#")[0]
    if "@" in rest and "@" not in where:
        where = "…"
    return f"{scheme}{found}{where.rpartition('@')[2]}"
