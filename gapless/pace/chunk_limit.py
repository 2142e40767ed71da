"""Limit on the prompt tokens that share a step with decoding rows, which get no token before the step ends.

The limit costs throughput: every step has a fixed price, and smaller chunks are more steps, which rows whose prompts
still wait miss. It brings even token times to the rows that decode. `tests/loop/test_waves.py` plays loads on machines
of several speeds, and holds the constants to 5 % of the tokens.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from gapless.pace.mean import Mean

UNNOTICED_NS = 20_000_000
"""[ns] A step with chunks may always take this long: fifty tokens a second still read as flowing text."""
STALL = 3
"""[times] A step with chunks may take this many times as long as its decoding rows: prompts get two thirds of the
time."""
SOON = 12
"""[steps] Steps within which all prompts that could have a row should run. If more arrive than STALL allows, they would
queue, and few rows would decode."""
LONGEST = 8
"""[times] Longest step, in times of its decoding rows, that SOON may ask for."""
LEAST_CHUNK_TOKENS = 128
"""[tokens] Least prompt tokens of a step: every prompt ends, and products are efficient with such chunks."""
LEAST_BOUNDED = 16
"""[tokens] Least prompt tokens of a step under a user's bound, which comes first."""
BOUND_SPREADS = 3
"""[deviations] Mean deviations of measured from expected times that a bound leaves room for"""
BOUND_MARGIN = 0.03
"""[share] Share of a bound kept free for costs outside the terms"""
FIT_WEIGHT = 1 / 16
"""[weight] Weight of the latest step of a kind"""
_UNITS = np.array([1.0, 16.0, 256.0])
"""Units of the terms of a step's time: steps, rows, tokens."""
_RIDGE = np.diag([1e-4, 1e-4, 1e-6])
"""Weight of small terms, as a share of the measurements. If all steps were alike, the time goes to tokens."""

OverrunCause = Literal["rows", "chunk", "late"]
"""Cause of a step over the bound: its rows alone take longer, the least chunk beside them does, or the forecast was too
low."""


class StepTimes:
    """The time of a step: a price of its own, one for each decoding row, and one for each prompt token.

    Fitted to the latest steps with and without prompt tokens, by relative error. Both kinds keep their weight, since
    under steady load either may be rare.
    """

    def __init__(self) -> None:
        self._products = np.zeros((2, 3, 3))
        self._moments = np.zeros((2, 3))
        self._terms = np.zeros(3)
        self.token_ns = 0.0
        """Time of a prompt token; 0 before the first step with one."""
        self.spread_ns = Mean(FIT_WEIGHT)
        """Deviation of a step's time from the forecast"""

    def learn(self, rows: int, tokens: int, ns: int) -> None:
        """Take in a measured step of `rows` decoding rows and `tokens` prompt tokens."""
        ns, kind = max(ns, 1), int(tokens > 0)
        if tokens and self.token_ns:
            self.spread_ns.add(abs(ns - self.rows_ns(rows) - tokens * self.token_ns))
        step = np.array([1.0, rows, tokens]) / _UNITS / ns
        self._products[kind] = (1 - FIT_WEIGHT) * self._products[kind] + np.outer(step, step)
        self._moments[kind] = (1 - FIT_WEIGHT) * self._moments[kind] + step
        if tokens:
            self._fit(ns / tokens)

    def _fit(self, at_most_ns: float) -> None:
        """Solve for the terms after a step with prompt tokens; `at_most_ns` bounds the time of one of its tokens."""
        products = self._products.sum(0)
        ridge = _RIDGE * np.trace(products) / 3
        self._terms = np.linalg.solve(products + ridge, self._moments.sum(0)) / _UNITS
        token_ns = float(self._terms[2])
        if token_ns > 0:  # else all steps were alike, and noise decided
            self.token_ns = token_ns
        elif not self.token_ns:
            self.token_ns = at_most_ns

    def rows_ns(self, rows: int) -> float:
        """Return the time of a step without its prompt tokens."""
        return max(0.0, float(self._terms[0] + self._terms[1] * rows))


class ChunkLimit:
    """Number of prompt tokens that may share a step with decoding rows, by measured times.

    Without a bound a step takes UNNOTICED_NS, or STALL times as long as its rows alone, whichever is longer, and up to
    LONGEST times that if many prompts wait. With a user's bound `most_ns`, as many tokens run as fit. At least
    LEAST_CHUNK_TOKENS, or LEAST_BOUNDED, always run.
    """

    def __init__(self, most_ns: int = 0) -> None:
        self.most_ns = most_ns
        """Longest time of a step with decoding rows; 0: unbounded."""
        self._least = LEAST_BOUNDED if most_ns else LEAST_CHUNK_TOKENS
        self._times = StepTimes()

    def tokens(self, rows: int, waiting: int) -> int:
        """Return how many of the `waiting` prompt tokens may share a step with `rows` decoding rows."""
        times = self._times
        if not times.token_ns:
            return self._least
        rows_ns = times.rows_ns(rows)
        if self.most_ns:
            most = (1 - BOUND_MARGIN) * self.most_ns - BOUND_SPREADS * times.spread_ns.value
        else:
            soon = rows_ns + waiting / SOON * times.token_ns
            most = max(UNNOTICED_NS, STALL * rows_ns, min(soon, LONGEST * rows_ns))
        return max(self._least, int((most - rows_ns) / times.token_ns))

    def learn(self, rows: int, chunk_tokens: int, ns: int) -> None:
        """Take in a measured step of `rows` decoding rows and `chunk_tokens` prompt tokens."""
        self._times.learn(rows, chunk_tokens, ns)

    def over(self, rows: int, chunk_tokens: int, ns: int) -> OverrunCause | None:
        """Return the cause of a step over the bound; None if it kept it, no row decoded, or there is no bound."""
        if not rows or not self.most_ns or ns <= self.most_ns:
            return None
        if not chunk_tokens or self._times.rows_ns(rows) > self.most_ns:
            return "rows"
        return "chunk" if chunk_tokens <= self._least else "late"
