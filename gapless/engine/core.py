"""The back side of the engine: model, device and loop, built from one config."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from gapless.base.errors import (
    EngineDeadError,
    EngineError,
    GaplessError,
    QueueFullError,
    RequestError,
)
from gapless.base.records import Request, Turn
from gapless.device import Device
from gapless.engine.adapters import AdapterChanges
from gapless.engine.callbacks import AllowedTokens
from gapless.engine.pauses import Pauses
from gapless.engine.ranks import FollowingRanks
from gapless.engine.seam import AdapterChange, Answer, EngineInfo, OperatorOrder
from gapless.engine.stats import Stats, collect
from gapless.engine.tiers import EngineTiers
from gapless.engine.updates import WeightUpdates
from gapless.grammar.compiler import Compiler
from gapless.loop.loop import Loop
from gapless.loop.records import StepTable
from gapless.loop.watchdog import Watchdog
from gapless.memory.events import PageEvents

MATCHER_SECONDS = 1.0
"""[s] Longest wait of an idle turn for a matcher; then late requests are refused."""


class CoreParts(NamedTuple):
    """A loop, and everything around it."""

    device: Device
    loop: Loop
    compiler: Compiler
    tiers: EngineTiers
    updates: WeightUpdates
    changes: AdapterChanges | None = None
    watchdog: Watchdog | None = None
    ranks: FollowingRanks | None = None

    def close(self) -> None:
        """Stop the watchdog, the compiler, the other ranks and the device. May be called in any state."""
        self.compiler.close()
        if self.ranks:
            self.ranks.stop()
        if self.changes:
            self.changes.close()
        if self.watchdog:
            self.watchdog.stop()
        self.loop.close()
        self.tiers.close()
        self.updates.close()  # last: files being read take time
        self.device.close()
        if self.ranks:
            self.ranks.close()


class EngineCore:
    """A loop over a loaded model. Implements `Core`; one thread drives it."""

    def __init__(self, parts: CoreParts, info: EngineInfo) -> None:
        """Made at the end of the start."""
        self.info = info
        self.loop = loop = parts.loop
        self.bell = loop.bell
        self.updates = parts.updates
        self.pauses = Pauses(loop)
        self._parts, self._compiler, self._changes = parts, parts.compiler, parts.changes
        self._ranks = parts.ranks
        self._matched: deque[Request] = deque()
        """Requests ready for the loop's queue, or waiting for new weights or the end of a pause."""
        self._resumed: set[int] = set()
        """Requests from an engine that died which wait for their matchers: they are older than any pause or update"""
        self._allocations = parts.device.allocations()

    def submit(self, request: Request) -> None:
        if self.updates.placing and request.output is not None:  # moved here from an engine that died meanwhile
            if len(request.output):
                raise QueueFullError("the weights are being replaced, and this request began with others")
            request = request._replace(output=None)
        if request.params.prefix_allowed_tokens_fn is not None:
            request = request._replace(matcher=AllowedTokens(request, self.info.vocab_size))
        ready, waiting = request.params.structured_outputs is None or request.matcher is not None, len(self._matched)
        full = request.output is None and waiting >= self.loop.planner.waiting.limit
        if full and (self.held or not ready):
            raise QueueFullError(f"{waiting} requests are waiting, which is the limit; try again later")
        if not ready:
            self._resumed |= {request.key} if request.output is not None else set()
            self._compiler.submit(request)
        elif self.held and request.output is None:
            self._matched.append(request)
        else:
            self.loop.submit(request)

    def abort(self, key: int) -> None:
        self._compiler.abort(key)
        self._resumed.discard(key)
        self._matched = deque(request for request in self._matched if request.key != key)
        self.loop.abort(key)

    def change_adapter(self, change: AdapterChange, answer: Answer) -> None:

        def done(error: GaplessError | None) -> None:
            if self.loop.parts.adapters is not None:
                self.info = self.info._replace(adapters=tuple(self.loop.parts.adapters.names))
            answer(error)

        if self._changes is None:
            done(RequestError("this engine loads no adapters after its start: start it with --lora-dir", "lora_name"))
        else:
            self._changes.begin(change, done)

    def update_weights(self, path: str, answer: Answer) -> None:
        if self.pauses.keeps and (self.loop.requests or self._resumed):
            text = "a pause holds requests that must end with the old weights: resume or abort them first"
            answer(RequestError(text, "model_path"))
        else:
            self.updates.begin(path, answer)

    def obey(self, order: OperatorOrder, answer: Answer) -> None:
        self.pauses.obey(order, answer)

    @property
    def held(self) -> bool:
        """Whether new requests wait outside the loop."""
        return self.updates.waits or self.pauses.waits

    def wakes(self, wake: Callable[[], None]) -> None:
        self._parts.tiers.wakes(wake)
        if self._ranks is not None:
            self._ranks.wakes(wake)

    def has_work(self) -> bool:
        waiting = self._compiler.waiting + len(self._matched) + (self._changes.waiting if self._changes else 0)
        failed = self._ranks is not None and self._ranks.failure is not None
        return self.loop.has_work() or waiting > 0 or self.updates.under_way or self.pauses.asked or failed

    def rest(self) -> bool:
        return self.loop.rest()

    def step(self) -> Turn:
        """Run one turn of the loop; without other work, wait for a matcher or an adapter.

        Raises:
            EngineError: a program failed on the device, the watchdog fired, or an invariant of ours broke.
        """
        if self._ranks is not None:
            self._ranks.check()
        refused = self._admit()
        changed = self._changes is not None and self._changes.take()
        changed = (not self._resumed and self.updates.take()) or changed
        if not self.loop.has_work():
            rested = not self._resumed and self.pauses.rested()
            if not (rested or refused or changed) and self.bell.wait(MATCHER_SECONDS):
                self.bell.clear()
            return Turn([], [], refused)
        try:
            turn = self.pauses.turn()
        except EngineError:
            if self._ranks is not None:
                self._ranks.check()  # they fail the device
            raise
        except Exception as error:
            raise EngineDeadError(f"the loop failed: {type(error).__name__}: {error}") from error
        return turn._replace(failed=refused + turn.failed)

    def _admit(self) -> list[tuple[int, GaplessError]]:
        """Queue the requests with finished matchers, up to the queue's limit. Returns the refused ones."""
        ready, refused = self._compiler.take() if self._compiler.waiting else ([], [])
        if self._resumed:
            self._resumed -= {request.key for request in ready} | {key for key, _ in refused}
            self._matched.extendleft([request for request in ready[::-1] if request.output is not None])
            ready = [request for request in ready if request.output is None]
        self._matched += ready
        while self._matched and not (self.held and self._matched[0].output is None):
            try:
                self.loop.submit(self._matched[0])
            except QueueFullError:
                break
            except RequestError as error:
                refused.append((self._matched[0].key, error))
            self._matched.popleft()
        return refused

    def stats(self) -> Stats:
        matched, held = len(self._matched), self.held
        grammars = self._compiler.report(ready=0 if held else matched)
        allocations = self._parts.device.allocations() - self._allocations
        return collect(self.loop, matched if held else 0, grammars, allocations)

    def steps_after(self, step: int, since: int = 0) -> StepTable:
        return self.loop.records.after(step, since)

    def page_map(self) -> bytes:
        return b"".join([pool.page_map() for pool in self.loop.pools])

    def page_events(self) -> PageEvents | None:
        index, adapters = self.loop.planner.index, self.loop.parts.adapters
        if index is not None:
            index.events = PageEvents(self.loop.pools, adapters.name_of if adapters else str)
        return index.events if index else None

    def close(self) -> None:
        self._parts.close()
