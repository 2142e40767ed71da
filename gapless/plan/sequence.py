"""A sequence: one request as the planner sees it, in counts."""

from __future__ import annotations

from enum import Enum, auto

from gapless.base.records import NO_TRANSFER, Int32s
from gapless.memory.below import Search
from gapless.memory.host import LoadTicket
from gapless.memory.index import Gaps
from gapless.memory.pages import PagePool
from gapless.memory.prefix import PrefixChain


class State(Enum):
    WAITING = auto()
    """Queued: no row, no pages."""
    PREFILL = auto()
    """Has a row; known tokens are left to run."""
    DECODE = auto()
    """Member of the decode set: takes part in every step."""
    ENTERING = auto()
    """Enters the decode set as soon as the pools have its next pages."""
    ENDING = auto()
    """Every step that it can need is in flight; comes back when one of them turns out to have held it."""
    LEAVING = auto()
    """Chosen for preemption; waits until nothing of it is in flight."""
    DONE = auto()


class Sequence:
    """Counts and claims of one request. The planner does not read `tokens` and `chain`, which it keeps for others."""

    __slots__ = (
        "adapter", "by_group", "cached", "chain", "coming", "computed", "declined", "fill", "gaps", "held", "key",
        "last_step", "leases", "length", "loads_begun", "max_len", "needs", "order", "priority", "private", "prompt",
        "published", "refused_at", "refused_by", "reserve", "row", "salt", "scored", "search", "sends_past", "skips",
        "state", "ticket", "to_score", "tokens", "transfer",
    )  # fmt: skip

    def __init__(
        self, key: int, tokens: Int32s, max_len: int, priority: int = 0, order: int = 0, salt: str = ""
    ) -> None:
        self.key = key
        self.tokens: Int32s | None = tokens
        """Known tokens while the sequence has no row; the row table keeps them otherwise."""
        self.salt = salt
        self.adapter = ""
        """Digest of its adapter, where it has one."""
        self.chain: PrefixChain | None = None
        """Digests of its full pages, where prefixes are shared."""
        self.prompt = len(tokens)
        self.length = len(tokens)
        """Known tokens when it last took a row."""
        self.max_len = max_len
        self.leases: tuple[str, ...] = ()
        """What it leases a slot for, as long as it has a row."""
        self.fill = 0
        """Words that fill its slots."""
        self.sends_past = False
        """Whether the device gets the tokens that the prefix index gives."""
        self.held = False
        """Whether steps may hold it: it goes on when a matcher has made a mask."""
        self.transfer = NO_TRANSFER
        """What it says about pages and peers"""
        self.priority = priority
        self.order = order
        self.state = State.WAITING
        self.row = 0
        self.by_group: list[list[int]] = [[]]
        """Page numbers by group and entry; the null page where one was given up."""
        self.cached = 0
        """Known tokens whose KV the prefix index gave."""
        self.computed = 0
        """Known tokens whose KV is planned."""
        self.last_step = 0
        """Last step planned with this row; not kept up while in the decode set."""
        self.published = 0
        """Full pages in front that the prefix index has seen."""
        self.private = False
        """Whether its KV is in doubt, so that no page of it is published."""
        self.gaps: Gaps = {}
        """Pages that ended its last match: while all of them are missing, the next match is no longer."""
        self.refused_by: PagePool | None = None
        """The pool that lacked most when it did not fit after its last match."""
        self.needs = 0
        """It does not fit before this pool has released this many pages in all, and `reserve` beyond."""
        self.reserve = 0
        self.refused_at = 0
        """Changes of the running rows, up to which the reserve counts."""
        self.coming: bytes | None = None
        """Digest of the page that it computes next, in prefill."""
        self.to_score = 0
        """Number of leading prompt positions whose log-probabilities are wanted."""
        self.scored = 0
        """How many of these are settled. Only their pages may come from the prefix index, which holds KV alone."""
        self.ticket: LoadTicket | Search | None = None
        """Pages on their way from the host tier, or what it asked of tiers below, for which it waits."""
        self.search: Search | None = None
        """What the tiers below have of it, where they were asked since it last had a row"""
        self.loads_begun = 0
        """How often it has waited for such pages since it last had a row."""
        self.declined = False
        """Whether computing takes less than a load for which it was weighed since it last had a row"""
        self.skips = 0
        """How often a younger request was admitted past this one."""

    @property
    def pages(self) -> list[int]:
        """Page numbers in the first group, by entry."""
        return self.by_group[0]
