"""FakeCore: a Core without a model, for tests of everything in front of it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from gapless.base.bell import Bell
from gapless.base.errors import DeviceError, QueueFullError, RequestError
from gapless.base.params import MAX_LOGPROBS
from gapless.base.records import Flag, Request, StepLogprobs, StepTokens, Turn
from gapless.engine.seam import AdapterChange, Answer, EngineInfo, OperatorOrder
from gapless.engine.stats import Stats
from gapless.loop.records import NO_CAPTURE, NO_COPIES, StepCounts, StepRing, StepTable
from gapless.memory.events import PageEvents
from gapless.plan.queue import QueueCounts

RECORDS = 1024

Script = Callable[[Request, int], int]
"""(request, how many tokens it has) -> the next token."""


def next_token(request: Request, count: int, vocab_size: int) -> int:
    """A token that depends on the prompt, the seed and the position, and nothing else."""
    mixed = int(request.tokens.sum()) * 31 + request.seed * 17 + len(request.tokens) * 7 + count * 13
    return (mixed * 0x9E3779B97F4A7C15 >> 32) % vocab_size


def fake_logprobs(scored: list[tuple[int, int, int]], vocab_size: int) -> StepLogprobs | None:
    """Score (key, position, token): each token is second to the one before it in the vocabulary, at -1, -2, -3, ..."""
    if not scored:
        return None
    keys, positions, tokens = (np.array(column) for column in zip(*scored, strict=True))
    top = np.arange(MAX_LOGPROBS)
    ids = (tokens[:, None] - 1 + top) % vocab_size
    own, tops = np.full(len(scored), -2.0, np.float32), np.broadcast_to(-1.0 - top, ids.shape).astype(np.float32)
    ranks = np.full(len(scored), 2, np.int32)
    return StepLogprobs(keys.astype(np.int64), positions.astype(np.int32), own, ranks, ids.astype(np.int32), tops)


class _Row:
    def __init__(self, request: Request) -> None:
        self.request = request
        self.count = len(request.known) - len(request.tokens)


class FakeCore:
    """Samples a token a step for each running request, `lag` steps late, in order of arrival.

    It keeps the rules of a real core: stop ids from min_len on, max_len, a bounded queue, aborts. With lag > 0 a token
    may come out after its request was aborted, as with steps in flight. `fail_at_step` raises DeviceError there.
    """

    def __init__(
        self,
        vocab_size: int = 100,
        *,
        max_model_len: int = 1024,
        max_num_seqs: int = 256,
        max_queue: int = 1024,
        lag: int = 0,
        script: Script | None = None,
        fail_at_step: int | None = None,
    ) -> None:
        self.info = EngineInfo(
            "no model", "none", "int", vocab_size, max_model_len, max_num_seqs, max_num_seqs, 0, 1, "1", 0
        )
        self.aborted: list[int] = []
        self.orders: list[OperatorOrder] = []
        self.closed = False
        self._script = script or (lambda request, count: next_token(request, count, vocab_size))
        self._max_queue = max_queue
        self._lag = lag
        self._fail_at = fail_at_step
        self._waiting: deque[Request] = deque()
        self._running: dict[int, _Row] = {}
        self._in_flight: deque[StepTokens] = deque()
        self._steps = 0
        self._generated = 0
        self.records = StepRing(RECORDS)
        self.events: PageEvents | None = None
        """Set by a test: this core has no pages."""
        self.bell = Bell()

    def submit(self, request: Request) -> None:
        if len(self._waiting) >= self._max_queue and request.output is None:
            raise QueueFullError(f"{self._max_queue} requests are waiting; try again later")
        if request.max_len > self.info.max_model_len + 1:  # a prompt that fills it can be scored
            raise RequestError(f"{request.max_len} tokens do not fit into {self.info.max_model_len}", "max_tokens")
        self._waiting.append(request)

    def abort(self, key: int) -> None:
        self.aborted.append(key)
        self._running.pop(key, None)
        self._waiting = deque(request for request in self._waiting if request.key != key)

    def change_adapter(self, change: AdapterChange, answer: Answer) -> None:
        """Change the adapters' names; read no file."""
        others = [name for name in self.info.adapters if name != change.name]
        self.info = self.info._replace(adapters=(*others, *([change.name] if change.path else [])))
        answer(None)

    def update_weights(self, path: str, answer: Answer) -> None:
        """Refuse: this core has no weights."""
        answer(RequestError("this core has no weights", "model_path"))

    def obey(self, order: OperatorOrder, answer: Answer) -> None:
        """Record the order without obeying it."""
        self.orders.append(order)
        answer(None)

    def wakes(self, wake: Callable[[], None]) -> None:
        """Do nothing: no event wakes this core."""

    def has_work(self) -> bool:
        return bool(self._waiting or self._running or self._in_flight)

    def rest(self) -> bool:
        return False

    def step(self) -> Turn:
        begin = time.monotonic_ns()
        keys = np.array(list(self._running), np.int64)
        told = self._step()
        end = time.monotonic_ns()
        times = (*4 * (begin,), *NO_COPIES, *NO_CAPTURE)
        self.records.begin(keys, (), self._steps, len(keys), 0, 1, 0, 0, 0, *times, False, False)
        self.records.end((), begin, end, end, end, end, end, True, False, 0)
        return told

    def _step(self) -> Turn:
        self._steps += 1
        if self._fail_at is not None and self._steps >= self._fail_at:
            raise DeviceError(f"step {self._steps} failed on purpose")
        started = self._admit()
        if self._running:
            self._in_flight.append(self._run())
        late = len(self._in_flight) > self._lag or not self._running
        return Turn(started, [self._in_flight.popleft()] if late and self._in_flight else [], [])

    def _admit(self) -> list[tuple[int, int]]:
        started = []
        while self._waiting and len(self._running) < self.info.max_num_seqs:
            request = self._waiting.popleft()
            self._running[request.key] = _Row(request)
            started.append((request.key, 0))
        return started

    def _run(self) -> StepTokens:
        scored: list[tuple[int, int, int]] = []
        settled = [(key, *self._next(row, scored)) for key, row in self._running.items()]
        for key, _, flag in settled:
            if flag != Flag.LIVE:
                del self._running[key]
        self._generated += len(settled)
        keys, tokens, flags = zip(*settled, strict=True)
        columns = np.array(keys, np.int64), np.array(tokens, np.int32), np.array(flags, np.int32)
        return StepTokens(self._steps, *columns, fake_logprobs(scored, self.info.vocab_size))

    def _next(self, row: _Row, scored: list[tuple[int, int, int]]) -> tuple[int, Flag]:
        request = row.request
        token = self._script(request, row.count)
        length = len(request.tokens) + row.count + 1
        while length <= request.min_len and token in request.stop_ids:
            token = (token + 1) % self.info.vocab_size
        row.count += 1
        if token < 0:
            return 0, Flag.ERROR
        if row.count == 1 and request.params.prompt_logprobs is not None:
            scored += [(request.key, at, prompt) for at, prompt in enumerate(request.tokens.tolist()) if at]
        if request.params.logprobs is not None:
            scored.append((request.key, length - 1, token))
        if token in request.stop_ids:
            return token, Flag.STOP
        return token, Flag.LENGTH if length >= request.max_len else Flag.LIVE

    def stats(self) -> Stats:
        return Stats(
            queue=QueueCounts(len(self._running), len(self._waiting), len(self._in_flight)),
            steps=StepCounts(steps=self._steps, generation_tokens=self._generated),
        )

    def steps_after(self, step: int, since: int = 0) -> StepTable:
        """Return records of steps during which the device is always busy."""
        return self.records.after(step, since)

    def page_map(self) -> bytes:
        return b""

    def page_events(self) -> PageEvents | None:
        return self.events

    def close(self) -> None:
        self.closed = True
