"""The load generator: sends prompts when the schedule and the limit on concurrency let them go, and keeps the times.

Latencies count from the sending of a request, and how late the client itself was is kept beside them, so that the
schedule need not be taken on trust.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from gapless.base.http import HttpAnswer, HttpError
from gapless.engine.progress import Advance
from gapless.lab.datasets import Prompt
from gapless.lab.http import Client
from gapless.lab.records import ClientUse, LoadRun, Sample
from gapless.lab.reply import read_reply
from gapless.lab.stats import Spread

SIDE_PROMPT = "Hi"
HEARTBEAT = 0.05
"""Seconds between two looks at how late the event loop runs."""
HELD_BYTES = 1 << 29
"""Answers are read after the run; beyond this much they are read at once, so that memory stays bounded."""


class _Gate:
    """Lets at most `limit` in; who must wait is let in by who leaves, in order of arrival."""

    def __init__(self, limit: int | None) -> None:
        self._free = math.inf if limit is None else limit
        self._waiting: deque[asyncio.Future[float]] = deque()

    async def enter(self, now: float) -> float:
        """Wait for room; returns the time of it: `now`, or when another request left."""
        if self._free > 0:
            self._free -= 1
            return now
        place = asyncio.get_running_loop().create_future()
        self._waiting.append(place)
        return float(await place)

    def leave(self, at: float) -> None:
        while self._waiting:
            place = self._waiting.popleft()
            if not place.done():
                place.set_result(at)
                return
        self._free += 1


class _Run:
    """One run of load."""

    def __init__(self, client: Client, prompts: Sequence[Prompt], limit: int | None, advance: Advance | None) -> None:
        self._client = client
        self._advance = advance
        self._gate = _Gate(limit)
        self._loop = asyncio.get_running_loop()
        self.late: list[float] = []
        self._held = 0
        self._ended: list[tuple[Sample, HttpAnswer | None]] = []
        """Finished requests, each with its answer if that is not read yet. Times are the loop's."""
        self._next = {prompt.follows: prompt for prompt in prompts if prompt.follows >= 0}
        target = client.target
        # Made before the clock runs: the JSON of a long prompt takes a while.
        self._data = {p.place: target.generation(p.content, p.output_len) for p in prompts if p.follows < 0}

    async def play(self, timed: Sequence[tuple[Prompt, float]]) -> None:
        """Send each prompt at its time, seconds after `start`, then its followers, and wait for all answers."""
        self.start = self._loop.time()
        heart = self._loop.create_task(self._beat())
        tasks = []
        try:
            for prompt, at in sorted(timed, key=lambda pair: pair[1]):
                scheduled = self.start + at
                if (wait := scheduled - self._loop.time()) > 0:
                    await asyncio.sleep(wait)
                tasks.append(self._loop.create_task(self._conversation(prompt, scheduled)))
            await asyncio.gather(*tasks)
        finally:
            for task in (heart, *tasks):
                task.cancel()
            await asyncio.gather(heart, *tasks, return_exceptions=True)

    def samples(self) -> tuple[Sample, ...]:
        """Read the answers. Returns the samples in the order of the prompts."""
        read = [sample if answer is None else read_reply(answer, sample) for sample, answer in self._ended]
        return tuple(sorted((sample.later(-self.start) for sample in read), key=lambda sample: sample.place))

    async def _beat(self) -> None:
        """How late the loop wakes is how wrong a time of arrival may be."""
        due = self._loop.time()
        while True:
            due = max(due, self._loop.time()) + HEARTBEAT
            await asyncio.sleep(due - self._loop.time())
            self.late.append(self._loop.time() - due)

    async def _conversation(self, prompt: Prompt | None, scheduled: float) -> None:
        """A request, and its followers after its answer."""
        said: list[Mapping[str, Any]] = []
        error = ""
        while prompt is not None:
            follower = self._next.get(prompt.place)
            if error:
                now = self._loop.time()
                skipped = f"the turn before failed: {error}"
                sample, answer = Sample(prompt.place, scheduled, now, ended=now, error=skipped, released=now), None
            else:
                sample, answer = await self._one(prompt, scheduled, said)
            ended = sample.ended
            if answer is not None and (follower is not None or self._held >= HELD_BYTES):
                sample, answer = read_reply(answer, sample), None
            self._ended.append((sample, answer))
            if self._advance is not None:
                self._advance(len(self._ended))
            if follower is not None:
                error = sample.error
                said += [{"role": "user", "content": prompt.content}, {"role": "assistant", "content": sample.text}]
                scheduled = ended + follower.pause
                if not error and follower.pause > 0:
                    await asyncio.sleep(scheduled - self._loop.time())
            prompt = follower

    async def _one(
        self, prompt: Prompt, scheduled: float, said: Sequence[Mapping[str, Any]]
    ) -> tuple[Sample, HttpAnswer | None]:
        """Send a request, and return its times or its error, and the answer, which is not read yet."""
        data = self._data.pop(prompt.place, None)
        if data is None:
            content = (*said, {"role": "user", "content": prompt.content})
            data = self._client.target.generation(content, prompt.output_len)
        released = max(scheduled, await self._gate.enter(scheduled))
        sent = ended = self._loop.time()
        answer: HttpAnswer | None = None
        error = ""
        try:
            answer = await self._client.send(data)
            ended = answer.ended
            self._held += sum(len(piece.data) for piece in answer.pieces)
        except HttpError as failure:
            ended, error = self._loop.time(), str(failure)
        finally:
            self._gate.leave(ended)
        return Sample(prompt.place, scheduled, sent, ended=ended, error=error, released=released), answer


