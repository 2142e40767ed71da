"""Masks of rows with matchers: each new token is answered with the masks of the next one and of its drafts.

Native matchers run on threads that need no interpreter, others on the device's attendant: neither the loop nor the
device waits for them. They read the mail after every step with such rows, also in the middle of a chain. The device
holds a row whose mask is late; if it is held for LATE_SECONDS, the request whose matcher is at work for as long ends
with an error.
"""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from gapless.base.errors import RequestError
from gapless.base.part import Part
from gapless.base.records import Int32s, Int64s, NativeMatcher, Request, StepPlan, TokenTexts
from gapless.device import Device, Fence
from gapless.loop.attendant import MaskAttendant, MaskedRow, as_native, failure_of
from gapless.loop.records import MaskCounts
from gapless.memory.rows import RowTable
from gapless.step.launcher import Flight
from gapless.step.mail import IN_ORDER, Mail

NONE_FAILED: list[tuple[int, RequestError]] = []
LATE_SECONDS = 10.0
"""Longest time of a matcher for one token."""
MOST_NS = 1_000_000_000
"""Longest time counted between two held steps: the process may have been stopped in between."""
TOO_LONG = f"the mask of a token took longer than {LATE_SECONDS:g} s"


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
    """The matchers of all requests."""

    def __init__(self, device: Device, mail: Mail, rows: RowTable, threads: Any = None) -> None:
        """`threads` are MaskThreads for native matchers, if there are any."""
        self.mail, self.threads = mail, threads
        self.attendant = MaskAttendant(mail, threads)
        self._device, self._table = device, rows
        self._waits = Waits(len(rows.key))
        self._natives: dict[int, NativeMatcher] = {}
        """Matchers of the threads, by key."""
        self._texts: TokenTexts | None = None
        """Token texts of the threads."""
        self._rows: dict[int, MaskedRow] = {}
        """Requests of the attendant, by key."""
        self._failed: deque[tuple[int, RequestError]] = deque()

    def __contains__(self, key: int) -> bool:
        return key in self._rows or key in self._natives

    def report(self) -> MaskCounts:
        """Return the counts of the attendant and of the threads."""
        counts, threads = self.attendant.counts, self.threads
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
        native = self.threads is not None and as_native(matcher) is not None and caps.polled
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
        if self.threads and (native := as_native(matcher)) is not None:
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
        self._leave(lambda: self.attendant.admitted(row, slot, generation, tokens))

    def launched(self, flight: Flight) -> None:
        """Answer the tokens of a launched step once it has ended."""
        if flight.decision.replies:
            self._follow_step(flight.ended)

    def _follow_step(self, step: Fence) -> None:
        if self._natives and self.threads.polls:
            self.threads.ring()
        if self._rows or (self._natives and not self.threads.polls):
            self._device.attend(self.attendant.answer, step)

    def held(self, rows: Int64s) -> None:
        """Note rows held by a step. If a row's matcher does not return, its request fails."""
        self.attendant.ring()  # in case the attendant runs that matcher
        for key in self._table.key[self._waits.held(self._table, rows, self._device.clock())].tolist():
            if key in self._natives:
                # Another matcher of its thread may be stuck; its request may have ended.
                if (matcher := self._natives.get(stuck := self.threads.give_up(key, LATE_SECONDS))) is not None:
                    self._failed.append((stuck, matcher.failure(TOO_LONG)))
            elif (began := self.attendant.began) and time.monotonic_ns() - began > LATE_SECONDS * 1e9:
                self._failed.append((key, failure_of(self._rows[key], TOO_LONG)))

    def end(self, request: Request) -> None:
        key = request.key
        if self._natives.pop(key, None) is not None:
            self.threads.end(key)
        elif (row := self._rows.pop(key, None)) is not None:
            self._leave(lambda: self.attendant.forget(row))

    def close(self) -> None:
        """End the threads, which write to the mail. Waits for the masks being made."""
        if self.threads:
            self.threads.close()

    def failed(self) -> list[tuple[int, RequestError]]:
        """Return requests whose matchers failed since the last call."""
        ended = self.attendant.failed
        if not (ended or self._failed or (self.threads and self.threads.failed)):
            return NONE_FAILED
        failed = [queue.popleft() for queue in (self._failed, ended) for _ in range(len(queue))]
        for key, reason in self.threads.take_failures() if self.threads else ():
            if key in self._natives:
                failed.append((key, self._natives[key].failure(reason)))
        return failed

    def _leave(self, news: Callable[[], None]) -> None:
        self.attendant.news.append(news)
        self._device.attend(self.attendant.answer)
