"""Fleet: several engines of one host behind one front (--data-parallel-size).

They share nothing and exchange no message. Each request, with all its completions, goes to one of them. If that one
dies, its requests continue on the others at once, and it is started again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError, EngineDeadError, GaplessError, RequestError
from gapless.base.records import Flag, PageEvent, Request, StepTokens
from gapless.engine import messages as m
from gapless.engine.backend import Asking, MessageBackend
from gapless.engine.placing import Candidate, PageBook, choose
from gapless.engine.process_backend import ProcessBackend
from gapless.engine.seam import OperatorOrder, Sink
from gapless.engine.stats import Stats
from gapless.memory.prefix import PrefixHasher

log = logging.getLogger("gapless.engine")

Begun = tuple[int, int]
"""Numbers of changes that an engine had made of its weights and of an adapter"""
REASONS = ("rank", "moved", "prefix", "load")
"""Reasons for an engine: the client's rank, the death of another, the longest prefix, the fewest requests"""
MOST_PAGES = 512
"""[pages] Most pages of a prompt that the choice of an engine looks at: to name them takes 0.6 ms."""


class Placed(NamedTuple):
    """An open request's place."""

    engine: int
    adapter: str
    pages: Sequence[bytes]
    """Names of its prompt's pages"""
    state: Begun | None = None
    """The engine's state as it left the queue, there or on an engine before"""


