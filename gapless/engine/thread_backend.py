"""ThreadBackend: a core on a daemon thread of this process."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence

from gapless.base.errors import EngineDeadError
from gapless.engine import messages as m
from gapless.engine.backend import MessageBackend
from gapless.engine.driver import EngineDriver
from gapless.engine.ports import QueuePort
from gapless.engine.seam import Core, Sink

log = logging.getLogger("gapless.engine")


class ThreadBackend(MessageBackend):
    """Runs the core built by `factory` on its own thread, for the asyncio loop that started it."""

    def __init__(self, factory: Callable[[], Core]) -> None:
        super().__init__()
        self._factory = factory
        self._port: QueuePort | None = None

    async def start(self, sink: Sink) -> None:
        """Build the core on its thread; raises the errors of building."""
        assert self._port is None, "a backend starts once"
        self.sink = sink
        loop = asyncio.get_running_loop()
        self._built: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._port = port = QueuePort(loop, self._deliver)
        self.thread = threading.Thread(target=self._run, args=(port,), name="gapless-engine", daemon=True)
        self.thread.start()
        await self._built

    async def close(self) -> None:
        """End the thread after its current step, and the core with it."""
        self._ready.clear()
        if self._port is None:
            return
        self._port.post(m.Stop())
        await self._ended
        self._ready.clear()  # an abandoned start may have succeeded meanwhile
        # Join the ending thread: a daemon thread still in torch must not meet the interpreter's end.
        self.thread.join()

    def _run(self, port: QueuePort) -> None:
        """The life of the engine's thread."""
        try:
            core = self._factory()
        except BaseException as error:
            port.call(self._finish_start, error if isinstance(error, Exception) else _dead(error))
            port.call(self._ended.set_result, None)
            return
        try:
            EngineDriver(core, port).run()
        except BaseException as error:
            port.call(self.died, _dead(error))
        try:
            core.close()
        finally:
            port.call(self._ended.set_result, None)

    # The rest runs on the asyncio loop.

    def _post(self, message: m.ToCore) -> bool:
        if self._port is not None:
            self._port.post(message)
        return self._port is not None

    def _finish_start(self, error: Exception | None = None) -> None:
        if self._built.done():  # its caller stopped waiting
            return
        if error is None:
            self._built.set_result(None)
        else:
            self._built.set_exception(error)

    def _deliver(self, messages: Sequence[m.FromCore]) -> None:
        try:
            self.receive(messages)
        except Exception as error:
            # A fault of this side. Readers of lost messages would wait for ever.
            log.critical("tokens could not be delivered", exc_info=error)
            self._post(m.Stop())
            self.died(_dead(error))
        self._finish_start()


def _dead(error: BaseException) -> EngineDeadError:
    dead = EngineDeadError(f"the engine stopped: {error or type(error).__name__}")
    dead.__cause__ = error
    return dead
