"""Masks of rows with matchers: each new token is answered with the masks of the next one and of its drafts.

Native matchers run on threads that need no interpreter, others on the device's attendant: neither the loop nor the
device waits for them. They read the mail after every step with such rows, also in the middle of a chain. The device
holds a row whose mask is late; if it is held for LATE_SECONDS, the request whose matcher is at work for as long ends
with an error. Masks after drafts are made last, and a row without them runs without these drafts. Matchers follow
drafts for their masks alone, and roll back. If the form leaves only one text, they continue along its tokens, which
become the drafts of a later step. They look ahead only while no token waits for its own mask, and a matcher that fails
there is replaced by a copy that has not: a guess ends no request.
"""

from __future__ import annotations

import logging
import platform
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np

from gapless.base.errors import RequestError
from gapless.base.part import Part
from gapless.base.records import Int32s, Int64s, Matcher, NativeMatcher, Request, StepPlan, TokenTexts
from gapless.device import Device, Fence
from gapless.loop.records import MaskCounts
from gapless.memory.rows import RowTable
from gapless.step.launcher import Flight
from gapless.step.mail import IN_ORDER, Mail, tag_of

log = logging.getLogger("gapless.loop")

NO_TAG = -(2**62)
"""Tag of a row without a Python matcher"""
NARROW = 16
"""Most tokens of a mask that are compared for a common text"""
NONE_FAILED: list[tuple[int, RequestError]] = []
LATE_SECONDS = 10.0
"""Longest time of a matcher for one token."""
MOST_NS = 1_000_000_000
"""Longest time counted between two held steps: the process may have been stopped in between."""
TOO_LONG = f"the mask of a token took longer than {LATE_SECONDS:g} s"


class MaskedRow:
    """A request with a matcher. After `begin`, only the attendant uses it."""

    def __init__(self, request: Request, drafts: int) -> None:
        """`drafts` is the most drafts of a step."""
        assert request.matcher is not None
        self.drafts = drafts
        self.key = request.key
        self.matcher: Matcher = request.matcher
        self.name = request.params.masked_by
        """Request field named in errors"""
        self.length = len(request.tokens)
        """Tokens the matcher has followed, the prompt included."""
        self.slot = self.generation = 0
        """Row of the tables and of the mail, and the row's generation"""
        self.spare: Matcher | None = None
        """Copy of the matcher that has never looked ahead, made at the first look"""


class Waits:
    """Times that rows have waited for their masks."""

    def __init__(self, rows: int) -> None:
        self._place = np.zeros(rows, np.int64)
        """Generation and length of each row when it was last held"""
        self._seen, self._waited = np.zeros(rows, np.int64), np.zeros(rows, np.int64)

    def held(self, table: RowTable, rows: Int64s, now: int) -> Int64s:
        """Note held rows. Returns the rows that have waited for longer than LATE_SECONDS."""
        place = table.generation[rows].astype(np.int64) << 32 | table.length[rows]
        passed = np.minimum(now - self._seen[rows], MOST_NS)
        self._waited[rows] = np.where(place == self._place[rows], self._waited[rows] + passed, 0)
        self._place[rows], self._seen[rows] = place, now
        return rows[self._waited[rows] > LATE_SECONDS * 1e9]


