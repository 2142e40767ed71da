"""Common part of both backends: the front's calls become messages, the core's messages become calls of the Sink."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from typing import Any

from gapless.base.errors import EngineDeadError, GaplessError
from gapless.base.records import Request, StepTokens
from gapless.engine import messages as m
from gapless.engine.seam import EngineInfo, EngineView, OperatorOrder, Sink, Stats

NO_QUESTION = -1
"""The number of an order whose answer is not waited for; those of questions are above 0"""


class MessageBackend:
    """The front's handle on an engine, but for the life of its core. One asyncio loop uses it."""

    info: EngineInfo
    sink: Sink

    def __init__(self) -> None:
        self._ready = asyncio.Event()
        self._watching = self._sends_page_events = False
        self._stats = Stats()
        self._before = Stats()
        """Counters of the cores that ran before this one."""
        self._numbers = itertools.count(1)
        self.paused: OperatorOrder | None = None
        """HOLD or FREEZE while a pause holds requests, those of a core that is started again too"""
        self.asked: dict[int, asyncio.Future[Any]] = {}
        """Answers that the core owes, by the number of the question"""

    def submit(self, request: Request) -> None:
        self._post(m.pack_request(request))

    def abort(self, key: int) -> None:
        self._post(m.Abort(key))

    async def start(self, sink: Sink) -> None:
        """Return when the engine can take requests; raise when it cannot be brought up."""
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError

    def watch(self, on: bool) -> None:
        """Send step records to the sink from now on, or no more. Costs the engine nothing while off."""
        self._watching = on
        self._post(m.SetWatching(on))

    def send_page_events(self) -> None:
        """Send what enters and leaves the prefix index to the sink from now on, also of later cores.

        A second call has the events begin again with a PageChange.CLEARED, since some were lost.
        """
        self._sends_page_events = True
        self._post(m.SendPageEvents())

    async def ask(self, question: Callable[[int], m.Look | m.ChangeAdapter | m.UpdateWeights | m.Operate]) -> Any:
        """Return the core's answer to the message that `question` makes of a number; raise it where it is an error."""
        number = next(self._numbers)
        answer = self.asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._post(question(number))
            return await answer
        finally:
            del self.asked[number]

    def _answered(self, number: int, answer: object) -> None:
        """Take an answer. One that came too late is ignored."""
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
        """Answer each question that is open with an error of its own: the core will not."""
        for number in self.asked:
            self._answered(number, error())

    def died(self, error: Exception) -> None:
        """The core is gone, and with it all that is open."""
        self._ready.clear()
        self.sink.died(error)
        self.forsake(lambda: dead(error))

    def came_up(self) -> None:
        """Let requests go to the core, and have it send what the one before it sent."""
        if self.paused is not None:
            self._post(m.Operate(NO_QUESTION, self.paused))
        self._ready.set()
        if self._watching:
            self._post(m.SetWatching(True))
        if self._sends_page_events:
            self._post(m.SendPageEvents())

    def stats(self) -> Stats:
        """The last known numbers: gauges of the core that runs now; counters go on across restarts."""
        return self._stats

    def ready(self) -> bool:
        """Return whether the engine can take requests now."""
        return self._ready.is_set()

    def _post(self, message: m.ToCore) -> bool:
        """Pass a message to the core that runs now; false when it cannot take it."""
        raise NotImplementedError

    def receive(self, messages: Sequence[m.FromCore]) -> None:
        """Deliver. Raises ValueError for a message whose parts do not fit together, and what the sink raises."""
        sink = self.sink
        tokens: list[StepTokens] = []
        try:
            for message in messages:
                match message:
                    case m.Tokens(settled):
                        tokens.append(settled)
                    case m.Admitted(key, cached):
                        sink.started(key, cached)
                    case m.Refused(key, error):  # it ends its siblings too, whose tokens came before
                        before, tokens = tokens, []
                        sink.tokens(*before)
                        sink.refused(key, error)
                    case m.StatsReport(stats):
                        self._stats = stats.plus(self._before)
                    case m.Steps():
                        sink.steps(m.unpack_steps(message))
                    case m.View(number, steps, pages):
                        self._answered(number, EngineView(m.unpack_steps(steps), pages))
                    case m.PageEventList(events):
                        sink.page_events(events)
                    case m.Changed(number, names, refusal):
                        self.info = self.info._replace(adapters=names)
                        self.changed(number, refusal)
                    case m.Ready(info):
                        self.info = info
                        self.came_up()
        finally:
            if tokens:
                sink.tokens(*tokens)


def dead(error: Exception) -> EngineDeadError:
    """Return one more exception of the engine's end: one object raised in many tasks would mix their tracebacks."""
    another = EngineDeadError(str(error) or type(error).__name__)
    another.__cause__ = error.__cause__ or error
    return another
