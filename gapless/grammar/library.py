"""llguidance's C interface, which the Python package's library exports beside its own.

Its functions need no interpreter, so that threads of ours follow outputs without one (`loop.native`). Tokenization is
greedy: a grammar then allows every way to write its text, and no mask calls back into Python.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from functools import cache
from typing import Any

import llguidance
import numpy as np

from gapless.base.records import Int32s, MatcherFunctions

VERSION = b"llguidance@1.9."
"""The version that the structures below were written for."""
MESSAGE_BYTES = 4096
SPECIAL = b"\xff"
"""First byte of a special token."""
SLICES = [rf'[^"\\\x00-\x1F\x7F]{{1,{most}}}' for most in (4, 7, 10, 16, 30)] + [r'[^"\\\x00-\x1F\x7F]+']
"""Tokens that a string may have together, the short ones first: a mask is the sum of what its string takes whole, and
looks at each of the others. The library's own begin at 10 characters, and take 1.6 times as long for strings of up to
20 or 200 characters."""


class LlgLimits(ctypes.Structure):
    """LlgParserLimits."""

    _fields_ = (
        ("max_items_in_row", ctypes.c_size_t),
        ("initial_lexer_fuel", ctypes.c_uint64),
        ("step_lexer_fuel", ctypes.c_uint64),
        ("step_max_items", ctypes.c_size_t),
        ("max_lexer_states", ctypes.c_size_t),
        ("max_grammar_size", ctypes.c_size_t),
        ("precompute_large_lexemes", ctypes.c_bool),
        ("verbose_errors", ctypes.c_bool),
    )


class _MatcherInit(ctypes.Structure):
    """LlgConstraintInit."""

    _fields_ = (
        ("tokenizer", ctypes.c_void_p),
        ("log_buffer_level", ctypes.c_uint32),
        ("log_stderr_level", ctypes.c_uint32),
        ("ff_tokens_ok", ctypes.c_bool),
        ("backtrack_ok", ctypes.c_bool),
        ("limits", LlgLimits),
    )


class _TokenizerInit(ctypes.Structure):
    """LlgTokenizerInitV2."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("vocab_size", ctypes.c_uint32),
        ("tok_eos", ctypes.c_uint32),
        ("token_lens", ctypes.c_void_p),
        ("token_bytes", ctypes.c_char_p),
        ("tokenizer_json", ctypes.c_char_p),
        ("tokenize_assumes_string", ctypes.c_bool),
        ("tokenize_fn", ctypes.c_void_p),
        ("use_approximate_greedy_tokenize_fn", ctypes.c_bool),
        ("tokenize_user_data", ctypes.c_void_p),
        ("slices", ctypes.c_void_p),
        ("tok_eos_extra", ctypes.c_void_p),
        ("tok_eos_extra_count", ctypes.c_uint32),
    )


class LlgMatcher:
    """A matcher of llguidance's. One thread at a time uses it."""

    def __init__(self, pointer: int) -> None:
        self.pointer = pointer
        self._free = weakref.finalize(self, library().llg_free_matcher, pointer)
        self._free.atexit = False

    @classmethod
    def compile(cls, tokens: LlgTokens, grammar: str, limits: LlgLimits) -> LlgMatcher:
        """Compile a grammar. Afterwards `error` has the failure, if any."""
        init = _init(tokens, limits)
        return cls(library().llg_new_matcher(ctypes.byref(init), b"guidance", grammar.encode()))

    def copy(self) -> LlgMatcher:
        return LlgMatcher(library().llg_clone_matcher(self.pointer))

    def give_away(self) -> int:
        """Return the pointer, which the caller now owns."""
        self._free.detach()
        return self.pointer

    def consume(self, token: int) -> bool:
        """Take over a token. Returns whether it was allowed."""
        return bool(library().llg_matcher_consume_token(self.pointer, token) == 0)

    def rollback(self, count: int) -> bool:
        """Forget the last `count` tokens. Returns whether there were as many."""
        return bool(library().llg_matcher_rollback(self.pointer, count) == 0)

    def write_mask(self, words: Int32s) -> bool:
        """Write the tokens that may come next, a bit each. Returns False when that failed."""
        return bool(library().llg_matcher_compute_mask_into(self.pointer, words.ctypes.data, words.nbytes) == 0)

    @property
    def accepts(self) -> bool:
        """Whether the output may end here."""
        return bool(library().llg_matcher_is_accepting(self.pointer))

    @property
    def stopped(self) -> bool:
        """Whether the output can only end here."""
        return bool(library().llg_matcher_is_stopped(self.pointer))

    @property
    def error(self) -> str:
        """The reason why the matcher cannot continue; empty for none."""
        return (library().llg_matcher_get_error(self.pointer) or b"").decode(errors="replace")


