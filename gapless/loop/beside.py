"""Limit on prompt tokens that run beside decoding rows, which get no token before the step ends."""

from __future__ import annotations

UNNOTICED_NS = 100_000_000
"""A step with chunks may take this long in any case: text that halts for a tenth of a second still reads as flowing."""
STALL = 8
"""A step with chunks may also take this many times the time of one without."""
LEAST_TOKENS = 256
"""Prompt tokens of a step, at least, so that every prompt ends. Fewer cost more time each: with Qwen3-0.6B's shape on
two EPYC cores a prompt of 1,500 tokens beside four rows takes 11 % longer in chunks of 256, and 40 % in chunks of 128.
"""
_WEIGHT = 1 / 8


class Beside:
    """`tokens` for which a step takes no longer than the bound, as far as measured times tell.

    A step with chunks is taken to last as long as one of decoding rows alone, and a time for each prompt token. Both
    are means over the last steps, so they follow longer contexts, more rows and a busier machine. Steps of fewer than
    LEAST_TOKENS prompt tokens say little of each token, and are left out.
    """

    def __init__(self) -> None:
        self.tokens = LEAST_TOKENS
        self._step_ns = self._token_ns = 0.0

    def learn(self, decode: int, chunk_tokens: int, ns: int) -> None:
        """Take in a measured step of `decode` rows and `chunk_tokens` prompt tokens."""
        if not chunk_tokens:
            self._step_ns = _mean(self._step_ns, ns)
        elif chunk_tokens >= LEAST_TOKENS:
            rest = ns - self._step_ns if decode else ns
            self._token_ns = _mean(self._token_ns, max(rest, 1) / chunk_tokens)
        if self._token_ns:
            spare = max(UNNOTICED_NS, STALL * self._step_ns) - self._step_ns
            self.tokens = max(LEAST_TOKENS, int(spare / self._token_ns))


def _mean(before: float, value: float) -> float:
    return before + (value - before) * _WEIGHT if before else value
