"""Translates regexes and grammars of llama.cpp (GBNF) to Lark's syntax. Every fault is a ValueError."""

from __future__ import annotations

from llguidance import regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

MAX_GBNF_BYTES = 16 << 10
"""Bytes of a grammar in llama.cpp's syntax, whose translation is Python, and slow."""


def from_regex(text: str) -> str:
    """Return a regex as a terminal."""
    if (len(text) - len(text.rstrip("\\"))) % 2:  # the translation would drop it
        raise ValueError("incomplete escape sequence: write \\\\ for the character")
    # Digits are 0 to 9 alone: which others there are differs between the Unicode of libraries.
    return f"/{regex_to_lark(text, 'd')}/" if text else '""'  # two slashes begin a comment


def from_grammar(text: str) -> str:
    """Return a grammar, which may be in llama.cpp's syntax, as one."""
    if "::=" not in text:
        return text
    if len(text) > MAX_GBNF_BYTES:
        raise ValueError(f"a grammar of llama.cpp may have {MAX_GBNF_BYTES:,} bytes")
    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(str(error)) from error
