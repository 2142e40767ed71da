"""The planner: the rows of the next step, their numbers of tokens, and their pages.

It works with bounds of each row's length (`Bounds`). A row stays in the decode set until the host has read that it
finished, or its bounds show it: the device makes a finished row inert, so surplus steps are harmless. A steady decode
step compares columns, and looks at single rows only if one begins a page or ends.
"""

from __future__ import annotations

from collections.abc import Sequence

from gapless.base.records import Admission, Chunk, Int32s, StepPlan
from gapless.memory.index import Match, PrefixIndex
from gapless.memory.ledger import Ledger
from gapless.memory.pages import PagePool
from gapless.memory.rows import RowTable
from gapless.memory.source import NO_SOURCE, PageSource
from gapless.plan.bounds import Bounds, RowNumbers
from gapless.plan.decode import DecodeSet
from gapless.plan.limits import Limits
from gapless.plan.pages import RowPages
from gapless.plan.prefill import Prefill
from gapless.plan.queue import WaitingQueue
from gapless.plan.room import Room
from gapless.plan.row import Row, RowSpec, State

LOOK_BEHIND = 8
"""[requests] Waiting rows tried after a head that does not fit."""
MAX_SKIPS = 64
"""[times] How often a head may be passed before it is served strictly."""
PUBLISH_STEPS = 16
"""[steps] Steps between two looks for full pages, while steps repeat"""
MAX_AWAITING = 32
"""[requests] Rows passed over in one step because a row computes their prefix; eight that wait for a tier count as
one."""


