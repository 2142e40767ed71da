"""The planner: the rows of the next step, their numbers of tokens, and their pages.

It works with bounds of each row's length (`Bounds`). A row stays in the decode set until the host has read that it
finished, or its bounds show it: the device makes a finished row inert, so surplus steps are harmless. A steady decode
step compares columns, and looks at single rows only if one begins a page or ends.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Pools

from gapless.base.records import Admission, PageWrite, StepPlan
from gapless.memory.index import PrefixIndex, first_entry
from gapless.memory.ledger import Ledger
from gapless.memory.pages import NULL_PAGE, PagePool
from gapless.memory.rows import RowTable
from gapless.memory.source import NO_SOURCE, PageSource
from gapless.plan.bounds import Bounds, RowNumbers
from gapless.plan.limits import Limits
from gapless.plan.prefill import Prefill
from gapless.plan.queue import WaitingQueue
from gapless.plan.room import Room
from gapless.plan.sequence import Sequence, State

LOOK_BEHIND = 8
"""Waiting sequences tried after a head that does not fit."""
MAX_SKIPS = 64
"""How often a head may be passed before it is served strictly."""
PUBLISH_STEPS = 16
"""Steps between two looks for full pages, while steps repeat"""
MAX_AWAITING = 32
"""Sequences passed over in one step because a row computes their prefix; eight that wait for a tier count as one."""


class Planner:
    """Continuous batching with chunked prefill, prefix hits, and preemption by recompute."""

    def __init__(
        self, limits: Limits, pools: Pools[PagePool], rows: RowTable, ledger: Ledger, index: PrefixIndex | None = None,
        source: PageSource = NO_SOURCE,
    ) -> None:  # fmt: skip
        assert limits.tokens >= rows.size, "every row must fit into one step"
        self.waiting = WaitingQueue(limits.queue, limits.by_priority)
        self.by_row: list[Sequence | None] = [None] * (rows.size + 1)
        self.by_key: dict[int, Sequence] = {}
        self.preemptions = 0
        self.chunk_limit: Callable[[int, int], int] | None = None
        """Limit of prompt tokens in a step with decoding rows, which get none before it ends: from the number of these
        rows and of the prompt tokens that could run."""
        self.index = index
        self._limits = limits
        self.pools = pools
        self._rows = rows
        self.ledger = ledger
        self._page_size = pools[0].page_size
        windows = [pool.group.window for pool in pools if pool.group.window]
        self._windows = bool(windows)
        self.bounds = Bounds(rows, self._page_size, limits.least, limits.most, min(windows, default=None))
        self.step = 0
        """The number of the last step planned."""
        self.decode: dict[int, Sequence] = {}
        self._decode_rows: tuple[int, ...] | None = ()
        self._decode_pages = 0
        """Upper bound of the pages of any row in the decode set."""
        self.prefill = Prefill(self.waiting.rank, self._run)
        self.entering: list[Sequence] = []
        self.ending: dict[int, Sequence] = {}
        self.leaving: list[Sequence] = []
        """Sequences on rows, by `State`: `decode` and `ending` by row, `prefill` as well."""
        self._writes: list[PageWrite] = []
        """Page table entries of the plan being made."""
        self._starved = False
        """Whether a row in prefill got no pages in the plan being made."""
        self._refused_at: tuple[int, ...] | None = None
        """Pages available and the index's version when the head of the queue last did not fit."""
        self.room = Room(pools, index, source, self.bounds, limits.tokens)

    # Sequences between steps.

    def add(self, seq: Sequence) -> None:
        """Queue a sequence. Raises QueueFullError."""
        self.waiting.add(seq, self._rows.available())
        self.by_key[seq.key] = seq
        self._refused_at = None
        if self.index and seq.tokens is not None:
            seq.chain = self.index.chain(seq.tokens, seq.salt, seq.adapter)
        if seq.transfer.offer:
            self.room.source.offers(seq.transfer.offer)

    def abort(self, key: int) -> None:
        """End a sequence in any state. Unknown keys are ignored: the sequence may have ended."""
        if (seq := self.by_key.get(key)) is not None:
            self._end(seq)

    def finish(self, seq: Sequence) -> None:
        """End a finished sequence: its row and pages retire with its last step."""
        self.room.ended(int(self._rows.length[seq.row]) - seq.prompt)
        self._end(seq, whole=True)

    def fail(self, seq: Sequence) -> None:
        """End a sequence with non-finite logits, possibly from bad KV: no new request gets its pages, or pages of rows
        that share any of them. Such a row fails by itself if it read bad KV."""
        doubtful = [set(pages) - {NULL_PAGE} for pages in seq.by_group]
        for other in self.by_row:
            if other is not None and not all(map(set.isdisjoint, doubtful, other.by_group)):
                other.private = True
                for pool, pages in zip(self.pools, other.by_group, strict=True):
                    pool.hide(pages)
        self._end(seq)

    def commit(self, plan: StepPlan, rows: RowNumbers) -> None:
        """Take in an observed step: lines of these rows, whose tokens the row table now has.

        Ended rows are finished afterwards.
        """
        repeats = self.repeats(plan)
        self.bounds.observe(None if repeats else rows)
        if self.index and (self._windows or not repeats or plan.step % PUBLISH_STEPS == 0):  # a look reads the lengths
            for row, computed in self.bounds.filled():
                self.publish(self._at(row), computed, plan.step)
        if self._windows:
            for row, length in zip(rows.tolist(), self._rows.length[rows].tolist(), strict=True):
                self._slide(self._at(row), length, self.step)

    def repeats(self, plan: StepPlan) -> bool:
        """Return whether a step ran exactly the present decode set."""
        return plan.decode is self._decode_rows and not plan.chunks

    def has_work(self) -> bool:
        """Return whether any sequence waits or runs, in flight or not."""
        return bool(self.by_key)

    @property
    def queued(self) -> bool:
        """Return whether a sequence waits for anything but a slot."""
        return len(self.waiting) > 0 and self.waiting.ready(self._rows.lends)

    @property
    def wanting(self) -> int:
        """Number of sequences that need more steps than are in flight."""
        return len(self.by_key) - len(self.ending)

    # One step.

    def plan(self) -> StepPlan | None:
        """Decide the next step, or None when nothing can run now."""
        self._writes, self._starved = [], False
        joining = self.queued and self._rows.available()
        if self.bounds.quiet and not (joining or self._moving or self.ending):
            return self._emit([])
        preemptions = self.preemptions
        self.preempt()
        self.bounds.look()
        if self.ending:
            self._resume()
        if self.entering:
            self._enter_decode()
        if self.decode:
            self.leave_at_end()
            self._grow()
        admissions: list[Admission] = []
        joining = self.queued and self._rows.available()  # including preempted ones
        if self.prefill or joining:
            budget = self._limits.tokens - len(self.decode)
            if self.decode and self.chunk_limit:
                waiting = self.prefill.tokens() + self.waiting.tokens(self._rows.available())
                budget = min(budget, self.chunk_limit(len(self.decode), waiting))
            budget = self.prefill.begin(budget, joining > 0)
            # Running rows get pages first: a step that preempts, or starves a row, admits no request.
            starved = self.entering or self.leaving or self._starved or self.preemptions > preemptions
            if joining and not starved:
                budget = self._admit(budget, admissions)
            self.prefill.fill_up(budget)
        if not self.decode and not self.prefill.begun:
            assert not self._writes
            return self.plan() if self.preemptions > preemptions else None  # a preempted sequence may be admitted now
        return self._emit(admissions)

    def chain(self, most: int) -> list[StepPlan]:
        """Plan a step and up to `most` - 1 repeats of it; empty if nothing can run now.

        A repeat has the same decode set, so it needs no decision: no request waits for rows, pages or budget, and no
        row has all its tokens in flight. The first step carries the page table entries of all, for the high bounds of
        the last, within the limit of a captured step. Rows own these pages, and read none before they reach them.
        """
        plan = self.plan()
        if plan is None:
            return []
        plans, pages, most_pages = [plan], list(plan.pages), len(plan.decode) * self._limits.row_writes
        if most > 1 and len(pages) <= most_pages and not (self.queued or self._moving or plan.chunks):
            while len(plans) < most and self._repeats(most_pages - len(pages)):
                pages += self._writes
                self._writes = []
                plans.append(self._emit([]))
            plans[0] = plan._replace(pages=tuple(pages), bound=plans[-1].bound)
        return plans

    @property
    def _moving(self) -> bool:
        """Return whether some row is entering the decode set, or leaving the engine."""
        return bool(self.prefill or self.entering or self.leaving)

    def _repeats(self, most_writes: int) -> bool:
        """Return whether the next step has the same rows; if so, take the pages they need."""
        self._writes = []
        if self.bounds.quiet:
            return True
        self.bounds.look()
        return not self.bounds.ended() and self._all_grow(most_writes)

    def _emit(self, admissions: list[Admission]) -> StepPlan:
        self.step += 1
        chunks = self.prefill.take() if self.prefill.begun else ()
        for chunk in chunks:
            seq = self._at(chunk.row)
            seq.last_step = self.step
            if chunk.last:
                self.prefill.remove(seq)
                self.bounds.sampled(seq.row)
                if self.index:
                    self.bounds.published(seq.row, seq.published)
                self._will_enter(seq)
        if self.decode:
            self.bounds.step()
        if self._decode_rows is None:
            self._decode_rows = tuple(self.decode)
            self._decode_pages = max((len(seq.pages) for seq in self.decode.values()), default=0)
        bound = self._decode_pages * self._page_size
        return StepPlan(self.step, self._decode_rows, chunks, tuple(admissions), tuple(self._writes), bound)

    # The decode set.

    def _will_enter(self, seq: Sequence) -> None:
        seq.state = State.ENTERING
        self.entering.append(seq)

    def _enter_decode(self) -> None:
        for seq in sorted(self.entering, key=self.waiting.rank):
            if seq.state is not State.ENTERING:
                continue  # preempted for an earlier one of this list
            if self.bounds.has_ended(seq.row):
                self.entering.remove(seq)
                self._will_end(seq)
            elif self._has_pages(seq, self.bounds.wants(seq.row)):
                self.entering.remove(seq)
                seq.state = State.DECODE
                self.decode[seq.row] = seq
                self._decode_rows = None
                self.bounds.enter(seq.row)

    def leave(self, seq: Sequence) -> None:
        del self.decode[seq.row]
        self._decode_rows = None
        self.bounds.leave(seq.row)
        seq.last_step = self.step

    def leave_at_end(self) -> None:
        for row in self.bounds.ended():
            seq = self.decode[row]
            self.leave(seq)
            self._will_end(seq)

    def _will_end(self, seq: Sequence) -> None:
        seq.state = State.ENDING
        self.ending[seq.row] = seq
        self.bounds.ends(seq.row, True)

    def _resume(self) -> None:
        """Let rows that were held in flight enter again: they need more steps."""
        for row in self.bounds.resumed():
            self.bounds.ends(row, False)
            self._will_enter(self.ending.pop(row))

    def _grow(self) -> None:
        """Give pages to rows that may begin one in this step; a row without any leaves the set until there are some."""
        if self._all_grow(self._limits.page_writes):
            return
        rows, pages, _ = self.bounds.short()
        for row, needed in zip(rows.tolist(), pages.tolist(), strict=True):
            seq = self.decode.get(row)  # None if an earlier row of this list preempted it
            if seq is not None and not self._has_pages(seq, needed) and seq.state is State.DECODE:
                self.leave(seq)
                self._will_enter(seq)

    def _all_grow(self, most_writes: int) -> bool:
        """Take pages for all such rows, within this many page table entries; False if there are too few."""
        available = min([pool.available() for pool in self.pools])
        for steps, times in self._limits.growth:
            rows, pages, missing = self.bounds.short(steps)
            if missing * len(self.pools) <= most_writes and missing * times <= available:
                break
        else:
            return False
        for row, needed in zip(rows.tolist(), pages.tolist(), strict=True):
            self._extend(self.decode[row], needed)
        self.bounds.has_pages(rows, pages)
        self._decode_pages = max([self._decode_pages, *pages.tolist()])
        self.bounds.foresee()
        return True

    # Pages.

    def _has_pages(self, seq: Sequence, pages: int, preempt: bool = True) -> bool:
        """Bring the row to this many pages in every group, or change nothing; returns whether it has them."""
        if not self._fit(seq, pages):
            if preempt:
                self._make_room()
            if seq.state in (State.LEAVING, State.WAITING) or not self._fit(seq, pages):
                return False
        self._extend(seq, pages)
        self.bounds.has_pages(seq.row, pages)
        self._decode_pages = max(self._decode_pages, pages)
        return True

    def _extend(self, seq: Sequence, pages: int) -> None:
        """Take fresh pages for the row up to this many in every group."""
        row = seq.row
        for group, held in enumerate(seq.by_group):
            first, take = len(held), self.pools[group].take
            held += [take() for _ in range(first, pages)]
            self._writes += [PageWrite(row, entry, held[entry], group) for entry in range(first, pages)]

    def _fit(self, seq: Sequence, pages: int) -> bool:
        """Return whether the pools hold the pages that the row lacks."""
        return all([pages - len(held) <= pool.available() for held, pool in zip(seq.by_group, self.pools, strict=True)])

    def _slide(self, seq: Sequence, position: int, last_step: int) -> None:
        """Retire the pages before the window of `position`, unused after `last_step`."""
        for pool, held in zip(self.pools, seq.by_group, strict=True):
            end = min(first_entry(pool, position), len(held))
            gone = held[:end]
            if any(gone):
                pool.retire(gone, last_step)
                held[:end] = [NULL_PAGE] * end

    def publish(self, seq: Sequence, computed: int, step: int) -> None:
        """Make full pages shareable: the first `computed` tokens have KV once `step` has run."""
        assert self.index is not None and seq.chain is not None
        pages = computed // self._page_size
        if pages > seq.published:
            if not seq.private:
                seq.chain = seq.chain.up_to(pages)
                tokens = self._rows.tokens[seq.row]
                self.index.publish(seq.chain, tokens, seq.by_group, seq.published, pages, step)
            seq.published = pages

    # Preemption.

    def _make_room(self) -> None:
        """Preempt the last in rank for an empty pool, unless pages are about to return by themselves."""
        if self.leaving or self.ending or self.room.source.loading or any([pool.fenced for pool in self.pools]):
            return
        victim = max((seq for seq in self.by_row if seq is not None), key=self.waiting.rank)
        self._unlink(victim)
        # It leaves this step, and its row may serve another sequence in the same step.
        self._writes = [write for write in self._writes if write.row != victim.row]
        victim.state = State.LEAVING
        self.leaving.append(victim)
        self.preempt()

    def preempt(self) -> None:
        """Move leaving sequences with nothing in flight back to the queue, without row and pages."""
        for seq in [s for s in self.leaving if s.last_step <= self.ledger.completed]:
            self.leaving.remove(seq)
            seq.tokens = self._rows.settled(seq.row)
            seq.length = len(seq.tokens)
            self.room.preempted(seq.length - seq.prompt)
            self.give_up_row(seq)
            seq.by_group = [[]]
            seq.state = State.WAITING
            self.waiting.put_back(seq)
            self.preemptions += 1

    def _end(self, seq: Sequence, whole: bool = False) -> None:
        state = self._unlink(seq)
        seq.state = State.DONE
        del self.by_key[seq.key]
        if state is State.WAITING:
            self.waiting.remove(seq)
            self.room.source.give_up(seq.key)
            self._refused_at = None  # later sequences have moved up
        else:
            self.give_up_row(seq)
        if seq.transfer.offer:
            digests = seq.chain.digests[: seq.prompt // self._page_size] if whole and seq.chain is not None else []
            self.room.source.offered(seq.transfer.offer, digests)

    def _unlink(self, seq: Sequence) -> State:
        """Remove the sequence from the list of its state; returns that state."""
        state = seq.state
        if state is State.DECODE:
            self.leave(seq)
        elif state is State.PREFILL:
            self.prefill.remove(seq)
        elif state is State.ENTERING:
            self.entering.remove(seq)
        elif state is State.LEAVING:
            self.leaving.remove(seq)
        elif state is State.ENDING:
            del self.ending[seq.row]
        return state

    def give_up_row(self, seq: Sequence) -> None:
        self.by_row[seq.row] = None
        if self.index and self.bounds.publishes(seq.row):
            self.publish(seq, int(self._rows.length[seq.row]) - 1, self.step)
        self.room.change(-1)
        self.bounds.clear(seq.row)
        for pool, pages in zip(self.pools, seq.by_group, strict=True):
            pool.retire(pages, seq.last_step)
        self._rows.retire(seq.row, seq.last_step)
        self._refused_at = None

    # Prefill and admission.

    def _run(self, seq: Sequence, most: int, preempt: bool) -> int:
        """Plan up to `most` more known tokens of a row in prefill for the coming step; returns the number."""
        size = min(seq.length - seq.computed, most)
        if self._windows:
            if seq not in self.prefill.begun:
                self._slide(seq, seq.computed, seq.last_step)
            if not self._has_pages(seq, self.room.pages_for(seq, seq.computed + size), preempt):
                self._starved = True
                return 0
        seq.computed += size
        if self.index:
            # Readers of a page of known tokens run after this step, or in it, after each layer's writes. The last token
            # runs again if a step holds the row, and no transfer may meet that: its page comes with the next token.
            self.publish(seq, min(seq.computed, seq.length - 1), self.step + 1)
            self.prefill.expect(seq, self._next_digest(seq))
        return size

    def _next_digest(self, seq: Sequence) -> bytes | None:
        """Return the digest of the page that a row in prefill computes next."""
        pages = seq.published + 1
        if seq.chain is None or seq.private or pages * self._page_size > seq.length or seq.computed == seq.length:
            return None
        seq.chain = seq.chain.up_to(pages)
        return seq.chain.reach(pages, self._rows.tokens[seq.row])[pages - 1]

    def _admit(self, budget: int, admissions: list[Admission]) -> int:
        """Admit waiting sequences in order while rows, pages and budget last; returns the rest of the budget."""
        room, state = self.room, self.room.state()
        if state == self._refused_at:
            return budget
        passed, awaiting, loading = list[Sequence](), list[Sequence](), list[Sequence]()
        fill = self._limits.fill
        self.waiting.unpark(self._rows.lends)
        while budget > 0 and self._rows.available() and len(passed) <= LOOK_BEHIND:
            if len(awaiting) + len(loading) // 8 >= MAX_AWAITING or (seq := self.waiting.pop()) is None:
                break
            if not self._rows.lends(seq.leases):
                self.waiting.park(seq)
            elif room.refused_before(seq):
                passed.append(seq)
            else:
                if (matched := room.match(seq)) is None:
                    loading.append(seq)
                    continue
                words = seq.fill + matched * self._page_size if seq.sends_past else 0
                if words > fill or self.prefill.computes_for(seq, matched, room.cacheable(seq)):
                    awaiting.append(seq)
                elif self.claim(seq, matched):
                    fill -= words
                    self.waiting.unpark(self._rows.lends)
                    budget -= self.prefill.admit(seq, budget, len(self.waiting) > 0)
                    generation = int(self._rows.generation[seq.row])
                    admissions.append(Admission(seq.row, generation, seq.key, seq.cached, seq.length, seq.loaded))
                    for older in passed:
                        older.skips += 1
                else:
                    passed.append(seq)
            if passed and passed[-1].skips >= MAX_SKIPS:
                break
        for seq in passed + awaiting + loading:
            self.waiting.put_back(seq)
        if passed and not (admissions or awaiting or loading or any(self.waiting.parked.values())):
            self._refused_at = state
        return budget

    def claim(self, seq: Sequence, matched: int) -> bool:
        """Give the sequence pages and a row, and put it in prefill."""
        if not self.room.claim(seq, matched, self._limits.page_writes - len(self._writes)):
            return False
        assert seq.tokens is not None
        seq.row = row = self._rows.take(seq.key, seq.tokens, seq.leases)
        seq.tokens = None
        seq.state = State.PREFILL
        self.bounds.begin(row, seq.prompt, seq.cached, seq.max_len, seq.held)
        self.by_row[row] = seq
        self.room.change(1)
        self._writes += self.room.writes(seq)
        self.bounds.has_pages(row, len(seq.pages))
        return True

    def _at(self, row: int) -> Sequence:
        seq = self.by_row[row]
        assert seq is not None
        return seq
