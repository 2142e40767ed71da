"""A matcher for tests: an automaton over tokens, which allows a few of them by its state."""

from __future__ import annotations

import copy
import ctypes
import functools
import itertools
import random
from collections.abc import Sequence

import numpy as np

from gapless.base.errors import RequestError
from gapless.base.params import StructuredOutputs
from gapless.base.records import Int32s, MatcherFunctions

STATES = 40
FORCING = 1000
"""The seeds of automata from here on allow one token in most states, so that runs of tokens are certain."""
_LEXERS = itertools.count()
ASKED = StructuredOutputs(grammar="an automaton of tests")


@functools.lru_cache(maxsize=4096)
def allowed_in(seed: int, state: int, vocab: int) -> tuple[int, ...]:
    rng = random.Random(seed * STATES + state)
    counts = (1, 1, 1, 1, 5) if seed >= FORCING else (1, 2, 5, vocab // 2)
    return tuple(sorted(rng.sample(range(vocab), rng.choice(counts))))


def after(state: int, token: int) -> int:
    return (state * 31 + token * 7 + 1) % STATES


def allowed_after(seed: int, output: Sequence[int], vocab: int) -> tuple[int, ...]:
    """The tokens that may come after this output, by definition."""
    return allowed_in(seed, functools.reduce(after, output, 0), vocab)


class Automaton:
    """Asserts that it is never given a token that it did not allow."""

    texts = None

    def __init__(self, seed: int, vocab: int) -> None:
        self.seed, self.vocab = seed, vocab
        self.states = [0]
        self.lexer = (next(_LEXERS), 0)

    def allowed(self) -> tuple[int, ...]:
        return allowed_in(self.seed, self.states[-1], self.vocab)

    def advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            assert token in self.allowed(), f"token {token} is none of {self.allowed()}"
            self.states.append(after(self.states[-1], token))

    def rollback(self, count: int) -> None:
        del self.states[len(self.states) - count :]

    def copy(self) -> Automaton:
        other = copy.copy(self)
        other.states = [*self.states]
        return other

    def write_mask(self, words: Int32s) -> None:
        words[:] = 0
        for token in self.allowed():
            words.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)


class NativeAutomaton(Automaton):
    """Gives itself away as C functions, which take its number."""

    owned: dict[int, Automaton] = {}  # noqa: RUF012
    """Those that were given away, and not freed"""
    _numbers = itertools.count(1)

    def give_away(self) -> tuple[MatcherFunctions, int]:
        number = next(self._numbers)
        self.owned[number] = self
        return FUNCTIONS, number

    def failure(self, reason: str) -> RequestError:
        return RequestError(f"structured_outputs: {reason}", "structured_outputs")


@ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint32)
def _consume(number: int, token: int) -> int:
    matcher = NativeAutomaton.owned[number]
    if token not in matcher.allowed():
        return -1
    try:
        matcher.advance([token])
    except RuntimeError:
        return -1
    return 0


@ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
def _write_mask(number: int, words: int, nbytes: int) -> int:
    try:
        memory = (ctypes.c_int32 * (nbytes // 4)).from_address(words)
        NativeAutomaton.owned[number].write_mask(np.ctypeslib.as_array(memory))
    except RuntimeError:
        return -1
    return 0


@ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_size_t)
def _rollback(number: int, count: int) -> int:
    try:
        NativeAutomaton.owned[number].rollback(count)
    except RuntimeError:
        return -1
    return 0


_accepts = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda number: False)
_reason = ctypes.create_string_buffer(b"a bug of the matcher")
_error = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda number: ctypes.addressof(_reason))


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
def _copy(number: int) -> int:
    return NativeAutomaton.owned[number].copy().give_away()[1]


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _free(number: int) -> None:
    del NativeAutomaton.owned[number]


_CALLS = (_consume, _write_mask, _rollback, _accepts, _error, _copy, _free)
FUNCTIONS = MatcherFunctions(*(ctypes.cast(call, ctypes.c_void_p).value or 0 for call in _CALLS))