class Planner:
    """Continuous batching with chunked prefill, prefix hits, and preemption by recompute."""

    def __init__(
        self, limits: Limits, pools: Sequence[PagePool], rows: RowTable, ledger: Ledger,
        index: PrefixIndex | None = None, source: PageSource = NO_SOURCE,
    ) -> None:  # fmt: skip
        """`source` has pages beyond the pools, found by `index`."""
        assert limits.tokens >= rows.size, "every row must fit into one step"
        self.limits = limits
        self.waiting = WaitingQueue(limits.queue, limits.by_priority)
        self.by_row: list[Row | None] = [None] * (rows.size + 1)
        self.by_key: dict[int, Row] = {}
        self.preemptions = 0
        self._table = rows
        self.ledger = ledger
        self.pages = RowPages(pools, rows, index)
        narrowest = min([pool.rule.window for pool in pools if pool.rule.window], default=None)
        self.bounds = Bounds(rows, self.pages.size, limits.least, limits.most, narrowest)
        self.step = 0
        """The number of the last step planned."""
        self.decode = DecodeSet(self.bounds)
        self.prefill = Prefill(self.waiting.rank, self._run)
        self.leaving: list[Row] = []
        """Rows of this state"""
        self.room = Room(pools, index, source, self.bounds, limits.tokens)

    @property
    def index(self) -> PrefixIndex | None:
        """Return the index of shared pages, if any."""
        return self.pages.index

    # Rows between steps.

    def add(self, asked: RowSpec, tokens: Int32s, again: bool = False) -> None:
        """Queue a row for a request with these tokens. Raises QueueFullError; not if it had been queued before."""
        row = Row(asked, tokens)
        if again:
            self.waiting.put_back(row)
        else:
            self.waiting.add(row, self._table.available())
        self.by_key[asked.key] = row
        self.room.full_at = None
        if self.index:
            row.chain = self.index.chain(tokens, asked.salt, asked.adapter)
        if asked.transfer.offer:
            self.room.source.offers(asked.transfer.offer)

    def abort(self, key: int) -> None:
        """End a row in any state. Unknown keys are ignored: the row may have ended."""
        if (row := self.by_key.get(key)) is not None:
            self._end(row)

    def finish(self, row: Row) -> None:
        """End a finished row: it and its pages retire with its last step."""
        self.room.ended(int(self._table.length[row.number]) - row.asked.prompt)
        self._end(row, whole=True)

    def fail(self, row: Row) -> None:
        """End a row with non-finite logits, possibly from bad KV: no new request gets its pages, or pages of rows that
        share any of them. Such a row fails by itself if it read bad KV."""
        self.pages.doubt(row, [other for other in self.by_row if other is not None])
        self._end(row)

    def score(self, chunk: Chunk) -> int:
        """Count the prompt positions scored by an observed chunk; return how many of its row were settled before."""
        row = self.by_row[chunk.row]
        if row is None:
            return 0
        before = row.scored
        row.scored = max(before, min(chunk.start + chunk.size, row.asked.to_score))
        return before

    def commit(self, plan: StepPlan, rows: RowNumbers) -> None:
        """Take in an observed step: lines of these rows, whose tokens the row table now has.

        Ended rows are finished afterwards.
        """
        repeats = self.repeats(plan)
        self.bounds.observe(None if repeats else rows)
        pages = self.pages
        # A look reads the lengths.
        if pages.index and (pages.slide_away or not repeats or plan.step % PUBLISH_STEPS == 0):
            for number, computed in self.bounds.filled():
                pages.publish(self._at(number), computed, plan.step)
        if pages.slide_away:
            for number, length in zip(rows.tolist(), self._table.length[rows].tolist(), strict=True):
                pages.slide(self._at(number), length, self.step)

    def repeats(self, plan: StepPlan) -> bool:
        """Return whether a step ran exactly the present decode set."""
        return plan.decode is self.decode.numbers and not plan.chunks

    def has_work(self) -> bool:
        """Return whether any row waits or runs, in flight or not."""
        return bool(self.by_key)

    @property
    def queued(self) -> bool:
        """Return whether a row waits for anything but a slot."""
        return len(self.waiting) > 0 and self.waiting.ready(self._table.lends)

    @property
    def wanting(self) -> int:
        """Number of rows that need more steps than are in flight."""
        return len(self.by_key) - len(self.decode.ending)

    # One step.

    def plan(self) -> StepPlan | None:
        """Decide the next step, or None when nothing can run now."""
        decode, prefill, pages = self.decode, self.prefill, self.pages
        pages.writes, prefill.starved = [], False
        joining = self.queued and self._table.available()
        if self.bounds.quiet and not (joining or decode.ending or self._moving):
            return self._emit([])
        preemptions = self.preemptions
        self.preempt()
        self.bounds.look()
        if decode.ending:
            decode.resume()
        if decode.entering:
            self._enter_decode()
        if decode.rows:
            decode.leave_at_end(self.step)
            self._grow()
        admissions: list[Admission] = []
        joining = self.queued and self._table.available()  # including preempted ones
        if prefill or joining:
            budget = prefill.begin(self._budget(), joining > 0)
            # Running rows get pages first: a step that preempts, or starves a row, admits no request.
            starved = decode.entering or self.leaving or prefill.starved or self.preemptions > preemptions
            if joining and not starved:
                budget = self._admit(budget, admissions)
            prefill.fill_up(budget)
        if not decode.rows and not prefill.begun:
            assert not pages.writes
            return self.plan() if self.preemptions > preemptions else None  # a preempted row may be admitted now
        return self._emit(admissions)

    def _budget(self) -> int:
        """Return the tokens of known ones that the step may run."""
        decoding, limit = len(self.decode.rows), self.limits.chunk_limit
        budget = self.limits.tokens - decoding
        if not decoding or limit is None:
            return budget
        return min(budget, limit(decoding, self.prefill.tokens() + self.waiting.tokens(self._table.available())))

    def chain(self, most: int) -> list[StepPlan]:
        """Plan a step and up to `most` - 1 repeats of it; empty if nothing can run now.

        A repeat has the same decode set, so it needs no decision: no request waits for rows, pages or budget, and no
        row has all its tokens in flight. The first step carries the page table entries of all, for the high bounds of
        the last, within the limit of a captured step. Rows own these pages, and read none before they reach them.
        """
        plan = self.plan()
        if plan is None:
            return []
        plans, writes, most_writes = [plan], list(plan.pages), len(plan.decode) * self.limits.row_writes
        if most > 1 and len(writes) <= most_writes and not (self.queued or self._moving or plan.chunks):
            while len(plans) < most and self._repeats(most_writes - len(writes)):
                writes += self.pages.writes
                self.pages.writes = []
                plans.append(self._emit([]))
            plans[0] = plan._replace(pages=tuple(writes), bound=plans[-1].bound)
        return plans

    @property
    def _moving(self) -> bool:
        """Return whether some row is entering the decode set, or leaving the engine."""
        return bool(self.prefill or self.decode.entering or self.leaving)

    def _repeats(self, most_writes: int) -> bool:
        """Return whether the next step has the same rows; if so, take the pages they need."""
        self.pages.writes = []
        if self.bounds.quiet:
            return True
        self.bounds.look()
        return not self.bounds.ended() and self._all_grow(most_writes)

    def _emit(self, admissions: list[Admission]) -> StepPlan:
        self.step += 1
        decode, pages = self.decode, self.pages
        chunks = self._chunks() if self.prefill.begun else ()
        if decode.rows:
            self.bounds.step()
        numbers = decode.numbers
        if numbers is None:
            numbers = decode.renumber()
        return StepPlan(self.step, numbers, chunks, tuple(admissions), tuple(pages.writes), decode.pages * pages.size)

    def _chunks(self) -> tuple[Chunk, ...]:
        """Return the step's chunks; rows without further known tokens will decode."""
        chunks = self.prefill.take()
        for chunk in chunks:
            row = self._at(chunk.row)
            row.last_step = self.step
            if chunk.last:
                self.prefill.remove(row)
                self.bounds.sampled(row.number)
                if self.index:
                    self.bounds.published(row.number, row.published)
                self.decode.will_enter(row)
        return chunks

    # Running rows.

    def _enter_decode(self) -> None:
        decode = self.decode
        for row in sorted(decode.entering, key=self.waiting.rank):
            if row.state is not State.ENTERING:
                continue  # preempted for an earlier one of this list
            if self.bounds.has_ended(row.number):
                decode.entering.remove(row)
                decode.will_end(row)
            elif self._has_pages(row, self.bounds.wants(row.number)):
                decode.enter(row)

    def _grow(self) -> None:
        """Give pages to rows that may begin one in this step; a row without any leaves the set until there are some."""
        if self._all_grow(self.limits.page_writes):
            return
        numbers, pages, _ = self.bounds.short()
        for number, needed in zip(numbers.tolist(), pages.tolist(), strict=True):
            row = self.decode.rows.get(number)  # None if an earlier row of this list preempted it
            if row is not None and not self._has_pages(row, needed) and row.state is State.DECODE:
                self.decode.leave(row, self.step)
                self.decode.will_enter(row)

    def _all_grow(self, most_writes: int) -> bool:
        """Take pages for all such rows, within this many page table entries; False if there are too few."""
        decode, pools = self.decode, self.pages.pools
        available = min([pool.available() for pool in pools])
        for steps, times in self.limits.growth:
            numbers, pages, missing = self.bounds.short(steps)
            if missing * len(pools) <= most_writes and missing * times <= available:
                break
        else:
            return False
        for number, needed in zip(numbers.tolist(), pages.tolist(), strict=True):
            self.pages.extend(decode.rows[number], needed)
        self.bounds.has_pages(numbers, pages)
        decode.pages = max([decode.pages, *pages.tolist()])
        self.bounds.foresee()
        return True

    def _has_pages(self, row: Row, pages: int, preempt: bool = True) -> bool:
        """Bring the row to this many pages in every group, or change nothing; returns whether it has them."""
        if not self.pages.fit(row, pages):
            if preempt:
                self._make_room()
            if row.state in (State.LEAVING, State.WAITING) or not self.pages.fit(row, pages):
                return False
        self.pages.extend(row, pages)
        self.bounds.has_pages(row.number, pages)
        self.decode.pages = max(self.decode.pages, pages)
        return True

    # Preemption.

    def _make_room(self) -> None:
        """Preempt the last in rank for an empty pool, unless pages are about to return by themselves."""
        coming = self.leaving or self.decode.ending or self.room.source.loading
        if coming or any([pool.fenced for pool in self.pages.pools]):
            return
        victim = max((row for row in self.by_row if row is not None), key=self.waiting.rank)
        self._unlink(victim)
        # It leaves this step, and its number may serve another row in the same step.
        self.pages.writes = [write for write in self.pages.writes if write.row != victim.number]
        victim.state = State.LEAVING
        self.leaving.append(victim)
        self.preempt()

    def preempt(self) -> None:
        """Move leaving rows with nothing in flight back to the queue, without number and pages."""
        for row in [row for row in self.leaving if row.last_step <= self.ledger.completed]:
            self.leaving.remove(row)
            row.tokens = self._table.settled(row.number)
            row.length = len(row.tokens)
            self.room.preempted(row.length - row.asked.prompt)
            self.give_up(row)
            row.by_group = [[]]
            row.state = State.WAITING
            self.waiting.put_back(row)
            self.preemptions += 1

    def _end(self, row: Row, whole: bool = False) -> None:
        """End a row; `whole`: its prompt was computed, and peers get its pages."""
        state = self._unlink(row)
        row.state = State.DONE
        del self.by_key[row.key]
        if state is State.WAITING:
            self.waiting.remove(row)
            self.room.source.give_up(row.key)
            self.room.full_at = None  # later rows have moved up
        else:
            self.give_up(row)
        if offer := row.asked.transfer.offer:
            digests = (
                row.chain.digests[: row.asked.prompt // self.pages.size] if whole and row.chain is not None else []
            )
            self.room.source.offered(offer, digests)

    def _unlink(self, row: Row) -> State:
        """Remove the row from the list of its state; returns that state."""
        state = row.state
        if state is State.DECODE:
            self.decode.leave(row, self.step)
        elif state is State.PREFILL:
            self.prefill.remove(row)
        elif state is State.ENTERING:
            self.decode.entering.remove(row)
        elif state is State.LEAVING:
            self.leaving.remove(row)
        elif state is State.ENDING:
            del self.decode.ending[row.number]
        return state

    def give_up(self, row: Row) -> None:
        """Release a row's number, slots and pages."""
        number = row.number
        self.by_row[number] = None
        if self.index and self.bounds.publishes(number):
            self.pages.publish(row, int(self._table.length[number]) - 1, self.step)
        self.room.change(-1)
        self.bounds.clear(number)
        self.pages.retire(row)
        self._table.retire(number, row.last_step)
        self.room.full_at = None

    # Prefill and admission.

    def _run(self, row: Row, most: int, preempt: bool) -> int:
        """Plan up to `most` more known tokens of a row in prefill for the coming step; returns the number."""
        size, pages = min(row.length - row.computed, most), self.pages
        if pages.slide_away:
            if row not in self.prefill.begun:
                pages.slide(row, row.computed, row.last_step)
            if not self._has_pages(row, self.room.pages_for(row, row.computed + size), preempt):
                self.prefill.starved = True
                return 0
        row.computed += size
        if pages.index:
            # Readers of a page of known tokens run after this step, or in it, after each layer's writes. The last token
            # runs again if a step holds the row, and no transfer may meet that: its page comes with the next token.
            pages.publish(row, min(row.computed, row.length - 1), self.step + 1)
            self.prefill.expect(row, pages.next_digest(row))
        return size

    def _admit(self, budget: int, admissions: list[Admission]) -> int:
        """Admit waiting rows in order while numbers, pages and budget last; returns the rest of the budget."""
        room, state, table = self.room, self.room.state(), self._table
        if state == room.full_at:
            return budget
        passed, awaiting, loading = list[Row](), list[Row](), list[Row]()
        fill = self.limits.fill
        self.waiting.unpark(table.lends)
        while budget > 0 and table.available() and len(passed) <= LOOK_BEHIND:
            if len(awaiting) + len(loading) // 8 >= MAX_AWAITING or (row := self.waiting.pop()) is None:
                break
            if not table.lends(row.asked.leases):
                self.waiting.park(row)
            elif room.refused_before(row):
                passed.append(row)
            elif (match := room.match(row)) is None:
                loading.append(row)
            elif (words := self._words(row, match)) > fill or self.prefill.computes_for(
                row, match.pages, room.cacheable(row)
            ):
                awaiting.append(row)
            elif (admission := self.claim(row, match)) is not None:
                fill -= words
                self.waiting.unpark(table.lends)
                budget -= self.prefill.admit(row, budget, len(self.waiting) > 0)
                admissions.append(admission)
                for older in passed:
                    older.skips += 1
            else:
                passed.append(row)
            if passed and passed[-1].skips >= MAX_SKIPS:
                break
        for row in passed + awaiting + loading:
            self.waiting.put_back(row)
        if passed and not (admissions or awaiting or loading or any(self.waiting.parked.values())):
            room.full_at = state
        return budget

    def _words(self, row: Row, match: Match) -> int:
        """Return the words that the row's slots and the history of its shared pages take in a packet."""
        return row.asked.fill + match.pages * self.pages.size if row.asked.sends_past else 0

    def claim(self, row: Row, match: Match) -> Admission | None:
        """Give the row pages and a number, and put it in prefill; None if it does not fit."""
        loaded = self.room.claim(row, match, self.limits.page_writes - len(self.pages.writes))
        if loaded is None:
            return None
        asked, table = row.asked, self._table
        assert row.tokens is not None
        row.number = number = table.take(asked.key, row.tokens, asked.leases)
        row.tokens = None
        row.state = State.PREFILL
        self.bounds.begin(number, asked.prompt, row.computed, asked.max_len, asked.held)
        self.by_row[number] = row
        self.room.change(1)
        self.pages.begin(row)
        self.bounds.has_pages(number, len(row.pages))
        generation = int(table.generation[number])
        return Admission(number, generation, asked.key, row.computed, row.length, loaded * self.pages.size)

    def _at(self, number: int) -> Row:
        row = self.by_row[number]
        assert row is not None
        return row
