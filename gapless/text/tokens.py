"""Bytes in vocabularies: the byte-level alphabet, and tokens of the form <0xAB>."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TypeVar

from tokenizers import Tokenizer

V = TypeVar("V")


def _alphabet() -> dict[str, int]:
    # Printable bytes stand for themselves; the others, in order, are the characters from 256 on.
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in set(kept)]
    return {chr(b): b for b in kept} | {chr(256 + i): b for i, b in enumerate(moved)}


_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
BYTE_OF = _alphabet()
"""Character of the byte-level alphabet -> byte."""


def byte_level_map(token: str) -> bytes:
    """Bytes of a byte-level token; a token with a character outside the alphabet stands for itself."""
    try:
        return bytes([BYTE_OF[c] for c in token])
    except KeyError:
        return token.encode()


def byte_token(token: str) -> int | None:
    """171 for `<0xAB>`; None for any other token."""
    return int(token[3:5], 16) if _BYTE_TOKEN.fullmatch(token) else None


def decoder_types(backend: Tokenizer) -> list[str]:
    """The decoder's steps, by type name; empty when tokens are joined by spaces."""
    if backend.decoder is None:
        return []
    state = json.loads(backend.decoder.__getstate__())
    return [step["type"] for step in state.get("decoders", [state])]


class Memo(dict[int, V]):
    """Token id -> a fact about it, looked up once."""

    def __init__(self, fact: Callable[[int], V]) -> None:
        super().__init__()
        self._fact = fact

    def __missing__(self, token: int) -> V:
        value = self[token] = self._fact(token)
        return value
