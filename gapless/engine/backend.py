"""Common part of both backends: the front's calls become messages, the core's messages calls of the Sink."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gapless.base.errors import EngineDeadError, GaplessError
from gapless.base.records import Request, StepTokens
from gapless.engine import messages as m
from gapless.engine.seam import EngineInfo, EngineView, OperatorOrder, Sink
from gapless.engine.stats import Stats

NO_QUESTION = -1
"""Number of orders without an awaited answer; questions have numbers above 0"""
Asking = Callable[[int], m.Look | m.ChangeAdapter | m.UpdateWeights | m.Operate]


class MessageBackend:
    """The front's handle on an engine, without the start and end of its core. One asyncio loop uses it."""

    info: EngineInfo
    sink: Sink
    last_death: GaplessError | None = None
    """Cause of the last core's death; None before any."""

    def __init__(self) -> None:
        self._ready = asyncio.Event()
        self._watching = self._sends_page_events = False
        self._stats = Stats()
        self._before = Stats()
        """Counters of earlier cores."""
        self._numbers = itertools.count(1)
        self.paused: OperatorOrder | None = None
        """HOLD or FREEZE during a pause, also for a restarted core"""
        self.asked: dict[int, asyncio.Future[Any]] = {}
        """Awaited answers of the core, by question number"""
        self.engines: Sequence[MessageBackend] = (self,)
        self.changes: Counter[str] = Counter()
        """Changes made of each adapter, and of the weights (""), also by earlier cores"""

    def submit(self, request: Request, engine: int | None = None) -> None:
        """Submit a request, to the engine of this number if it is given."""
        self._post(m.pack_request(request))

    def abort(self, key: int) -> None:
        self._post(m.Abort(key))

    async def start(self, sink: Sink) -> None:
        """Return when the engine accepts requests; raise if it cannot start."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    def watch(self, on: bool) -> None:
        """Start or stop sending step records to the sink. Costs the engine nothing while off."""
        self._watching = on
        self._post(m.SetWatching(on))

    def send_page_events(self) -> None:
        """Send changes of the prefix index to the sink, also of later cores.

        A second call restarts the events with a PageChange.CLEARED, after some were lost.
        """
        self._sends_page_events = True
        self._post(m.SendPageEvents())

    async def ask(self, question: Asking) -> Any:
        """Return or raise the core's answer to the message that `question` makes of a number."""
        return await self.put(question)

    def put(self, question: Asking) -> asyncio.Future[Any]:
        """Send the message that `question` makes of a number; the future gets the core's answer."""
        number = next(self._numbers)
        answer = self.asked[number] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(lambda _: self.asked.pop(number, None))
        self._post(question(number))
        return answer

    def _answered(self, number: int, answer: object) -> None:
        """Take an answer. A late one is ignored."""
        future = self.asked.get(number)
        if future is None or future.done():
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def changed(self, number: int, refusal: GaplessError | None) -> None:
        """Take the core's answer to a change."""
        self._answered(number, refusal)

    def forsake(self, error: Callable[[], Exception]) -> None:
        """Answer each open question with its own error: the core will not."""
        for number in list(self.asked):
            self._answered(number, error())

    def died(self, error: Exception) -> None:
        """End all open requests and questions of a dead core that no other follows."""
        self._ready.clear()
        self.sink.died(error)
        self.forsake(lambda: dead(error))

    def broke(self, error: Exception) -> None:
        """Have the open requests of a dead core wait for the next one, and end its questions."""
        self._ready.clear()
        self.sink.broke(error, None, 0)
        self.forsake(lambda: dead(error))

    def came_up(self) -> None:
        """Open the new core for requests, and restore the pause and subscriptions of the last one."""
        if self.paused is not None:
            self._post(m.Operate(NO_QUESTION, self.paused))
        self._ready.set()
        if self._watching:
            self._post(m.SetWatching(True))
        if self._sends_page_events:
            self._post(m.SendPageEvents())
        self.sink.came_up()

    def stats(self) -> Stats:
        """Return the last known numbers: gauges of the present core, counters of all."""
        return self._stats

    def placed_by(self, engine: int) -> Mapping[str, int]:
        """Return how many requests an engine of several got, by the reason."""
        return {}

    def ready(self) -> bool:
        """Return whether the engine accepts requests now."""
        return self._ready.is_set()

    def _post(self, message: m.ToCore) -> bool:
        """Pass a message to the present core; False if it cannot take it."""
        raise NotImplementedError

    def receive(self, messages: Sequence[m.FromCore]) -> None:
        """Deliver messages. Raises ValueError for an inconsistent message, and any error of the sink."""
        sink = self.sink
        tokens: list[StepTokens] = []
        try:
            for message in messages:
                match message:
                    case m.Tokens(settled):
                        tokens.append(settled)
                    case m.Admitted(key, cached):
                        sink.started(key, cached)
                    case m.Refused(key, error):  # it ends its siblings too, whose earlier tokens go first
                        before, tokens = tokens, []
                        sink.tokens(*before)
                        sink.refused(key, error)
                    case m.StatsReport(stats):
                        self._stats = stats.plus(self._before)
                    case m.Steps():
                        sink.steps(m.unpack_steps(message), 0)
                    case m.View(number, steps, pages):
                        self._answered(number, EngineView(m.unpack_steps(steps), pages))
                    case m.PageEventList(events):
                        sink.page_events(events, 0)
                    case m.Changed(number, names, refusal):
                        self.changed(number, refusal)
                        self.info = self.info._replace(adapters=names)
                    case m.Ready(info):
                        self.info = info
                        self.came_up()
        finally:
            if tokens:
                sink.tokens(*tokens)


def dead(error: Exception) -> EngineDeadError:
    """Return a new exception of the engine's end: one object raised in many tasks would mix their tracebacks."""
    another = EngineDeadError(str(error) or type(error).__name__)
    another.__cause__ = error.__cause__ or error
    return another
