"""The thread that calls a tier: orders come in, answers and ends of jobs go out, and the loop waits for neither."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from gapless.base.records import NO_TRANSFER, KVTransfer
from gapless.offload.tiers.seam import Found, JobEnd, KVTier, PeerExchange, TierAnswer, TierPage, TierRelease

T = TypeVar("T")
log = logging.getLogger("gapless.offload.tiers")

POLL_SECONDS = 0.001
"""How often a tier is asked about jobs that it has not ended, and keys that are pending"""
IN_TIME = 0.7
"""The part of a question's time that passes before it is answered with the pages found so far"""
JOBS_CLOSE_SECONDS = 10.0
"""How long `close` waits for jobs that have begun"""
NO_DEADLINE = float("inf")


class TierJob(NamedTuple):
    number: int
    pages: int
    loads: bool
    late_at: float
    """When a load is cancelled, which happens once; a store never is."""
    start: Callable[[], None]
    """Has the tier begin it"""
    began: float = 0.0


class TierQuestion(NamedTuple):
    """Keys, each with the answer so far."""

    number: int
    keys: Sequence[bytes]
    found: list[Found]
    late_at: float
    transfer: KVTransfer
    """The request's settings for peers"""


TierOrder = TierJob | TierQuestion | Callable[[], None]