class LlgTokens:
    """A vocabulary of llguidance's."""

    def __init__(self, tokens: Sequence[bytes], special: frozenset[int], ends: Sequence[int]) -> None:
        """`ends` are the ids of the end-of-sequence tokens, one at least."""
        self.size = len(tokens)
        marked = [SPECIAL + text if token in special else text for token, text in enumerate(tokens)]
        lengths, others = np.array([len(text) for text in marked], np.uint32), np.array(ends[1:], np.uint32)
        slices = (ctypes.c_char_p * (len(SLICES) + 1))(*[one.encode() for one in SLICES], None)
        init = _TokenizerInit(
            ctypes.sizeof(_TokenizerInit), self.size, ends[0], lengths.ctypes.data, b"".join(marked),
            use_approximate_greedy_tokenize_fn=True, slices=ctypes.cast(slices, ctypes.c_void_p),
            tok_eos_extra=others.ctypes.data, tok_eos_extra_count=len(others),
        )  # fmt: skip
        message = ctypes.create_string_buffer(MESSAGE_BYTES)
        self.pointer = library().llg_new_tokenizer_v2(ctypes.byref(init), message, MESSAGE_BYTES)
        assert self.pointer, message.value
        weakref.finalize(self, library().llg_free_tokenizer, self.pointer).atexit = False

    def tokenize(self, text: str) -> list[int]:
        """Return the tokens of a text, the longest first."""
        data = text.encode()
        found = (ctypes.c_uint32 * len(data))()
        count = library().llg_tokenize_bytes(self.pointer, data, len(data), found, len(data))
        return list(found[:count])


def warnings(tokens: LlgTokens, grammar: str, limits: LlgLimits) -> str:
    """Return the reason why a grammar is inexact or cannot be compiled; empty for none."""
    init, message = _init(tokens, limits), ctypes.create_string_buffer(MESSAGE_BYTES)
    library().llg_validate_grammar(ctypes.byref(init), b"guidance", grammar.encode(), message, MESSAGE_BYTES)
    return message.value.decode(errors="replace")


@cache
def matcher_functions() -> MatcherFunctions:
    """Return the addresses of the functions of every LlgMatcher."""
    names = ("consume_token", "compute_mask_into", "rollback", "is_accepting", "get_error")
    found = [getattr(library(), f"llg_matcher_{name}") for name in names]
    found += [library().llg_clone_matcher, library().llg_free_matcher]
    return MatcherFunctions(*(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in found))


@cache
def library() -> Any:
    """Return llguidance's library, with the types of the functions used here.

    Raises:
        ImportError: this llguidance has another C interface, or none.
    """
    try:
        found = ctypes.CDLL(llguidance._lib.__file__)
        _declare(found)
    except (AttributeError, OSError) as error:
        raise ImportError(f"this build of llguidance has no C interface: {error}") from error
    if not found.llg_get_version().startswith(VERSION):
        raise ImportError(f"llguidance {found.llg_get_version().decode()} is not known: {VERSION.decode()}x is")
    return found


def _declare(found: Any) -> None:
    pointer, text, size, flag = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_bool
    number, code = ctypes.c_uint32, ctypes.c_int32
    for name, result, *arguments in (
        ("get_version", text),
        ("new_tokenizer_v2", pointer, pointer, text, size),
        ("free_tokenizer", None, pointer),
        ("tokenize_bytes", size, pointer, text, size, pointer, size),
        ("new_matcher", pointer, pointer, text, text),
        ("clone_matcher", pointer, pointer),
        ("free_matcher", None, pointer),
        ("validate_grammar", code, pointer, text, text, text, size),
        ("matcher_consume_token", code, pointer, number),
        ("matcher_rollback", code, pointer, size),
        ("matcher_compute_mask_into", code, pointer, pointer, size),
        ("matcher_is_accepting", flag, pointer),
        ("matcher_is_stopped", flag, pointer),
        ("matcher_get_error", text, pointer),
    ):
        function = getattr(found, f"llg_{name}")
        function.restype, function.argtypes = result, arguments


def _init(tokens: LlgTokens, limits: LlgLimits) -> _MatcherInit:
    return _MatcherInit(tokens.pointer, limits=limits)
