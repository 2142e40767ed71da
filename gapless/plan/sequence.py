"""A sequence: one request as the planner sees it, in counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from gapless.base.records import NO_TRANSFER, Int32s, KVTransfer
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
    """All steps it may need are in flight; returns to the set if one of them held it."""
    LEAVING = auto()
    """Chosen for preemption; waits until none of its steps is in flight."""
    DONE = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """Counts and claims of one request. The planner carries `tokens` and `chain` for others, unread."""

    key: int
    tokens: Int32s | None
    """Known tokens while the sequence has no row; the row table keeps them otherwise."""
    max_len: int
    priority: int = 0
    order: int = 0
    salt: str = ""
    adapter: str = ""
    """Digest of its adapter, if any."""
    chain: PrefixChain | None = None
    """Digests of its full pages, if prefixes are shared."""
    prompt: int = field(init=False)
    length: int = field(init=False)
    """Known tokens when it last took a row."""
    leases: tuple[str, ...] = ()
    """Names of the slots leased with its row."""
    fill: int = 0
    """Words written to its slots."""
    sends_past: bool = False
    """Whether the device gets the tokens of pages from the prefix index."""
    held: bool = False
    """Whether steps may hold it until a matcher has made its mask."""
    transfer: KVTransfer = NO_TRANSFER
    """Orders about pages and peers"""
    state: State = State.WAITING
    row: int = 0
    by_group: list[list[int]] = field(default_factory=lambda: [[]])
    """Page numbers by group and entry; the null page for one given up."""
    cached: int = 0
    """Known tokens with KV from the prefix index."""
    computed: int = 0
    """Known tokens with planned KV."""
    last_step: int = 0
    """Last step planned with this row; not updated in the decode set."""
    published: int = 0
    """Leading full pages published to the prefix index."""
    private: bool = False
    """Whether its KV is in doubt; none of its pages is published then."""
    gaps: Gaps = field(default_factory=dict)
    """Pages missing at the end of its last match: while all are missing, no match is longer."""
    refused_by: PagePool | None = None
    """The tightest pool at its last refusal."""
    needs: int = 0
    """Least `released` of this pool, beside `reserve`, at which the sequence may fit."""
    reserve: int = 0
    refused_at: int = 0
    """Row changes when the reserve was computed."""
    coming: bytes | None = None
    """Digest of the page it computes next, in prefill."""
    to_score: int = 0
    """Number of leading prompt positions with wanted log-probabilities."""
    scored: int = 0
    """How many of these are settled. Only their pages may come from the prefix index, which holds no logits."""
    loaded: int = 0
    """Tokens of `cached` that came while it waited"""
    skips: int = 0
    """Younger requests admitted past this one."""

    def __post_init__(self) -> None:
        assert self.tokens is not None
        self.prompt = self.length = len(self.tokens)

    @property
    def pages(self) -> list[int]:
        """Page numbers in the first group, by entry."""
        return self.by_group[0]