class TierWorker:
    """One tier and its thread. Questions and drops come first, then loads, then stores, each in the order of its kind.

    A tier that raises has failed the job, and has none of the keys: the thread continues.
    """

    def __init__(
        self, name: str, tier: KVTier, ring: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`ring` is called, from the thread, when there is news."""
        self.name = name
        self.error = ""
        """The tier's last error"""
        self._tier = tier
        self._room = (0, 0)
        self._ring, self._clock = ring, clock
        self._quick: deque[TierOrder] = deque()
        self._loads: deque[TierOrder] = deque()
        self._stores: deque[TierOrder] = deque()
        self._asking: list[TierQuestion] = []
        self._begun: dict[int, TierJob] = {}
        self._last_end = {True: 0.0, False: 0.0}
        """When a load, and a store, ended last"""
        self._news: deque[TierAnswer | JobEnd | TierRelease] = deque()
        self._wake = threading.Event()
        self._poll_seconds = POLL_SECONDS
        self._closes_at = NO_DEADLINE
        self._thread = threading.Thread(target=self._run, name=f"gapless-tier-{name}", daemon=True)

    @property
    def exchange(self) -> PeerExchange | None:
        """Return the way to peers, if the tier has one."""
        return None

    def start(self) -> None:
        self._thread.start()

    # For the loop.

    def ask(
        self, number: int, keys: Sequence[bytes], seconds: float, transfer: KVTransfer = NO_TRANSFER
    ) -> None:  # fmt: skip
        """Ask which of these keys the tier has. A late answer counts as a miss: the caller waits for `seconds`, so the
        answer is sent a little earlier. Pages that a request claims from a peer may still be computed."""
        late_at = self._clock() + IN_TIME * seconds
        self._send(self._quick, TierQuestion(number, keys, [Found.PENDING] * len(keys), late_at, transfer))

    def load(self, job: int, pages: Sequence[TierPage], seconds: float) -> None:
        """Fill the slots of these pages; pages not loaded within `seconds` are cancelled."""
        self._load(job, len(pages), seconds, lambda: self._tier.load(job, pages))

    def _load(self, job: int, pages: int, seconds: float, start: Callable[[], None]) -> None:
        self._send(self._loads, TierJob(job, pages, True, self._clock() + seconds, start))

    def store(self, job: int, pages: Sequence[TierPage]) -> None:
        """Keep these pages, when nothing is to be loaded."""
        self._send(self._stores, TierJob(job, len(pages), False, NO_DEADLINE, lambda: self._tier.store(job, pages)))

    def drop(self, keys: Sequence[bytes]) -> None:
        self._send(self._quick, lambda: self._tier.drop(keys))

    def touch(self, keys: Sequence[bytes]) -> None:
        self._send(self._quick, lambda: self._tier.touch(keys))

    @property
    def has_news(self) -> bool:
        return bool(self._news)

    def take(self) -> list[TierAnswer | JobEnd | TierRelease]:
        """Return the results since the last call; never waits."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def room(self) -> tuple[int, int]:
        """Return the bytes that the tier keeps and may keep, as after the last job; zeros if it cannot tell."""
        return self._room

    def close(self, seconds: float = JOBS_CLOSE_SECONDS) -> None:
        """Store waiting pages, as many as it can within `seconds`, and close the tier."""
        self._closes_at = self._clock() + seconds
        self._wake.set()
        self._thread.join(seconds)

    def _send(self, orders: deque[TierOrder], order: TierOrder) -> None:
        orders.append(order)
        self._wake.set()

    # The thread.

    def _run(self) -> None:
        self._look_at_room()
        while True:
            self._wake.clear()
            busy = self.turn()
            waits = self._orders or self._begun
            if self._closes_at < NO_DEADLINE and (not waits or self._clock() > self._closes_at):
                break
            if not busy:
                self._wake.wait(self._pause())
        self._safely(self._tier.close)

    def _pause(self) -> float | None:
        """Return the seconds until a deadline or the next poll; None where only an order can bring work."""
        times = [question.late_at for question in self._asking] + [job.late_at for job in self._begun.values()]
        return max(0.0, min(self._poll_seconds, min(times) - self._clock())) if times else None

    def turn(self) -> bool:
        """Take one order, and finished jobs; return whether there may be another."""
        if self._orders:
            self._do(self._orders.popleft())
        self._cancel_late()
        for end in self._safely(lambda: [*self._tier.poll()]) or () if self._begun else ():
            self._safely(partial(self._end, end))
        self._ask_again()
        return bool(self._orders)

    @property
    def _orders(self) -> deque[TierOrder]:
        """The orders of the first kind that has any."""
        return self._quick or self._loads or self._stores

    def _do(self, order: TierOrder) -> None:
        if isinstance(order, TierQuestion):
            self._asking.append(order)
        elif isinstance(order, TierJob):
            self._begin(order)
        else:
            self._safely(order)

    def _begin(self, job: TierJob) -> None:
        now = self._clock()
        self._begun[job.number] = job._replace(began=now)
        if now > job.late_at:
            self._end(JobEnd(job.number, ()))
            return
        try:
            job.start()
        except Exception as error:
            self._failed(error)
            self._end(JobEnd(job.number, (), failed=True))

    def _end(self, end: JobEnd) -> None:
        """Pass on the end of a job, if it has not ended before."""
        if (job := self._begun.pop(end.job, None)) is not None:
            self._look_at_room()
            end = self._safely(lambda: _sound(end, job.pages)) or JobEnd(job.number, (), failed=True)
            # A tier that takes orders faster than it fills them has them wait for earlier ones.
            now, since = self._clock(), max(job.began, self._last_end[job.loads])
            self._last_end[job.loads] = now
            self._tell(end._replace(seconds=now - since))

    def _look_at_room(self) -> None:
        def look() -> tuple[int, int]:
            used, size = getattr(self._tier, "room", (0, 0))
            return int(used), int(size)  # a plug-in may return anything, and the loop reads this

        self._room = self._safely(look) or self._room

    def _cancel_late(self) -> None:
        now = self._clock()
        for number, job in [*self._begun.items()]:
            if now > job.late_at:
                self._begun[number] = job._replace(late_at=NO_DEADLINE)
                self._safely(partial(self._tier.cancel, number))

    def _ask_again(self) -> None:
        """Ask about pending keys; a late answer is a miss."""
        for question in [*self._asking]:
            late = self._clock() > question.late_at  # before the look, which then is the last
            places = [place for place, found in enumerate(question.found) if found is Found.PENDING]
            answers = self._safely(partial(self._look, question, places)) or [Found.MISS] * len(places)
            before = [*question.found]
            for place, found in zip(places, answers, strict=True):
                question.found[place] = found
            if Found.PENDING not in question.found or late:
                self._asking.remove(question)
                self._answer(question, tuple(found is Found.HIT for found in question.found), False)
            elif question.transfer.claim and Found.HIT in answers:
                pairs = zip(before, question.found, strict=True)
                new = tuple(was is not Found.HIT and found is Found.HIT for was, found in pairs)
                self._answer(question, new, True)

    def _answer(self, question: TierQuestion, hits: tuple[bool, ...], goes_on: bool) -> None:
        lends = self._lends([key for key, hit in zip(question.keys, hits, strict=True) if hit])
        self._tell(TierAnswer(question.number, hits, goes_on, lends))

    def _look(self, question: TierQuestion, places: Sequence[int]) -> list[Found]:
        """Ask the tier about the keys at these places of a question. A plug-in may answer with anything."""
        answers = [*self._tier.lookup([question.keys[place] for place in places])]
        if len(answers) != len(places):
            raise ValueError(f"{len(answers)} answers to a look-up of {len(places)} keys")
        return answers

    def _lends(self, keys: Sequence[bytes]) -> bool:
        """Return whether these pages, which were found, can be borrowed."""
        return False

    def _tell(self, news: TierAnswer | JobEnd | TierRelease) -> None:
        self._news.append(news)
        self._ring()

    def _safely(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception as error:
            self._failed(error)
            return None

    def _failed(self, error: Exception) -> None:
        before, self.error = self.error, f"{type(error).__name__}: {error}"
        if self.error != before:  # a tier that is down fails alike for every page
            log.warning("the KV tier %s: %s", self.name, self.error)


def _sound(end: JobEnd, pages: int) -> JobEnd:
    """Return a sound end for the loop: a plug-in may return anything."""
    done = tuple([int(checksum) for checksum in end.checksums[:pages]])
    return end._replace(checksums=done, failed=bool(end.failed) and len(done) < pages, nbytes=int(end.nbytes))