@contextmanager
def _no_collection() -> Iterator[None]:
    """A pause of the collector in mid-run would look like one of the server."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


async def _interrupted(play: Coroutine[Any, Any, None]) -> bool:
    """Return whether this task was cancelled meanwhile; it continues all the same."""
    try:
        await play
    except asyncio.CancelledError:
        if (task := asyncio.current_task()) is not None:
            task.uncancel()
        return True
    return False


async def run_load(
    client: Client,
    prompts: Sequence[Prompt],
    times: Sequence[float],
    *,
    concurrency: int | None = None,
    advance: Advance | None = None,
    keep: bool = False,
) -> LoadRun:
    """Stream an answer to every prompt, each sent to the client's target at its time.

    Times are seconds from the start; a prompt's own `at` comes first. At most `concurrency` requests are under way;
    others that are due wait for room. Times that are all 0 with a limit are a closed loop. A turn that follows another
    takes its time from that one, not from `times`. Samples are in the order of the prompts; a failed request is a
    sample with an error, never an exception. With `keep` a cancellation ends the run; finished samples are returned.
    """
    firsts = [(p, at if p.at is None else p.at) for p, at in zip(prompts, times, strict=True) if p.follows < 0]
    run = _Run(client, prompts, concurrency, advance)
    with _no_collection():
        began, cpu = time.perf_counter(), time.process_time()
        interrupted = False
        if keep:
            interrupted = await _interrupted(run.play(firsts))
        else:
            await run.play(firsts)
        wall, busy = time.perf_counter() - began, time.process_time() - cpu
    samples = run.samples()
    use = ClientUse(busy, wall, tuple(run.late))
    first = min((s.sent for s in samples), default=0.0)
    return LoadRun(samples, max((s.ended for s in samples), default=0.0) - first, use, run.start, interrupted)


class SideLoad:
    """Single-token requests beside the load, as an unrelated user sends them.

    Asks, waits 1 / rate seconds, and asks again, until `stop`; no limit on concurrency holds it back.
    """

    def __init__(self, client: Client, rate: float) -> None:
        self._client, self._pause = client, 1 / rate
        self._latencies: list[float] = []
        self._failed = 0
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> dict[str, float]:
        """Return the result under the keys of `vllm bench serve --probe-request-rate`. Latencies are milliseconds."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        keys = ("probe_median_e2el_ms", "probe_p99_e2el_ms", "probe_max_e2el_ms")
        values = (value for _, value in Spread(self._latencies, (50.0, 99.0, 100.0)).percentiles)
        counts = {"probe_completed": len(self._latencies), "probe_failed": self._failed}
        return {**counts, **dict(zip(keys, values, strict=True))}

    async def _run(self) -> None:
        loop, data = asyncio.get_running_loop(), self._client.target.generation(SIDE_PROMPT, 1)
        while True:
            sent = loop.time()
            try:
                reply = read_reply(await self._client.send(data))
            except HttpError:
                self._failed += 1
            else:
                self._failed += bool(reply.error)
                self._latencies += [] if reply.error else [1e3 * (reply.ended - sent)]
            await asyncio.sleep(self._pause)
