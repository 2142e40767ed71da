"""All open requests: a step's tokens go to their completions. AsyncLLM and LLM both use it.

Nothing here depends on asyncio or a core. One thread uses a Tracker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from time import monotonic_ns

from gapless.base.records import Request, StepLogprobs, StepTokens
from gapless.engine.open_request import Completion, OpenRequest
from gapless.engine.trace import KEPT_REQUESTS, RequestRecord
from gapless.text.tokenizer import Tokenizer

MOST_DEATHS = 2
"""A request that was open when this many engines died ends with the last one."""


class Tracker:
    """All open completions by key. `abort(key)` stops one in the engine that ended here; `idle()` is called after the
    last open request."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        abort: Callable[[int], None],
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        self.tokenizer = tokenizer
        self._abort = abort
        self._idle = idle
        self._open: dict[int, Completion] = {}
        self.requests: dict[str, OpenRequest] = {}
        """Requests with at least one open completion, by request id."""
        self.detok_ns = 0
        """Time of turning tokens into text."""
        self._ended: deque[RequestRecord] = deque(maxlen=KEPT_REQUESTS)

    def open(self, request: OpenRequest) -> None:
        """Start tracking a request; its id must not be open."""
        assert request.request_id not in self.requests, "the caller refuses an id that is open"
        self.requests[request.request_id] = request
        for completion in request.completions:
            self._open[completion.key] = completion

    def on_started(self, key: int, cached: int) -> None:
        """Note that a request left the queue; `cached` of its prompt tokens came from the prefix index."""
        completion = self._open.get(key)
        if completion is None:
            return
        request = completion.owner
        request.preemptions += completion.started
        completion.started = True
        if not request.started:  # a later or preempted completion finds its own prompt cached
            request.started, request.num_cached_tokens = monotonic_ns(), cached

    def on_tokens(self, *steps: StepTokens) -> None:
        """Pass each token to its completion. Tokens of ended completions are dropped.

        Steps of one delivery are announced together: a lagging front does not write each token by itself.
        """
        touched: dict[OpenRequest, None] = {}
        try:
            for item in steps:
                lines = {} if item.logprobs is None else self._on_logprobs(item.logprobs, touched)
                self._hand_out(item, lines, touched)
        finally:  # a request that ended before an inconsistent step still has a reader
            for request in touched:
                try:
                    request.announce()
                except Exception as error:
                    self._reader_failed(request, error)

    def _hand_out(self, item: StepTokens, lines: dict[tuple[int, int], int], touched: dict[OpenRequest, None]) -> None:
        now = monotonic_ns()
        find = self._open.get
        for key, token, flag in item.entries():
            completion = find(key)
            if completion is None:
                continue
            request = completion.owner
            touched[request] = None
            request.first_token = request.first_token or now
            request.last_token = now
            if lines and (line := lines.get((key, completion.length))) is not None:
                assert item.logprobs is not None
                completion.score(token, item.logprobs, line, self.tokenizer)
            stopped = completion.push(token, flag)
            if completion.finish_reason is not None:
                self._close(completion)
            if stopped:
                self._abort(key)
        self.detok_ns += monotonic_ns() - now

    def latest(self, limit: int) -> list[RequestRecord]:
        """Return the newest `limit` requests by arrival, newest last, at most KEPT_REQUESTS, open ones included."""
        known = [*self._ended, *(request.record for request in self.requests.values())]
        return sorted(known, key=lambda record: record.arrival)[-min(limit, KEPT_REQUESTS) :]

    def _reader_failed(self, request: OpenRequest, error: Exception) -> None:
        """End a request whose reader raised. Passed on, the error would look like the engine's and end all requests."""
        request.take()
        for completion in self._forget(request, error):
            self._abort(completion.key)

    def _on_logprobs(self, scored: StepLogprobs, touched: dict[OpenRequest, None]) -> dict[tuple[int, int], int]:
        """Pass prompt log-probabilities to their requests; return the lines of sampled tokens by key and position."""
        lines = {}
        for line, (key, position) in enumerate(zip(scored.keys.tolist(), scored.positions.tolist(), strict=True)):
            completion = self._open.get(key)
            if completion is None:
                continue
            if position < len(completion.owner.prompt_token_ids):
                touched[completion.owner] = None
                completion.owner.scored(position, scored, line)
            else:
                lines[key, position] = line
        return lines

    def _close(self, completion: Completion) -> None:
        del self._open[completion.key]
        if completion.owner.ended:
            self._drop(completion.owner)

    def _drop(self, request: OpenRequest) -> None:
        del self.requests[request.request_id]
        for completion in request.completions:
            del completion.owner  # break the cycle: its memory is freed with its reader
        self._ended.append(request.record)
        if not self.requests:
            self._idle()

    def abort(self, request_id: str) -> bool:
        """End a request's open completions with finish reason "abort", here and in the engine. False if unknown."""
        request = self.requests.get(request_id)
        if request is None:
            return False
        for completion in request.completions:
            if completion.finish_reason is None:
                completion.abort()
                self._close(completion)
                self._abort(completion.key)
        request.announce()
        return True

    def fail(self, key: int, error: Exception) -> None:
        """End the whole request of a refused key with the error."""
        completion = self._open.get(key)
        if completion is None:
            return
        for sibling in self._forget(completion.owner, error):
            if sibling.key != key:
                self._abort(sibling.key)

    def suspend(self, error: Callable[[], Exception], keys: Collection[int] | None = None) -> tuple[int, int]:
        """Have open requests wait for another engine, the ones with these keys, or all: theirs is dead. Requests that
        were open when one died before, which may have been their doing, end with errors. Returns the numbers of
        both."""
        owners = [self._open[key].owner for key in keys or () if key in self._open]
        found, ended = list(self.requests.values() if keys is None else dict.fromkeys(owners)), 0
        for request in found:
            request.deaths, request.waits = request.deaths + 1, True
            if request.deaths == MOST_DEATHS:
                self._forget(request, error())
                ended += 1
        return len(found) - ended, ended

    def resume(self) -> list[Request]:
        """Return what the new engine is to be asked for, the oldest first."""
        waiting = [request for request in self.requests.values() if request.waits]
        for request in waiting:
            request.waits = False
        return sorted([one for request in waiting for one in request.for_another()], key=lambda one: one.key)

    def fail_all(self, error: Callable[[], Exception]) -> None:
        """End every open request with its own error: the engine is dead."""
        for request in list(self.requests.values()):
            self._forget(request, error())

    def _forget(self, request: OpenRequest, error: Exception) -> list[Completion]:
        """End a request with an error; return its completions that were open."""
        request.fail(error)
        self._drop(request)
        return [s for s in request.completions if self._open.pop(s.key, None) is not None]
