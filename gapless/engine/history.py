"""Records of the latest requests, for the debug endpoints: counts and times, no text and no tokens."""

from __future__ import annotations

from typing import NamedTuple

KEPT_REQUESTS = 500
"""Ended requests that are remembered."""


class RequestRecord(NamedTuple):
    """A request as the front saw it. Times are monotonic ns, 0 for what has not happened."""

    id: str
    keys: tuple[int, ...]
    """The engine's names of its completions."""
    arrival: int
    started: int
    first_token: int
    last_token: int
    prompt_tokens: int
    cached_tokens: int
    generation_tokens: int
    state: str
    """waiting, running or done"""
    finish_reason: str | None
    """Finish reason of its first completion; "error" when the whole request failed."""
