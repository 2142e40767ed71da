"""Limit on prompt tokens that run beside decoding rows, which get no token before the step ends.

What such a limit costs: a step has a price of its own, whatever runs in it, and smaller chunks are more steps, in which
the rows whose prompts still wait do not take part. What it brings: rows that decode get their tokens as evenly as that.
`tests/loop/test_waves.py` plays loads on machines of several speeds, and holds the constants to 5 % of the tokens.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

UNNOTICED_NS = 20_000_000
"""A step with chunks may take this long in any case: fifty tokens a second still read as flowing text."""
STALL = 3
"""A step with chunks may also take this many times what its decoding rows take in it: prompts get two thirds of the
time."""
SOON = 12
"""Steps in which all prompts that could have a row shall have run. Where more of them come than STALL lets through,
they would queue, and few rows decode."""
LONGEST = 8
"""A step takes at most this many times what its decoding rows take in it, for the sake of SOON."""
LEAST_TOKENS = 128
"""Prompt tokens of a step, at least, so that every prompt ends, in chunks that products are efficient with."""
LEAST_BOUNDED = 16
"""Prompt tokens of a step with a user's bound, at least: it has the say."""
SPREADS = 3
"""Mean deviations of measured from expected times that a bound leaves room for"""
MARGIN = 0.03
"""Share of a bound that is left for what the terms leave out"""
_WEIGHT = 1 / 16
_KEEP = 1 - 1 / 16
_UNITS = np.array([1.0, 16.0, 256.0])
"""What the terms of a step's time are counted in: steps, rows, tokens."""
_RIDGE = np.diag([1e-4, 1e-4, 1e-6])
"""What speaks for smaller terms, as a share of what was measured. Where steps were alike, tokens took the
time."""

Cause = Literal["rows", "chunk", "late"]
"""Why a step took longer than the bound: its rows alone do, the least chunk beside them does, or it was foreseen to
take less."""


class StepTimes:
    """The time of a step: a price of its own, one for each decoding row, and one for each prompt token.

    Fitted to the latest steps with prompt tokens and the latest without, each by the share by which it is off. Both
    kinds keep their weight, since under steady load either may be rare.
    """

    def __init__(self) -> None:
        self._products = np.zeros((2, 3, 3))
        self._moments = np.zeros((2, 3))
        self._terms = np.zeros(3)
        self.token_ns = 0.0
        """Time of a prompt token; 0 until a step with some has been learnt."""
        self.spread_ns = 0.0
        """Mean deviation of a step's time from what was expected"""

    def learn(self, rows: int, tokens: int, ns: int) -> None:
        """Take in a measured step of `rows` decoding rows and `tokens` prompt tokens."""
        ns, kind = max(ns, 1), int(tokens > 0)
        if tokens and self.token_ns:
            off = abs(ns - self.rows_ns(rows) - tokens * self.token_ns)
            self.spread_ns += (off - self.spread_ns) * _WEIGHT
        step = np.array([1.0, rows, tokens]) / _UNITS / ns
        self._products[kind] = _KEEP * self._products[kind] + np.outer(step, step)
        self._moments[kind] = _KEEP * self._moments[kind] + step
        if tokens:
            self._fit(ns / tokens)

    def _fit(self, at_most_ns: float) -> None:
        """Solve for the terms, once a step with prompt tokens has come; a token of it took at most `at_most_ns`."""
        products = self._products.sum(0)
        ridge = _RIDGE * np.trace(products) / 3
        self._terms = np.linalg.solve(products + ridge, self._moments.sum(0)) / _UNITS
        token_ns = float(self._terms[2])
        if token_ns > 0:  # else all steps were alike, and noise decided
            self.token_ns = token_ns
        elif not self.token_ns:
            self.token_ns = at_most_ns

    def rows_ns(self, rows: int) -> float:
        """Return what a step takes without the time of its prompt tokens."""
        return max(0.0, float(self._terms[0] + self._terms[1] * rows))


class Beside:
    """How many prompt tokens may run in a step in which rows decode, by measured times.

    Without a bound a step takes UNNOTICED_NS, or STALL times what its rows take, whichever is longer, and up to LONGEST
    times that where many prompts wait. With the bound `most_ns`, which is a user's, as many tokens run as fit. At least
    LEAST_TOKENS, or LEAST_BOUNDED, run in any case.
    """

    def __init__(self, most_ns: int = 0) -> None:
        self.most_ns = most_ns
        """Time that steps in which rows decode shall take at most; 0: no such bound."""
        self._least = LEAST_BOUNDED if most_ns else LEAST_TOKENS
        self._times = StepTimes()

    def tokens(self, rows: int, waiting: int) -> int:
        """Return how many prompt tokens may run beside `rows` decoding rows, of the `waiting` ones that could."""
        times = self._times
        if not times.token_ns:
            return self._least
        rows_ns = times.rows_ns(rows)
        if self.most_ns:
            most = (1 - MARGIN) * self.most_ns - SPREADS * times.spread_ns
        else:
            soon = rows_ns + waiting / SOON * times.token_ns
            most = max(UNNOTICED_NS, STALL * rows_ns, min(soon, LONGEST * rows_ns))
        return max(self._least, int((most - rows_ns) / times.token_ns))

    def learn(self, rows: int, chunk_tokens: int, ns: int) -> None:
        """Take in a measured step of `rows` decoding rows and `chunk_tokens` prompt tokens."""
        self._times.learn(rows, chunk_tokens, ns)

    def over(self, rows: int, chunk_tokens: int, ns: int) -> Cause | None:
        """Return why a step took longer than the bound; None where it did not, no row decoded, or there is none."""
        if not rows or not self.most_ns or ns <= self.most_ns:
            return None
        if not chunk_tokens or self._times.rows_ns(rows) > self.most_ns:
            return "rows"
        return "chunk" if chunk_tokens <= self._least else "late"