class Fleet(MessageBackend):
    """Several engines as one. After the last of them is given up, `on_give_up` is called with the cause."""

    def __init__(
        self,
        engines: Sequence[ProcessBackend],
        on_give_up: Callable[[GaplessError], None] | None = None,
        device_ids: str | None = None,
    ) -> None:
        super().__init__()
        self._device_ids = device_ids
        self.engines: Sequence[ProcessBackend] = engines
        self.given_up: set[int] = set()
        """Engines that are not started again"""
        self._placed: Counter[tuple[int, str]] = Counter()
        """Requests so far, by engine and reason"""
        self._on_give_up = on_give_up
        self._open: dict[int, Placed] = {}
        self._lost: dict[int, Placed] = {}
        """Requests of a dead engine that have not been placed again"""
        self.loads = [0] * len(engines)
        """Requests in flight, by engine"""
        self._turn = 0
        self._latest: tuple[object, int] = None, 0
        """The latest prompt, whose completions stay together, and its engine"""
        self._hasher = PrefixHasher("", 1)
        self._books: list[PageBook] = []
        self._started = False
        self._changing = 0
        """Changes of weights or adapters that are under way"""
        self._shares = engines[0].config.enable_prefix_caching
        """True if an engine computes the pages of equal prompts once."""

    # Life

    async def start(self, sink: Sink) -> None:
        """Start all engines together. Raises the error of the first that cannot start; `close` ends the rest."""
        self.sink = sink
        starts = [asyncio.ensure_future(one.start(self._sink_of(number))) for number, one in enumerate(self.engines)]
        try:
            await asyncio.gather(*starts)
        finally:
            for start in starts:
                start.cancel()
            await asyncio.gather(*starts, return_exceptions=True)
        if self._device_ids is not None and not self.engines[0].info.own_memory:
            raise ConfigError(f"device_ids: {self.engines[0].info.device} has no devices to choose from: leave it out")
        sizes = {one.info._replace(startup_seconds=(), pages=0, kv_bytes=0) for one in self.engines}
        if len(sizes) > 1:
            raise ConfigError(f"data_parallel_size: the engines differ: {' and '.join(map(str, sizes))}")
        self._started = True
        self._on_up()
        # Events have names by pages of this size, so they are asked for after it is known.
        self._hasher = PrefixHasher("", self.info.page_size)
        self._books = [PageBook(self._hasher) for _ in self.engines]
        self.send_page_events()

    async def close(self) -> None:
        await asyncio.gather(*[engine.close() for engine in self.engines])

    def ready(self) -> bool:
        """Return whether one of them accepts requests now."""
        return any(engine.ready() for engine in self.engines)

    def _sink_of(self, number: int) -> Sink:
        return Sink(
            started=self._on_started,
            tokens=self._on_tokens,
            refused=self._on_refused,
            steps=lambda steps, _: self.sink.steps(steps, number),
            page_events=lambda events, _: self._on_page_events(number, events),
            died=partial(self._on_death, number),
            broke=lambda error, _, __: self._on_break(number, error),
            came_up=self._on_up,
        )

    def _refresh(self) -> None:
        names = dict.fromkeys([name for engine in self.engines for name in engine.info.adapters])
        self.info = self.engines[0].info._replace(adapters=tuple(names))

    def _on_break(self, number: int, error: Exception) -> None:
        """Have the requests of a dead engine continue on the others, or wait for the first that is back."""
        self.last_death = self.engines[number].last_death
        lost = {key: placed for key, placed in self._open.items() if placed.engine == number}
        for key in lost:
            self._forget(key)
        self._lost |= lost
        self._latest = None, 0
        if self._books:
            self._books[number] = PageBook(self._hasher)
        self.sink.broke(error, lost, number)
        if self.ready():
            self._on_up()

    def _on_up(self) -> None:
        if self._started:
            self._refresh()
            self.sink.came_up()
            self._lost.clear()

    def _on_death(self, number: int, error: Exception) -> None:
        self.given_up.add(number)
        self._on_break(number, error)
        left = len(self.engines) - len(self.given_up)
        if left:
            log.error("engine %d is given up; %d of %d are left", number, left, len(self.engines))
            return
        self.sink.died(error)
        if self._on_give_up is not None:
            self._on_give_up(self.last_death or EngineDeadError(str(error)))

    # Requests

    def submit(self, request: Request, engine: int | None = None) -> None:
        """Submit a request to the engine of this number, else to the best one. Errors arrive through the sink."""
        before, again = self._lost.get(request.key), self._latest[0] is request.tokens
        pages = before.pages if before else [] if again else self._pages_of(request)
        try:
            number = self._place(request, engine, pages)
        except GaplessError as error:
            asyncio.get_running_loop().call_soon(self.sink.refused, request.key, error)
            return
        if self.paused is not None and request.output is not None and not len(request.output):
            request = request._replace(output=None)  # it waits as new ones do
        self._latest = request.tokens, number
        self._open[request.key] = Placed(number, request.adapter, pages, before.state if before else None)
        self._books[number].expect(pages)
        self.loads[number] += 1
        self.engines[number].submit(request)

    def abort(self, key: int) -> None:
        self._lost.pop(key, None)
        if (number := self._forget(key)) is not None:
            self.engines[number].abort(key)

    def _pages_of(self, request: Request) -> list[bytes]:
        """Return our names of the prompt's first pages; none if engines share no pages."""
        if not self._shares:
            return []
        tokens = request.tokens[: MOST_PAGES * self._hasher.page_size]
        return self._hasher.after(self._hasher.root(request.salt, request.adapter), tokens)

    def _place(self, request: Request, engine: int | None, pages: Sequence[bytes]) -> int:
        """Return the number of the engine for a request. Raises EngineDeadError."""
        state = before.state if (before := self._lost.get(request.key)) else None
        begun = state is not None and request.output is not None and len(request.output) > 0
        if request.tokens is self._latest[0] and not begun:
            return self._latest[1]
        if engine is not None:
            if not self.engines[engine].ready():
                raise EngineDeadError(f"engine {engine} is not running, and X-data-parallel-rank asks for it")
            self._placed[engine, "rank"] += 1
            return engine
        found = [
            number for number, one in enumerate(self.engines)
            if one.ready() and (not request.adapter or request.adapter in one.info.adapters)
        ]  # fmt: skip
        if begun:
            found = [number for number in found if self._state(number, request.adapter) == state]
        if not found:
            raise EngineDeadError("no engine is running that could serve this request, or continue it")
        size = self._hasher.page_size / min(len(request.tokens), MOST_PAGES * self._hasher.page_size)
        matched = {number: size * self._books[number].begins(pages) for number in found}
        number = choose([Candidate(one, self.loads[one], share) for one, share in matched.items()], self._turn)
        why = "prefix" if matched[number] > min(matched.values()) else "load"
        self._turn = number + 1
        self._placed[number, "moved" if before else why] += 1
        return number

    def _state(self, number: int, adapter: str) -> Begun:
        """Return the state of an engine, as far as it matters to a request for this adapter."""
        changes = self.engines[number].changes
        return changes[""], changes[adapter]

    def _forget(self, key: int) -> int | None:
        """Return the engine of a request that is not there any more."""
        if (placed := self._open.pop(key, None)) is None:
            return None
        self.loads[placed.engine] -= 1
        self._books[placed.engine].ended(placed.pages)
        return placed.engine

    def _on_started(self, key: int, cached: int) -> None:
        placed = self._open.get(key)
        if placed is not None and placed.state is None:
            self._open[key] = placed._replace(state=self._state(placed.engine, placed.adapter))
        self.sink.started(key, cached)

    def _on_page_events(self, number: int, events: Sequence[PageEvent]) -> None:
        self._books[number].take(events)
        self.sink.page_events(events, number)

    def _on_tokens(self, *steps: StepTokens) -> None:
        for step in steps:
            for key in step.keys[step.flags != Flag.LIVE].tolist():
                self._forget(key)
        self.sink.tokens(*steps)

    def _on_refused(self, key: int, error: Exception) -> None:
        self._forget(key)
        self.sink.refused(key, error)

    # Orders

    async def ask(self, question: Asking) -> Any:
        """Have all engines carry out an order. A change that only some of them make is made by the rest as they are
        started again; raises the refusal of all."""
        order, living = question(0), [n for n in range(len(self.engines)) if n not in self.given_up]
        for engine in self.engines:
            engine.paused = self.paused
        if isinstance(order, m.ChangeAdapter | m.UpdateWeights):
            return await asyncio.shield(asyncio.ensure_future(self._change(question, order, living)))
        # One that is not up has nothing to forget, and begins paused or not.
        while True:
            answers = [self.engines[number].put(question) for number in living if self.engines[number].ready()]
            found = await asyncio.gather(*answers, return_exceptions=True)
            failed = [one for one in found if isinstance(one, BaseException)]
            if not failed:
                return
            if len(failed) == len(found) or not all([isinstance(one, EngineDeadError) for one in failed]):
                raise failed[0]
            # One died: its requests may have moved to an engine that had carried out the order.

    async def _change(self, question: Asking, order: m.ChangeAdapter | m.UpdateWeights, living: list[int]) -> None:
        if down := [number for number in living if not self.engines[number].ready()]:
            raise EngineDeadError(f"engine {down[0]} is being restarted, and would not get this: try again later")
        if isinstance(order, m.UpdateWeights) and self.paused is OperatorOrder.FREEZE and self._open:
            text = "a pause holds requests that must end with the old weights: resume or abort them first"
            raise RequestError(text, "model_path")
        self._changing += 1
        self._let_restart()
        try:
            answers = [self.engines[number].put(question) for number in living]
            found = await asyncio.gather(*answers, return_exceptions=True)
            failed = [(number, error) for number, error in zip(living, found, strict=True) if error is not None]
            if len(failed) == len(living):
                raise failed[0][1]
            for number, error in failed:
                why = f"engine {number} did not make a change of the others, and is started again with it: {error}"
                log.error(why)
                self.engines[number].adopt(order, why)
        finally:
            self._changing -= 1
            self._let_restart()
        self._refresh()

    def _let_restart(self) -> None:
        """Have engines that die during a change wait for its outcome, which the next one begins with."""
        for engine in self.engines:
            engine.may_restart.clear() if self._changing else engine.may_restart.set()

    def send_page_events(self) -> None:
        for engine in self.engines if self._books else ():
            engine.send_page_events()

    def forsake(self, error: Callable[[], Exception]) -> None:
        for engine in self.engines:
            engine.forsake(error)

    def stats(self) -> Stats:
        """Return the sums of the last known numbers."""
        first, *others = [engine.stats() for engine in self.engines]
        for one in others:
            first = first.beside(one)
        return first

    def placed_by(self, engine: int) -> Mapping[str, int]:
        return {reason: self._placed[engine, reason] for reason in REASONS}


def fleet_of(
    config: EngineConfig, worker: Sequence[str], on_give_up: Callable[[GaplessError], None] | None = None
) -> Fleet:
    """Return the engines that a located config asks for, each with its own devices."""
    size, devices = config.tensor_parallel_size, config.devices
    if len(devices) != size * config.data_parallel_size:
        raise ConfigError(
            f"device_ids must be {size * config.data_parallel_size} numbers, one for each rank of "
            f"tensor_parallel_size in each engine of data_parallel_size, got {config.device_ids!r}"
        )
    if len(set(devices)) < len(devices) and not (config.kv_cache_memory_bytes or config.num_gpu_blocks_override):
        raise ConfigError(
            "device_ids: engines that share a GPU cannot see how much of its memory is theirs: give "
            "--kv-cache-memory-bytes, the bytes of one engine's pages, or --num-gpu-blocks-override"
        )
    parts = [devices[first : first + size] for first in range(0, len(devices), size)]
    return Fleet(
        [
            ProcessBackend(replace(config, device_ids=",".join(map(str, part))), worker=worker, number=number)
            for number, part in enumerate(parts)
        ],
        on_give_up,
        config.device_ids,
    )
