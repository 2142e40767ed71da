"""Choice between loading pages and computing their tokens, by measured rates. No torch here."""

from __future__ import annotations

from gapless.pace.mean import CappedMean

HOST_SOURCE = -1
"""Source number of the host tier; the tiers below it have theirs from 0."""
PAGE_WEIGHT = 1 / 8
"""[weight] Weight of the latest time in a mean"""
TRIALS = 1 / 32
"""[share] Share of computing time spent on trial loads that do not pay, since a tier may have become faster."""


class LoadGate:
    """Mean recent times of a page of each source and of a prompt token. An unknown time counts as 0, so that it is
    tried. The first time of each is dropped: it includes one-time work such as connecting, and a first prompt precedes
    the first step without one."""

    def __init__(self, weighs: bool = True, least_tokens: int = 1) -> None:
        """Let every load pay unless the gate `weighs`. Steps of fewer than `least_tokens` prompt tokens are ignored."""
        self.weighs = weighs
        self._least_tokens = least_tokens
        self._saved_ns = 0.0
        self._step_ns, self._token_ns = CappedMean(PAGE_WEIGHT), CappedMean(PAGE_WEIGHT, skips=True)
        self._page_ns: dict[int, CappedMean] = {}

    def computed(self, tokens: int, ns: int) -> None:
        """Take in a step of this many prompt tokens. The time of a step without any is subtracted: a request with
        loaded pages needs a step too."""
        if not tokens:
            self._step_ns.add(ns)
        elif tokens >= self._least_tokens:
            self._token_ns.add(max(ns - self._step_ns.value, 1) / tokens)

    def fresh(self) -> LoadGate:
        """Return an unmeasured gate of the same kind."""
        return type(self)(self.weighs, self._least_tokens)

    def moved(self, source: int, pages: int, ns: float) -> None:
        """Take in a load of this many pages. A shorter time counts at once: no disturbance makes a copy look faster."""
        mean = self._page_ns.setdefault(source, CappedMean(PAGE_WEIGHT, skips=True))
        mean.add(ns / pages)
        mean.value = min(mean.value, ns / pages)

    def page_ns(self, source: int) -> float:
        """Return the time of a page of this source; 0 if unknown."""
        return self._page_ns[source].value if source in self._page_ns else 0.0

    def pays(self, tokens: int, pages: int, below_ns: float = 0.0) -> bool:
        """Return whether loading these pages of `tokens` prompt tokens takes no longer than computing them, or is due
        as a trial. Tiers below take `below_ns` to bring the missing ones to the host."""
        return self._longer_ns(tokens, pages, below_ns) <= self._saved_ns

    def begun(self, tokens: int, pages: int, below_ns: float) -> None:
        """Note the begin of a weighed load, which is the trial if it takes longer."""
        if self._longer_ns(tokens, pages, below_ns) > 0:
            self._saved_ns = 0.0

    def declined(self, tokens: int) -> None:
        """Count prompt tokens that are computed because a load would take longer."""
        self._saved_ns += TRIALS * tokens * self._token_ns.value

    def _longer_ns(self, tokens: int, pages: int, below_ns: float) -> float:
        if not (self.weighs and self._token_ns.value):
            return 0.0
        return pages * self.page_ns(HOST_SOURCE) + below_ns - tokens * self._token_ns.value
