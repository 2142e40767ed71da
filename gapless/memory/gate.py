"""Decides whether loading pages takes less than computing their tokens, by measured rates. No torch here."""

from __future__ import annotations

HOST = -1
"""The host tier as the source of a load; the tiers below it are their places, from 0."""
_WEIGHT = 1 / 8
TRIALS = 1 / 32
"""The share of computing time that loads may cost which do not pay: now and then one is begun, since a tier may have
become faster."""


class LoadGate:
    """Keeps means of what a page of each source and a prompt token have taken lately. What is not known takes no time,
    so that it is tried. The first time of each does not count: it includes what is done once, such as connecting,
    and a first prompt comes before it is known what a step takes without one."""

    def __init__(self, weighs: bool = True, least_tokens: int = 1) -> None:
        """Let every load pay unless the gate `weighs`. Steps of fewer than `least_tokens` prompt tokens say little."""
        self.weighs = weighs
        self._least_tokens = least_tokens
        self._step_ns = self._saved_ns = 0.0
        self._token_ns: float | None = None
        self._page_ns: dict[int, float] = {}

    def computed(self, tokens: int, ns: int) -> None:
        """A step of this many prompt tokens took this long. What one without any takes is no part of theirs: a request
        whose pages are loaded needs a step too."""
        if not tokens:
            self._step_ns = _mean(self._step_ns, ns)
        elif tokens >= self._least_tokens:
            self._token_ns = _mean(self._token_ns, max(ns - self._step_ns, 1) / tokens)

    def fresh(self) -> LoadGate:
        """Return a gate of the same kind that has measured nothing."""
        return LoadGate(self.weighs, self._least_tokens)

    def moved(self, source: int, pages: int, ns: float) -> None:
        """A load of this many pages took this long. A shorter time counts at once: nothing makes a copy look faster."""
        page_ns = ns / pages
        self._page_ns[source] = min(page_ns, _mean(self._page_ns.get(source), page_ns))

    def page_ns(self, source: int) -> float:
        """Return what a page of this source takes; 0 where it is not known."""
        return self._page_ns.get(source, 0.0)

    def pays(self, tokens: int, pages: int, below_ns: float = 0.0) -> bool:
        """Return whether loading these pages, which hold `tokens` prompt tokens, takes no longer than computing them,
        or is due as a trial. Tiers below take `below_ns` to bring to the host what it lacks of them."""
        return self._longer_ns(tokens, pages, below_ns) <= self._saved_ns

    def begun(self, tokens: int, pages: int, below_ns: float) -> None:
        """A load that was weighed begins: if it takes longer, that is the trial."""
        if self._longer_ns(tokens, pages, below_ns) > 0:
            self._saved_ns = 0.0

    def declined(self, tokens: int) -> None:
        """Note that these prompt tokens are computed, since loading them takes longer."""
        self._saved_ns += TRIALS * tokens * (self._token_ns or 0.0)

    def _longer_ns(self, tokens: int, pages: int, below_ns: float) -> float:
        if not (self.weighs and self._token_ns):
            return 0.0
        return pages * self.page_ns(HOST) + below_ns - tokens * self._token_ns


def _mean(before: float | None, value: float) -> float:
    """Return the mean after another value. One that is far too large, as on a busy machine, counts twice the mean."""
    if before is None:
        return 0.0
    return before + min(value - before, before) * _WEIGHT if before else value
