"""Bytes in vocabularies: the byte-level alphabet, and tokens of the form <0xAB>."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import TypeVar

from tokenizers import Tokenizer

V = TypeVar("V")


def _alphabet() -> dict[str, int]:
    # Printable bytes stand for themselves; the others, in order, are the characters from 256 on.
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in set(kept)]
    return {chr(b): b for b in kept} | {chr(256 + i): b for i, b in enumerate(moved)}


BYTE_OF = _alphabet()
"""Character of the byte-level alphabet -> byte."""


def byte_level_map(token: str) -> bytes:
    """Bytes of a byte-level token; a token with a character outside the alphabet stands for itself."""
    try:
        return bytes([BYTE_OF[c] for c in token])
    except KeyError:
        return token.encode()


def byte_ids(backend: Tokenizer) -> frozenset[int]:
    """Ids of the tokens <0x00> to <0xFF>, as far as the vocabulary has them."""
    found = (backend.token_to_id(form.format(byte)) for byte in range(256) for form in ("<0x{:02X}>", "<0x{:02x}>"))
    return frozenset(token for token in found if token is not None)


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