class Masks(Part):
    """The matchers of all requests. The loop's thread calls the methods, the attendant runs the queued work."""

    def __init__(self, device: Device, mail: Mail, rows: RowTable) -> None:
        self.mail = mail
        self._table = rows
        self._waits = Waits(len(rows.key))
        self.threads: Any = None
        """MaskThreads, set before the first request when there are any"""
        self._device = device
        self._natives: dict[int, NativeMatcher] = {}
        """Matchers of the threads, by key."""
        self._texts: TokenTexts | None = None
        """Token texts of the threads."""
        self._rows: dict[int, MaskedRow] = {}
        """The loop's, by key."""
        self._serving: dict[int, MaskedRow] = {}
        """The attendant's, by row of the tables. A failed request stays until it ends, or its row is reused."""
        self._followed = np.full(len(mail.told), NO_TAG, np.int64)
        """The attendant's: for each row of the tables, the tag of the last token that its matcher followed"""
        self._words = mail.new_mask()
        """The attendant's: the mask being made"""
        self._ahead: dict[int, list[int]] = {}
        """The attendant's: drafts of rows that are to look ahead, by row"""
        self._settled: deque[tuple[MaskedRow, list[int]]] = deque()
        """The attendant's: tokens for the copies of these rows' matchers"""
        self._news: deque[Callable[[], None]] = deque()
        self._failed: deque[tuple[int, RequestError]] = deque()
        self._counts = MaskCounts()
        self._began = 0
        """Start of the matcher that the attendant runs; 0: none"""

    def __contains__(self, key: int) -> bool:
        return key in self._rows or key in self._natives

    def report(self) -> MaskCounts:
        """Return the counts of the attendant and of the threads."""
        counts, threads = self._counts, self.threads
        return MaskCounts(counts.written + threads.written, counts.ns + threads.ns) if threads else replace(counts)

    def check(self, request: Request) -> Request:
        """Raise RequestError if the masks of this request's matcher cannot be made."""
        matcher, name = request.matcher, request.params.masked_by
        if not name:
            assert matcher is None, "a matcher that was not asked for"
            return request
        why = "it came without a matcher" if matcher is None else ""
        # The steps of a CPU read the mail without barriers of their own.
        caps = self._device.caps
        native = self.threads is not None and _as_native(matcher) is not None and caps.polled
        if not (IN_ORDER or native) and caps.real_time:
            why = f"on {platform.machine()} they need a GPU, and a C++ compiler at the engine's start"
        if why:
            raise RequestError(f"{name}: {why}; leave it out", name)
        return request

    def begin(self, request: Request) -> None:
        """Take over a request's fresh matcher."""
        if name := request.params.masked_by:
            try:
                self._take_over(request)
            except Exception as error:
                text = f"{name}: its matcher could not be taken over: {type(error).__name__}: {error}"
                raise RequestError(text, name) from error

    def _take_over(self, request: Request) -> None:
        matcher, drafts = request.matcher, min(self.mail.drafts, request.most_drafts)
        if self.threads and (native := _as_native(matcher)) is not None:
            if (texts := native.texts) is not None and texts is not self._texts:
                self._texts = texts
                self.threads.set_texts(*texts)
            functions, pointer = native.give_away()
            length, ends = len(request.tokens), request.stop_ids
            self.threads.begin(request.key, native.lexer, functions, pointer, length, ends, drafts)
            self._natives[request.key] = native
        else:
            self._rows[request.key] = MaskedRow(request, drafts)

    def admit(self, plan: StepPlan) -> None:
        for row, generation, key, *_ in plan.admissions:
            if key in self:
                self.give_row(key, row, generation, self._table.settled(row))

    def give_row(self, key: int, slot: int, generation: int, tokens: Int32s) -> None:
        """Give the request the row `slot` in this generation; `tokens` are all its tokens so far."""
        if key in self._natives:
            self.threads.admit(key, slot, generation, tokens)
            return
        row = self._rows[key]
        if self.threads:
            self.threads.give_slot(slot, key)
        self._leave(lambda: self.admitted(row, slot, generation, tokens))

    def launched(self, flight: Flight) -> None:
        """Answer the tokens of a launched step once it has ended."""
        if flight.decision.replies:
            self._follow_step(flight.ended)

    def _follow_step(self, step: Fence) -> None:
        if self._natives and self.threads.polls:
            self.threads.ring()
        if self._rows or (self._natives and not self.threads.polls):
            self._device.attend(self.answer, step)

    def held(self, rows: Int64s) -> None:
        """Note rows held by a step. If a row's matcher does not return, its request fails."""
        self._ring()  # in case the attendant runs that matcher
        for key in self._table.key[self._waits.held(self._table, rows, self._device.clock())].tolist():
            if key in self._natives:
                # Another matcher of its thread may be stuck; its request may have ended.
                if (matcher := self._natives.get(stuck := self.threads.give_up(key, LATE_SECONDS))) is not None:
                    self._failed.append((stuck, matcher.failure(TOO_LONG)))
            elif (began := self._began) and time.monotonic_ns() - began > LATE_SECONDS * 1e9:
                self._failed.append((key, _failure(self._rows[key], TOO_LONG)))

    def _ring(self) -> None:
        if self.threads and not self.threads.polls:
            self.threads.ring()

    def end(self, request: Request) -> None:
        key = request.key
        if self._natives.pop(key, None) is not None:
            self.threads.end(key)
        elif (row := self._rows.pop(key, None)) is not None:
            self._leave(lambda: self._forget(row))

    def close(self) -> None:
        """End the threads, which write to the mail. Waits for the masks being made."""
        if self.threads:
            self.threads.close()

    def failed(self) -> list[tuple[int, RequestError]]:
        """Return requests whose matchers failed since the last call."""
        if not (self._failed or (self.threads and self.threads.failed)):
            return NONE_FAILED
        failed = [self._failed.popleft() for _ in range(len(self._failed))]
        for key, reason in self.threads.take_failures() if self.threads else ():
            if key in self._natives:
                failed.append((key, self._natives[key].failure(reason)))
        return failed

    def _leave(self, news: Callable[[], None]) -> None:
        self._news.append(news)
        self._device.attend(self.answer)

    # The attendant.

    def answer(self) -> None:
        """Take in the news and answer every new token; then look ahead until another arrives."""
        self._reply()
        while self._ahead:
            slot, drafts = next(iter(self._ahead.items()))
            if self._look_ahead(self._serving[slot], drafts):
                self._ahead.pop(slot, None)
            else:
                self._reply()

    def _reply(self) -> None:
        now = time.monotonic_ns()
        self._ring()
        while self._news:
            self._news.popleft()()
        for slot, tokens, drafts in self.mail.replies(self._followed):
            self._go_on(self._serving[slot], now, tokens, drafts)
        while self._settled:
            self.let_copy_follow(*self._settled.popleft())

    def admitted(self, row: MaskedRow, slot: int, generation: int, tokens: Int32s) -> None:
        self._forget(row)  # in its former slot
        row.slot, row.generation = slot, generation
        self._serving[slot] = row
        self._ahead.pop(slot, None)  # of the slot's former row
        self._go_on(row, time.monotonic_ns(), tokens[row.length :].tolist(), [])

    def _go_on(self, row: MaskedRow, since: int, tokens: list[int], drafts: list[int]) -> None:
        """Advance the matcher by these tokens, and post the mask of the next one."""
        self._ring()  # native matchers do not wait for this one
        self._began = time.monotonic_ns()
        try:
            if tokens:
                row.matcher.advance(tokens)
            row.length += len(tokens)
            self._post(row)
            self._counts.written += 1
            self._counts.ns += time.monotonic_ns() - since
        except BaseException as error:
            self._fail(row, error)
            return
        finally:
            self._began = 0
        self._followed[row.slot] = tag_of(row.generation, row.length)
        self._settled.append((row, tokens))
        if row.drafts:
            self._ahead[row.slot] = drafts

    def let_copy_follow(self, row: MaskedRow, tokens: list[int]) -> None:
        """Advance the copy by these tokens: after the masks of all rows, and before a row looks ahead."""
        self._began = time.monotonic_ns()
        try:
            if row.spare is not None and tokens:
                row.spare.advance(tokens)
        except BaseException as error:
            self._look_no_more(row, error)
        finally:
            self._began = 0

    def _look_no_more(self, row: MaskedRow, error: BaseException) -> None:
        """Drop guess and copy after a failure; the row continues without."""
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise error
        log.warning("a matcher failed along a guess, its row runs without: %s", error)
        row.spare, row.drafts = None, 0
        if self._serving.get(row.slot) is row:
            self._ahead.pop(row.slot, None)

    def _fail(self, row: MaskedRow, error: BaseException) -> None:
        """End the row's request; a library's panic is no Exception."""
        if isinstance(error, SystemExit | KeyboardInterrupt):
            raise error  # the device is closed
        # Without a mask the device holds the row until the loop removes it.
        self._forget(row)
        if not isinstance(error, RequestError):
            error = _failure(row, f"the matcher failed: {type(error).__name__}: {error}")
        self._failed.append((row.key, error))

    def _post(self, row: MaskedRow) -> None:
        row.matcher.write_mask(self._words)
        if not allows_some(self._words):
            raise _failure(row, "the grammar allows no token")
        self._send(row, tag_of(row.generation, row.length))

    def _send(self, row: MaskedRow, tag: int, place: int = 0, draft: int = 0) -> None:
        """Post the mask after `place` drafts, the last of them `draft`."""
        if self.threads:
            self.threads.post(row.key, row.slot, tag, self._words, place, draft)
        else:
            self.mail.post(row.slot, tag, self._words, place, draft)

    def _look_ahead(self, row: MaskedRow, drafts: list[int]) -> bool:
        """Post the masks that this row may need next. Returns False if a token waits for its own mask."""
        self._began = time.monotonic_ns()
        try:
            if row.spare is None:
                row.spare = row.matcher.copy()
            return self._go_ahead(row, drafts)
        except BaseException as error:
            self.restore(row)
            self._look_no_more(row, error)
            return True
        finally:
            self._began = 0

    def restore(self, row: MaskedRow) -> None:
        """Use the copy of a matcher that failed along a guess, if there is one."""
        row.matcher = row.matcher if row.spare is None else row.spare

    def _go_ahead(self, row: MaskedRow, drafts: list[int]) -> bool:
        """Post the masks after each draft, up to the first that is not allowed or ends the text. Then post the expected
        tokens: these drafts, and the tokens after them as long as the form leaves one text."""
        tag, run = tag_of(row.generation, row.length), list[int]()
        self._words[:] = self.mail.mask_of(row.slot)
        quiet = self._post_along(row, tag, drafts, run)
        known = len(run)
        while quiet and len(run) <= known + row.drafts:
            if (token := expected_next(self._words, row.matcher.texts)) is None:
                break
            self._follow(row, token, run)
            quiet = not self._called
        if quiet and len(run) > known:
            if self.threads:
                self.threads.post_ahead(row.key, row.slot, tag, run)
            else:
                self.mail.post_ahead(row.slot, tag, run)
        if run:
            row.matcher.rollback(len(run))
        return quiet

    def _post_along(self, row: MaskedRow, tag: int, drafts: list[int], run: list[int]) -> bool:
        """Post the masks after drafts, and append the followed ones to `run`. Returns False if a token waits."""
        for draft in drafts:
            if not self._words[draft // 32] >> draft % 32 & 1:
                break
            self._follow(row, draft, run)
            if self._called:
                return False
            if not allows_some(self._words):
                break
            self._send(row, tag, len(run), draft)
        return True

    def _follow(self, row: MaskedRow, token: int, run: list[int]) -> None:
        row.matcher.advance([token])
        run.append(token)
        row.matcher.write_mask(self._words)

    @property
    def _called(self) -> bool:
        """Whether news or tokens wait."""
        return bool(self._news) or self.mail.replied(self._followed)

    def _forget(self, row: MaskedRow) -> None:
        if self._serving.get(row.slot) is row:
            del self._serving[row.slot]
            self._ahead.pop(row.slot, None)
            self._followed[row.slot] = NO_TAG


def allows_some(words: Int32s) -> bool:
    """Return whether a mask allows any token: without, the row would fail as if its KV were bad."""
    return bool(words.any())


def expected_next(words: Int32s, texts: TokenTexts | None) -> int | None:
    """Return the only token that a mask allows, or the longest if all others begin it: the text is certain.

    None if the text is open, or the mask allows more than NARROW tokens.
    """
    where = words.nonzero()[0][: NARROW + 1]
    if not 0 < len(where) <= NARROW:
        return None
    bits = np.unpackbits(words[where].view(np.uint8), bitorder="little").nonzero()[0]
    tokens = (where[bits // 32] * 32 + bits % 32).tolist()
    if len(tokens) == 1:
        return int(tokens[0])
    return texts.longest(tokens) if texts is not None and len(tokens) <= NARROW else None


def _as_native(matcher: Matcher | None) -> NativeMatcher | None:
    """Return the matcher if it is native. A runtime check of the protocol would take as long as the rest of a form."""
    return cast(NativeMatcher, matcher) if hasattr(matcher, "give_away") else None


def _failure(row: MaskedRow, reason: str) -> RequestError:
    native = _as_native(row.matcher)
    return RequestError(f"{row.name}: {reason}", row.name) if native is None else native.failure(reason)
