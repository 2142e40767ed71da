"""A row: one request as the planner sees it, in counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from gapless.base.records import NO_TRANSFER, Int32s, KVTransfer
from gapless.memory.index import Gaps
from gapless.memory.pages import PagePool
from gapless.memory.prefix import PrefixChain


class State(Enum):
    WAITING = auto()
    """Queued: no number, no pages."""
    PREFILL = auto()
    """Has a number; known tokens are left to run."""
    DECODE = auto()
    """Member of the decode set: takes part in every step."""
    ENTERING = auto()
    """Enters the decode set as soon as the pools have its next pages."""
    ENDING = auto()
    """All steps it may need are in flight; returns to the set if one of them held it."""
    LEAVING = auto()
    """Chosen for preemption; waits until none of its steps is in flight."""
    DONE = auto()


class RowSpec(NamedTuple):
    """A request to the planner, which never changes."""

    key: int
    prompt: int
    """Tokens of its prompt"""
    max_len: int
    priority: int = 0
    order: int = 0
    salt: str = ""
    adapter: str = ""
    """Digest of its adapter, if any."""
    leases: tuple[str, ...] = ()
    """Names of the slots leased with its row."""
    fill: int = 0
    """Words written to its slots."""
    to_score: int = 0
    """Number of leading prompt positions with wanted log-probabilities."""
    sends_past: bool = False
    """Whether the device gets the tokens of pages from the prefix index."""
    held: bool = False
    """Whether steps may hold it until a matcher has made its mask."""
    transfer: KVTransfer = NO_TRANSFER
    """Orders about pages and peers"""


class Refusal(NamedTuple):
    """Why a row did not fit."""

    pool: PagePool
    """The tightest pool"""
    needs: int
    """Least `released` of this pool, beside `reserve`, at which the row may fit"""
    reserve: int
    at: int
    """Row changes when the reserve was computed"""
    gaps: Gaps
    """Pages missing at the end of its match: while all are missing, no match is longer."""


@dataclass(slots=True, eq=False)
class Row:
    """Counts and claims of one request, waiting or running. The planner alone writes them."""

    asked: RowSpec
    tokens: Int32s | None
    """Known tokens while it waits; the row table has them otherwise."""
    chain: PrefixChain | None = None
    """Digests of its full pages, if prefixes are shared."""
    length: int = field(init=False)
    """Known tokens when it last began to wait."""
    state: State = State.WAITING
    number: int = 0
    """Line of the row table and of the device tables"""
    by_group: list[list[int]] = field(default_factory=lambda: [[]])
    """Page numbers by group and entry; the null page for one given up."""
    computed: int = 0
    """Known tokens with planned KV."""
    last_step: int = 0
    """Last step planned with this row; not updated in the decode set."""
    published: int = 0
    """Leading full pages published to the prefix index."""
    private: bool = False
    """Whether its KV is in doubt; none of its pages is published then."""
    refusal: Refusal | None = None
    scored: int = 0
    """How many of `to_score` are settled. Only their pages may come from the prefix index, which holds no logits."""
    skips: int = 0
    """Younger requests admitted past this one."""

    def __post_init__(self) -> None:
        assert self.tokens is not None
        self.length = len(self.tokens)

    @property
    def key(self) -> int:
        """Return its request's key."""
        return self.asked.key

    @property
    def pages(self) -> list[int]:
        """Page numbers in the first group, by entry."""
        return self.by_group[0]
