"""A sequence: one request as the planner sees it, in counts."""

from __future__ import annotations

from enum import Enum, auto

from gapless.base.records import Int32s


class State(Enum):
    WAITING = auto()
    """In the queue: no row, no pages."""
    PREFILL = auto()
    """On a row; known tokens are left to run."""
    DECODE = auto()
    """In the decode set: takes part in every step."""
    ENTERING = auto()
    """Enters the decode set as soon as the pool has its next page."""
    ENDING = auto()
    """Every step that it can need is in flight; out of the decode set until the device's word arrives."""
    HELD = auto()
    """Chosen for preemption; waits until nothing of it is in flight."""
    DONE = auto()


class Sequence:
    """Counts and claims of one request. `tokens` and `digests` are carried, never looked into."""

    __slots__ = (
        "base", "cached", "computed", "digests", "key", "last_step", "length", "max_len", "order", "pages",
        "priority", "row", "scored", "settled_pages", "skips", "state", "tick", "to_score", "tokens",
    )  # fmt: skip

    def __init__(self, key: int, tokens: Int32s, digests: list[bytes], max_len: int, priority: int, order: int) -> None:
        self.key = key
        self.tokens: Int32s | None = tokens
        """Known tokens while the sequence has no row; the row table keeps them otherwise."""
        self.digests = digests
        """Of the full pages of known tokens; may lag while decoding."""
        self.length = len(tokens)
        """Known tokens when it last took a row."""
        self.max_len = max_len
        self.priority = priority
        self.order = order
        self.state = State.WAITING
        self.row = 0
        self.pages: list[int] = []
        self.cached = 0
        """Known tokens whose KV the prefix index gave."""
        self.computed = 0
        """Known tokens whose KV is planned."""
        self.base = 0
        self.tick = 0
        """In the decode set, tick t runs position base + t - tick."""
        self.last_step = 0
        """Last step planned with this row; not kept up while in the decode set."""
        self.settled_pages = 0
        """Full pages whose tokens are settled, in front."""
        self.to_score = 0
        """Prompt positions whose log-probabilities are wanted: the first so many, or none."""
        self.scored = 0
        """Of these, how many are settled. Only their pages may come from the prefix index, which holds KV alone."""
        self.skips = 0
        """How often a younger request was admitted past this one."""
