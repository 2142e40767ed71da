"""The planner: which rows take part in the next step, with how many tokens, on which pages.

It works with upper bounds. A row in the decode set takes part in every step until the host learns that it has
finished or knows that it must have: the device makes a finished row inert, so planning too much is harmless.
A steady decode step touches only the rows that cross a page border or reach their last step.
"""

from __future__ import annotations

from typing import NamedTuple

from gapless.base.records import Admission, Chunk, PageWrite, StepPlan
from gapless.memory.ledger import Ledger
from gapless.memory.pages import PagePool
from gapless.memory.rows import RowTable
from gapless.plan.queue import WaitingQueue
from gapless.plan.sequence import Sequence, State

LOOK_BEHIND = 8
"""Waiting sequences tried behind a head that does not fit."""
MAX_SKIPS = 64
"""How often a head may be passed by before it is served strictly."""


class Limits(NamedTuple):
    """Bounds of one step. `page_writes` is at least the pages of one longest sequence plus two a row."""

    tokens: int
    page_writes: int
    queue: int
    by_priority: bool


class Planner:
    """Continuous batching with chunked prefill, prefix hits, and preemption by recompute."""

    def __init__(self, limits: Limits, pool: PagePool, rows: RowTable, ledger: Ledger) -> None:
        assert limits.tokens >= rows.size, "every row must fit into one step"
        self.waiting = WaitingQueue(limits.queue, limits.by_priority)
        self.by_row: list[Sequence | None] = [None] * (rows.size + 1)
        self.by_key: dict[int, Sequence] = {}
        self.running = 0
        self.preemptions = 0
        self._limits = limits
        self._pool = pool
        self._rows = rows
        self._ledger = ledger
        self._page_size = pool.page_size
        self._step = 0
        self._tick = 0
        """Steps so far in which the decode set took part."""
        self._decode: dict[int, Sequence] = {}
        self._decode_rows: tuple[int, ...] | None = ()
        self._decode_pages = 0
        """Upper bound of the pages of any row in the decode set."""
        self._border: list[dict[int, Sequence]] = [{} for _ in range(self._page_size)]
        """The decode set by the tick, modulo the page size, at which a row begins a page."""
        self._last_tick: dict[int, dict[int, Sequence]] = {}
        """The decode set by the tick at which a row needs no more steps."""
        self._prefill: dict[int, Sequence] = {}
        self._entering: list[Sequence] = []
        self._held: list[Sequence] = []
        self._ending = 0
        self._writes: list[PageWrite] = []
        """Page table entries of the plan being made."""
        self._refused_at = -1
        """Pages available when the head of the queue last did not fit."""

    # What happens to sequences between steps.

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises QueueFullError."""
        self.waiting.add(seq)
        self.by_key[seq.key] = seq
        self._refused_at = -1

    def abort(self, key: int) -> None:
        """End a sequence, wherever it stands. Unknown keys are ignored: it may have ended already."""
        seq = self.by_key.get(key)
        if seq is not None:
            self.finish(seq)

    def finish(self, seq: Sequence) -> None:
        """The sequence needs no more steps: its row and pages retire behind its last one."""
        state = self._unlink(seq)
        seq.state = State.DONE
        del self.by_key[seq.key]
        if state is State.WAITING:
            self.waiting.remove(seq)
            self._refused_at = -1  # those behind it have moved up
        else:
            self._give_up_row(seq)

    def has_work(self) -> bool:
        """Whether anything waits or runs, whatever may be in flight."""
        return bool(self.by_key)

    @property
    def wanting(self) -> int:
        """Sequences that need more steps than are in flight."""
        return len(self.by_key) - self._ending

    # One step.

    def plan(self) -> StepPlan | None:
        """Decide the next step, or None when nothing can run now."""
        self._writes = []
        preemptions = self.preemptions
        self._preempt_held()
        self._enter_decode()
        if self._decode:
            self._leave_at_last_tick()
            self._cross_borders()
        chunks = self._chunks(self._limits.tokens - len(self._decode))
        # Pages go to running rows first, so a step that preempts, or starves a row, admits nobody.
        starved = self._entering or self._held or self.preemptions > preemptions
        admissions = self._admit(chunks) if len(self.waiting) and not starved else []
        if not self._decode and not chunks:
            assert not self._writes
            return None
        return self._emit(chunks, admissions)

    def chain(self, most: int) -> list[StepPlan]:
        """As `plan`, and as many further steps, `most` in all, as only repeat it; empty when nothing can run now.

        A further step has the same decode set, so it needs no decision: nobody waits for rows, pages or budget, and no
        row has come to its last tick. The page table entries of all come with the first step, where they are one a row
        at most: a captured step takes no more. Rows own these pages, and read none before they get there.
        """
        plan = self.plan()
        if plan is None:
            return []
        plans, pages = [plan], list(plan.pages)
        if most > 1 and self._steady() and not plan.chunks:
            while len(plans) < most and self._repeats(len(plan.decode) - len(pages)):
                pages += self._writes
                plans.append(self._emit([], [])._replace(pages=()))
            plans[0] = plan._replace(pages=tuple(pages), bound=plans[-1].bound)
        return plans

    def _steady(self) -> bool:
        """Whether all that runs is in the decode set, and nothing waits for any of it."""
        return not (len(self.waiting) or self._prefill or self._entering or self._held)

    def _repeats(self, most_writes: int) -> bool:
        """Whether the next step has the same rows; takes the pages that they need for it, if so."""
        self._writes = []
        if self._tick in self._last_tick:
            return False
        new = [
            seq for seq in self._border[self._tick % self._page_size].values()
            if self._position(seq) // self._page_size == len(seq.pages)
        ]  # fmt: skip
        if len(new) > min(most_writes, self._pool.available()):
            return False
        return all([self._has_page(seq, self._position(seq)) for seq in new])

    def _emit(self, chunks: list[Chunk], admissions: list[Admission]) -> StepPlan:
        self._step += 1
        self._tick += bool(self._decode)
        for chunk in chunks:
            seq = self._at(chunk.row)
            seq.last_step = self._step
            if chunk.last:
                del self._prefill[chunk.row]
                self._will_enter(seq, seq.length)
        if self._decode_rows is None:
            self._decode_rows = tuple(self._decode)
            self._decode_pages = max((len(seq.pages) for seq in self._decode.values()), default=0)
        # Chunks that sample come first as they are: one that does not took all that was left of the budget.
        bound = self._decode_pages * self._page_size
        return StepPlan(self._step, self._decode_rows, tuple(chunks), tuple(admissions), tuple(self._writes), bound)

    # The decode set.

    def _will_enter(self, seq: Sequence, position: int) -> None:
        """The next token to run is the one at `position`, which the sequence's last step sampled."""
        seq.base = position
        seq.state = State.ENTERING
        self._entering.append(seq)

    def _enter_decode(self) -> None:
        for seq in sorted(self._entering, key=self.waiting.rank) if self._entering else ():
            if seq.state is not State.ENTERING:
                continue  # preempted for one before it in this list
            if seq.base == seq.max_len - 1:
                self._entering.remove(seq)
                self._end(seq)
            elif self._has_page(seq, seq.base):
                self._entering.remove(seq)
                self._enter(seq)

    def _enter(self, seq: Sequence) -> None:
        seq.state = State.DECODE
        seq.tick = self._tick
        self._decode[seq.row] = seq
        self._decode_rows = None
        self._border[(seq.tick - seq.base) % self._page_size][seq.row] = seq
        self._last_tick.setdefault(self._end_tick(seq), {})[seq.row] = seq

    def _leave(self, seq: Sequence) -> None:
        """Out of the decode set; `base` is the position it would have run next."""
        del self._decode[seq.row]
        self._decode_rows = None
        del self._border[(seq.tick - seq.base) % self._page_size][seq.row]
        # Most sequences stop before their last tick; an entry left behind would keep one alive until then.
        last = self._last_tick[self._end_tick(seq)]
        del last[seq.row]
        if not last:
            del self._last_tick[self._end_tick(seq)]
        seq.base = self._position(seq)
        seq.last_step = self._step

    def _position(self, seq: Sequence) -> int:
        return seq.base + self._tick - seq.tick

    def _end_tick(self, seq: Sequence) -> int:
        """The tick that would run position max_len - 1, which nobody needs."""
        return seq.tick + seq.max_len - 1 - seq.base

    def _leave_at_last_tick(self) -> None:
        for seq in list(self._last_tick.get(self._tick, {}).values()):
            self._leave(seq)
            self._end(seq)

    def _end(self, seq: Sequence) -> None:
        seq.state = State.ENDING
        self._ending += 1

    def _cross_borders(self) -> None:
        """Rows that begin a page in this tick get it, or leave the set until there is one."""
        for seq in list(self._border[self._tick % self._page_size].values()):
            # A row earlier in this list may have preempted this one.
            if seq.state is State.DECODE and not self._has_page(seq, self._position(seq)) and seq.state is State.DECODE:
                self._leave(seq)
                self._will_enter(seq, seq.base)

    def _has_page(self, seq: Sequence, position: int) -> bool:
        """Whether the page of `position` is there, taking a fresh one where needed and possible."""
        if position // self._page_size < len(seq.pages):
            return True
        if not self._pool.available():
            self._make_room()
            if seq.state in (State.HELD, State.WAITING) or not self._pool.available():
                return False
        page = self._pool.take()
        self._writes.append(PageWrite(seq.row, len(seq.pages), page))
        seq.pages.append(page)
        self._decode_pages = max(self._decode_pages, len(seq.pages))
        return True

    # Preemption.

    def _make_room(self) -> None:
        """The pool is empty: unless pages are about to come back by themselves, the last in rank goes."""
        if self._held or self._ending or self._pool.fenced:
            return
        victim = max((seq for seq in self.by_row if seq is not None), key=self.waiting.rank)
        self._unlink(victim)
        # It will not take part in this step, and its row may serve another before the step is out.
        self._writes = [write for write in self._writes if write.row != victim.row]
        victim.state = State.HELD
        self._held.append(victim)
        self._preempt_held()

    def _preempt_held(self) -> None:
        """Held sequences with nothing in flight give up row and pages, and go back to the queue."""
        for seq in [s for s in self._held if s.last_step <= self._ledger.completed]:
            self._held.remove(seq)
            seq.tokens = self._rows.settled(seq.row)
            seq.length = len(seq.tokens)
            self._give_up_row(seq)
            seq.pages = []
            seq.state = State.WAITING
            self.waiting.put_back(seq)
            self.preemptions += 1

    def _unlink(self, seq: Sequence) -> State:
        """Take the sequence out of the list of its state; returns that state."""
        state = seq.state
        if state is State.DECODE:
            self._leave(seq)
        elif state is State.PREFILL:
            del self._prefill[seq.row]
        elif state is State.ENTERING:
            self._entering.remove(seq)
        elif state is State.HELD:
            self._held.remove(seq)
        elif state is State.ENDING:
            self._ending -= 1
        return state

    def _give_up_row(self, seq: Sequence) -> None:
        self.by_row[seq.row] = None
        self.running -= 1
        self._pool.retire(seq.pages, seq.last_step)
        self._rows.retire(seq.row, seq.last_step)
        self._refused_at = -1

    # Prefill and admission.

    def _chunks(self, budget: int) -> list[Chunk]:
        """The next chunk of every row in prefill, oldest first, within the budget."""
        chunks: list[Chunk] = []
        for seq in self._prefill.values():
            if budget <= 0:
                break
            chunks.append(self._chunk(seq, budget))
            budget -= chunks[-1].size
        return chunks

    def _chunk(self, seq: Sequence, budget: int) -> Chunk:
        start = seq.computed
        seq.computed = min(seq.length, start + budget)
        return Chunk(seq.row, start, seq.computed - start, seq.computed == seq.length)

    def _admit(self, chunks: list[Chunk]) -> list[Admission]:
        """Move waiting sequences onto rows, in order, while rows, pages and budget last."""
        budget = self._limits.tokens - len(self._decode) - sum(chunk.size for chunk in chunks)
        admissions: list[Admission] = []
        passed: list[Sequence] = []
        if self._pool.available() == self._refused_at:
            return admissions
        while budget > 0 and self._rows.available() and len(passed) <= LOOK_BEHIND:
            seq = self.waiting.pop()
            if seq is None:
                break
            if self._claim(seq):
                admissions.append(self._admission(seq))
                chunks.append(self._chunk(seq, budget))
                budget -= chunks[-1].size
                for older in passed:
                    older.skips += 1
            else:
                passed.append(seq)
                if seq.skips >= MAX_SKIPS:
                    break
        for seq in passed:
            self.waiting.put_back(seq)
        if passed and not admissions:
            self._refused_at = self._pool.available()
        return admissions

    def _admission(self, seq: Sequence) -> Admission:
        self._writes.extend(PageWrite(seq.row, entry, page) for entry, page in enumerate(seq.pages))
        return Admission(seq.row, int(self._rows.generation[seq.row]), seq.key, seq.cached, seq.length)

    def _claim(self, seq: Sequence) -> bool:
        """Give the sequence a row and pages for its known tokens, shared where the prefix index has them."""
        size = self._page_size
        # The last known token always runs: its logits give the next one. So do those whose logits are wanted.
        cacheable = seq.length - 1 if seq.scored == seq.to_score else seq.scored
        shared = self._pool.match(seq.digests[: cacheable // size])
        total = -(-seq.length // size)
        fresh = total - len(shared)
        reserve = self.running // 8  # room for running rows to grow, so that admission does not cause preemption
        if (
            total > self._limits.page_writes - len(self._writes)
            or fresh + self._pool.resting(shared) + reserve > self._pool.available()
        ):
            return False
        for page in shared:
            self._pool.share(page)
        seq.pages = shared + [self._pool.take() for _ in range(fresh)]
        assert seq.tokens is not None
        seq.row = self._rows.take(seq.key, seq.tokens)
        seq.tokens = None
        seq.cached = seq.computed = len(shared) * size
        seq.settled_pages = len(shared)
        seq.state = State.PREFILL
        seq.skips = 0
        self.by_row[seq.row] = seq
        self._prefill[seq.row] = seq
        self.running += 1
        return True

    def _at(self, row: int) -> Sequence:
        seq = self.by_row[row]
        assert seq is not None
        return seq
