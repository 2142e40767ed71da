"""Compiler: makes the matchers of requests on a thread of its own, so that no other request waits for one."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile
from queue import SimpleQueue
from typing import TYPE_CHECKING

from gapless.base.errors import GaplessError, QueueFullError, RequestError
from gapless.base.records import Request
from gapless.base.structured import StructuredOutputs

if TYPE_CHECKING:
    from gapless.grammar.kept import Grammars
    from gapless.grammar.vocabulary import Vocabulary

log = logging.getLogger("gapless.grammar")

MAX_COMPILE_SECONDS = 10.0
"""How long one compilation may take."""
CLOSE_SECONDS = 2.0
COMPILER_STACK_BYTES = 64 << 20
"""Stack of the compiling thread, in bytes; a trial has a sixteenth of it."""


@dataclass(eq=False)
class _Job:
    """A request that waits for its matcher."""

    request: Request
    form: StructuredOutputs
    came: float = field(default_factory=time.monotonic)
    begun: bool = False
    dropped: bool = False
    """No request waits for the result."""


@dataclass(frozen=True, slots=True)
class GrammarCounts:
    waiting: int = 0
    compiled: int = 0
    ns: int = 0
    """Time of compiling them"""
    hits: int = 0
    refused: int = 0


class Compiler:
    """Gives each request with a form of output its matcher, at once where the form's grammar is kept. One thread calls
    it, that of the core.

    `vocabulary` is called once, on the compiler's thread, when the first request comes; `ring` each time that a request
    is ready, on any thread. At most `room` requests wait. A compilation that takes longer than `seconds` cannot be
    ended; its request is refused, and so are others that have waited for as long.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        ring: Callable[[], None],
        room: int,
        seconds: float = MAX_COMPILE_SECONDS,
    ) -> None:
        self._ring = ring
        self._room = room
        self._seconds = seconds
        self._waiting: dict[int, _Job] = {}
        """Requests by key, the oldest first"""
        self._refused = 0
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        """Requests whose forms are to be compiled; None has the thread look for what else there is"""
        self._crowded: deque[StructuredOutputs] = deque()
        """Forms that need another lexer, which is compiled when no request waits"""
        self._done: SimpleQueue[tuple[_Job, Request | GaplessError]] = SimpleQueue()
        self._make_vocabulary = vocabulary
        self.grammars: Grammars | None = None
        self._thread: threading.Thread | None = None
        self._began: float | None = None
        """Time at which the thread began its current job"""
        self._closing = False

    def submit(self, request: Request) -> None:
        """Begin to make the request's matcher. Raises QueueFullError for a new one when too many wait."""
        form = request.params.structured_outputs
        assert form is not None, "a request without a form needs no matcher"
        if len(self._waiting) >= self._room and request.output is None:
            raise QueueFullError(f"{self._room} requests wait for their grammars; try again later")
        if self._thread is None:
            before = threading.stack_size(COMPILER_STACK_BYTES)
            self._thread = threading.Thread(target=self._run, name="gapless-grammar", daemon=True)
            self._thread.start()
            threading.stack_size(before)
        job = self._waiting[request.key] = _Job(request, form)
        if (ready := self._kept(request, form)) is not None:
            self._done.put((job, ready))
            self._ring()
        else:
            self._jobs.put(job)

    def abort(self, key: int) -> None:
        """Forget a request, if it waits here."""
        job = self._waiting.pop(key, None)
        if job is not None:
            job.dropped = True

    @property
    def waiting(self) -> int:
        """Requests that `take` has not returned yet."""
        return len(self._waiting)

    def take(self) -> tuple[list[Request], list[tuple[int, GaplessError]]]:
        """Return the ready requests with their matchers, and the keys of refused ones with the reasons."""
        ready: list[Request] = []
        refused: list[tuple[int, GaplessError]] = []
        while not self._done.empty():
            job, result = self._done.get()
            if job.dropped:
                continue
            del self._waiting[job.request.key]
            if isinstance(result, Request):
                ready.append(result)
            else:
                refused.append((job.request.key, result))
        for job in self._late():
            self.abort(job.request.key)
            refused.append((job.request.key, self._too_late(job)))
        self._refused += len(refused)
        return ready, refused

    def report(self, ready: int = 0) -> GrammarCounts:
        """Return the counts; `ready` more requests have matchers and wait."""
        made = self.grammars
        compiled, ns, hits = (made.compiled, made.compile_ns, made.hits) if made else (0, 0, 0)
        return GrammarCounts(self.waiting + ready, compiled, ns, hits, self._refused)

    def close(self) -> None:
        """End the thread. Waits for its current job, CLOSE_SECONDS at most."""
        for key in list(self._waiting):
            self.abort(key)
        self._closing = True
        self._crowded.clear()
        self._jobs.put(None)
        if self._thread is not None:
            # A daemon thread still in llguidance must not meet the interpreter's end.
            self._thread.join(CLOSE_SECONDS)

    def _late(self) -> list[_Job]:
        latest = time.monotonic() - self._seconds
        if (began := self._began) is None or began > latest:
            return []
        return list(takewhile(lambda job: job.came <= latest, self._waiting.values()))

    def _too_late(self, job: _Job) -> GaplessError:
        if job.begun:
            text = f"{job.form.where} was not compiled in {self._seconds:g} s: simplify it"
            return RequestError(text, job.form.where)
        return QueueFullError("other requests' grammars took too long to compile; try again later")

    def _run(self) -> None:
        while (job := self._next()) is not None:
            if job.dropped:
                continue
            job.begun, self._began = True, time.monotonic()
            self._done.put((job, self._result(job)))
            self._began = None
            self._ring()
        if self.grammars is not None:
            self.grammars.close()

    def _next(self) -> _Job | None:
        """Return the next job, None at the end. Until one comes, do what no request waits for."""
        while True:
            if self._crowded and self._jobs.empty():
                self._grow(self._crowded.popleft())
            elif (job := self._jobs.get()) is not None or self._closing:
                return job

    def _grow(self, form: StructuredOutputs) -> None:
        assert self.grammars is not None
        self._began = time.monotonic()
        try:
            self.grammars.grow(form)
        except BaseException:  # a panic of the library is no Exception
            log.exception("a form of output could not be compiled once more")
        self._began = None

    def _want(self, form: StructuredOutputs) -> None:
        """Have a form compiled once more."""
        self._crowded.append(form)
        self._jobs.put(None)  # the thread may wait there

    def _kept(self, request: Request, form: StructuredOutputs) -> Request | GaplessError | None:
        """Return the request with its matcher, or its refusal, if the form's grammar is kept and nothing has begun,
        which may be long."""
        if self.grammars is None or form.begun:
            return None
        try:
            matcher = self.grammars.kept(form, request.stop_ids)
            return None if matcher is None else request._replace(matcher=self.grammars.within_budget(matcher, form))
        except BaseException as error:
            return _as_refusal(error, form)

    def _result(self, job: _Job) -> Request | GaplessError:
        try:
            if self.grammars is None:
                from gapless.grammar.kept import Grammars  # brings llguidance, which most engines never need

                self.grammars = Grammars(self._make_vocabulary(), self._want)
            matcher = self.grammars.matcher(job.form, job.request.stop_ids)
            return job.request._replace(matcher=self.grammars.within_budget(matcher, job.form))
        except BaseException as error:
            return _as_refusal(error, job.form)


def _as_refusal(error: BaseException, form: StructuredOutputs) -> GaplessError:
    """Return why a request is refused. A panic of the library is no Exception."""
    if isinstance(error, GaplessError):
        return error
    if isinstance(error, SystemExit | KeyboardInterrupt):
        raise error
    log.error("a form of output could not be compiled", exc_info=error)
    return RequestError(f"{form.where} cannot be compiled: {type(error).__name__}", form.where)
