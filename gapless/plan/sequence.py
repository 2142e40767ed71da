"""A sequence: one request as the planner sees it, in counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from gapless.base.records import NO_TRANSFER, Int32s, KVTransfer
from gapless.memory.index import Gaps
from gapless.memory.pages import PagePool
from gapless.memory.prefix import PrefixChain
from gapless.memory.search import LoadTicket, Search


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


@dataclass(slots=True, eq=False)
class Sequence:
    """Counts and claims of one request. The planner does not read `tokens` and `chain`, which it keeps for others."""

    key: int
    tokens: Int32s | None
    """Known tokens while the sequence has no row; the row table keeps them otherwise."""
    max_len: int
    priority: int = 0
    order: int = 0
    salt: str = ""
    adapter: str = ""
    """Digest of its adapter, where it has one."""
    chain: PrefixChain | None = None
    """Digests of its full pages, where prefixes are shared."""
    prompt: int = field(init=False)
    length: int = field(init=False)
    """Known tokens when it last took a row."""
    leases: tuple[str, ...] = ()
    """What it leases a slot for, as long as it has a row."""
    fill: int = 0
    """Words that fill its slots."""
    sends_past: bool = False
    """Whether the device gets the tokens that the prefix index gives."""
    held: bool = False
    """Whether steps may hold it: it goes on when a matcher has made a mask."""
    transfer: KVTransfer = NO_TRANSFER
    """What it says about pages and peers"""
    state: State = State.WAITING
    row: int = 0
    by_group: list[list[int]] = field(default_factory=lambda: [[]])
    """Page numbers by group and entry; the null page where one was given up."""
    cached: int = 0
    """Known tokens whose KV the prefix index gave."""
    computed: int = 0
    """Known tokens whose KV is planned."""
    last_step: int = 0
    """Last step planned with this row; not kept up while in the decode set."""
    published: int = 0
    """Full pages in front that the prefix index has seen."""
    private: bool = False
    """Whether its KV is in doubt, so that no page of it is published."""
    gaps: Gaps = field(default_factory=dict)
    """Pages that ended its last match: while all of them are missing, the next match is no longer."""
    refused_by: PagePool | None = None
    """The pool that lacked most when it did not fit after its last match."""
    needs: int = 0
    """What `released` of this pool has to reach, and `reserve` beyond, before the sequence may fit."""
    reserve: int = 0
    refused_at: int = 0
    """Changes of the running rows, up to which the reserve counts."""
    coming: bytes | None = None
    """Digest of the page that it computes next, in prefill."""
    to_score: int = 0
    """Number of leading prompt positions whose log-probabilities are wanted."""
    scored: int = 0
    """How many of these are settled. Only their pages may come from the prefix index, which holds KV alone."""
    ticket: LoadTicket | Search | None = None
    """Pages on their way from the host tier, or what it asked of tiers below, for which it waits."""
    search: Search | None = None
    """What the tiers below have of it, where they were asked since it last had a row"""
    loads_begun: int = 0
    """How often it has waited for such pages since it last had a row."""
    had: int | None = None
    """Pages of it that the device had when it first waited for others since it last had a row"""
    loaded: int = 0
    """Tokens of `cached` that came from a tier, or from others while it waited for one"""
    declined: bool = False
    """Whether computing takes less than a load for which it was weighed since it last had a row"""
    skips: int = 0
    """How often a younger request was admitted past this one."""

    def __post_init__(self) -> None:
        assert self.tokens is not None
        self.prompt = self.length = len(self.tokens)

    @property
    def pages(self) -> list[int]:
        """Page numbers in the first group, by entry."""
        return self.by_group[0]
