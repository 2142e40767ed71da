"""A backend whose engine dies after chosen deliveries of tokens, and is followed by another: all in one thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from gapless.base.config import EngineConfig
from gapless.base.errors import EngineDeadError
from gapless.engine import messages as m
from gapless.engine.backend import MessageBackend
from gapless.engine.driver import EngineDriver
from gapless.engine.seam import Core, OperatorOrder, Sink


class Killed(Exception):
    """The engine's process is gone: what it has made and not delivered is lost."""


class MortalPort:
    """Carries messages as a socket does, and dies in the middle of a delivery."""

    open = clear = True

    def __init__(self, backend: MortalBackend) -> None:
        self._backend = backend
        self.inbox: list[m.ToCore] = []

    def ring_with(self, ring):
        """Nothing waits for the device here."""

    def wake(self):
        """Nothing waits here."""

    def receive(self, seconds):
        taken, self.inbox = self.inbox, []
        return m.decode_to_core(m.encode(taken)) if taken else []

    def send(self, messages):
        self._backend.delivers(m.decode_from_core(m.encode(messages)) if messages else [])


class MortalBackend(MessageBackend):
    """An engine that dies after these deliveries of tokens. Its successor is the same core, which has forgotten all."""

    def __init__(self, core: Core, dies_after: Collection[int] = ()) -> None:
        super().__init__()
        self.core, self.dies_after = core, dies_after
        self.delivered = self.deaths = 0
        self.at_death: Callable[[], None] = lambda: None
        """Called while no engine runs"""
        self._keys: set[int] = set()
        self.config, self.may_restart = EngineConfig("demo"), asyncio.Event()

    async def start(self, sink: Sink) -> None:
        self.sink = sink
        self._living = asyncio.create_task(self._live())
        await self._ready.wait()

    async def close(self) -> None:
        self._ready.clear()
        self._living.cancel()
        await asyncio.gather(self._living, return_exceptions=True)
        self._forget()

    def delivers(self, messages: list[m.FromCore]) -> None:
        for message in messages:
            self.receive([message])
            if isinstance(message, m.Tokens):
                self.delivered += 1
                if self.delivered in self.dies_after:
                    raise Killed

    async def _live(self) -> None:
        while True:
            self._port = MortalPort(self)
            driver = EngineDriver(self.core, self._port)
            try:
                while True:
                    driver.turn()
                    await asyncio.sleep(0 if self.core.has_work() else 0.001)
            except Killed:
                self.deaths += 1
                self._forget()
                self.broke(EngineDeadError("killed on purpose"))
                self.at_death()
            except Exception as error:  # a fault of the front or the core: no test waits for it
                self.died(error)
                raise

    def _forget(self) -> None:
        for key in self._keys:
            self.core.abort(key)
        while self.core.has_work():
            self.core.step()
        self.core.obey(OperatorOrder.FORGET, lambda refusal: None)

    def _post(self, message: m.ToCore) -> bool:
        if isinstance(message, m.Add):
            self._keys.add(message.key)
        self._port.inbox.append(message)
        return True
