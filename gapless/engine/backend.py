"""Common part of both backends: the front's calls become messages, the core's messages become calls of the Sink."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gapless.base.errors import GaplessError
from gapless.base.records import Request, StepTokens
from gapless.engine import messages as m
from gapless.engine.seam import AdapterChange, EngineInfo, EngineView, Sink, Stats


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

    def look(self, number: int, since: int) -> None:
        """Have Sink.answered called, with this number, the step records since `since` (ns) and the page map."""
        self._post(m.Look(number, since))

    def change_adapter(self, number: int, change: AdapterChange) -> None:
        """Have an adapter loaded or unloaded, and Sink.answered called with this number."""
        self._post(m.ChangeAdapter(number, change))

    def update_weights(self, number: int, path: str) -> None:
        """Have the weights of this directory loaded, and Sink.answered called with this number."""
        self._post(m.UpdateWeights(number, path))

    def changed(self, number: int, refusal: GaplessError | None) -> None:
        """Take the core's answer to a change."""
        self.sink.answered(number, refusal)

    def came_up(self) -> None:
        """Let requests go to the core, and have it send what the one before it sent."""
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
                    case m.Admitted(started):
                        sink.started(started)
                    case m.Refused(key, error):  # it ends its siblings too, whose tokens came before
                        before, tokens = tokens, []
                        sink.tokens(*before)
                        sink.refused(key, error)
                    case m.StatsReport(stats):
                        self._stats = stats.plus(self._before)
                    case m.Steps():
                        sink.steps(m.unpack_steps(message))
                    case m.View(number, steps, pages):
                        sink.answered(number, EngineView(m.unpack_steps(steps), pages))
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
