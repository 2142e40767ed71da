"""ThreadBackend: a core on a daemon thread of this process."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from typing import NamedTuple

from gapless.base.errors import EngineDeadError, QueueFullError, RequestError
from gapless.base.records import Request, StepTokens
from gapless.engine.feed import StepFeed
from gapless.engine.seam import Core, CoreFactory, EngineInfo, Sink, Started, Stats, View

log = logging.getLogger("gapless.engine")

STATS_SECONDS = 0.05
"""How old the numbers of a busy engine may be."""


class _Abort(NamedTuple):
    key: int


class _Watch(NamedTuple):
    on: bool


class _Look(NamedTuple):
    number: int
    since: int


class _Close(NamedTuple):
    pass


_Message = Request | _Abort | _Watch | _Look | _Close


class ThreadBackend:
    """Runs the core that `factory` builds on a thread of its own; speaks to the asyncio loop that started it.

    Requests and aborts go through an inbox that a busy core reads between steps and an idle one waits on.
    """

    info: EngineInfo

    def __init__(self, factory: CoreFactory) -> None:
        self._factory = factory
        self._inbox: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._ready = False
        self._stats = Stats()
        self._thread: threading.Thread | None = None

    async def start(self, sink: Sink) -> None:
        """Build the core on its thread; raises what building it raised."""
        assert self._thread is None, "a backend starts once"
        self._sink = sink
        self._loop = asyncio.get_running_loop()
        self._built: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run, name="gapless-engine", daemon=True)
        self._thread.start()
        self.info = await self._built
        self._ready = True

    def submit(self, request: Request) -> None:
        self._inbox.put(request)

    def abort(self, key: int) -> None:
        self._inbox.put(_Abort(key))

    def watch(self, on: bool) -> None:
        self._inbox.put(_Watch(on))

    def look(self, number: int, since: int) -> None:
        self._inbox.put(_Look(number, since))

    def stats(self) -> Stats:
        return self._stats

    def ready(self) -> bool:
        return self._ready

    async def close(self) -> None:
        """End the thread after its current step, and the core with it."""
        self._ready = False
        if self._thread is None:
            return
        self._inbox.put(_Close())
        await self._ended
        # The thread is past its last line; a daemon thread still in torch must not meet the interpreter's end.
        self._thread.join()

    # The rest runs on the engine's thread.

    def _run(self) -> None:
        try:
            core = self._factory()
        except BaseException as error:
            self._post(self._fail_start, _as_exception(error))
            self._post(self._ended.set_result, None)
            return
        self._post(self._finish_start, core.info)
        try:
            self._serve(core)
        except BaseException as error:
            self._post(self._die, _dead(error))
        finally:
            self._finish(core)

    def _finish(self, core: Core) -> None:
        try:
            core.close()
        finally:
            self._post(self._ended.set_result, None)

    def _serve(self, core: Core) -> None:
        fresh, feed = 0.0, StepFeed(core)
        while self._read_inbox(core, feed):
            if core.has_work():
                started, tokens = core.step()
                if (started or tokens) and not self._post(self._deliver, started, tokens):
                    return
            now = time.monotonic()
            if now >= fresh or not core.has_work():
                self._stats, fresh = core.stats(), now + STATS_SECONDS
            if feed.on and (records := feed.take(not core.has_work())):
                self._post(self._sink.steps, records)

    def _read_inbox(self, core: Core, feed: StepFeed) -> bool:
        """Apply every message that is there; wait for one when the core has nothing to do. False to end."""
        wait = not core.has_work()
        while True:
            try:
                message = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            wait = False
            if isinstance(message, _Close):
                return False
            if isinstance(message, _Abort):
                core.abort(message.key)
            elif isinstance(message, _Watch):
                feed.switch(message.on)
            elif isinstance(message, _Look):
                view = View(message.number, core.steps_after(0, message.since), core.page_map())
                self._post(self._sink.view, view)
            else:
                self._submit(core, message)

    def _submit(self, core: Core, request: Request) -> None:
        try:
            core.submit(request)
        except (QueueFullError, RequestError) as error:
            self._post(self._sink.refused, request.key, error)

    def _post(self, function: object, *args: object) -> bool:
        """Run something on the asyncio loop. False when that loop is gone, and with it everybody who listens."""
        try:
            self._loop.call_soon_threadsafe(function, *args)  # type: ignore[arg-type]
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            return False
        return True

    # Back on the loop's thread. Whoever awaited start() may have been cancelled.

    def _finish_start(self, info: EngineInfo) -> None:
        if not self._built.done():
            self._built.set_result(info)

    def _fail_start(self, error: Exception) -> None:
        if not self._built.done():
            self._built.set_exception(error)

    def _deliver(self, started: list[Started], tokens: list[StepTokens]) -> None:
        try:
            for start in started:
                self._sink.started(start)
            for settled in tokens:
                self._sink.tokens(settled)
        except Exception as error:
            # A fault of this side. Who waited for the rest would wait for ever.
            log.critical("tokens could not be delivered", exc_info=error)
            self._inbox.put(_Close())
            self._die(_dead(error))

    def _die(self, error: EngineDeadError) -> None:
        self._ready = False
        self._sink.died(error)


def _dead(error: BaseException) -> EngineDeadError:
    dead = EngineDeadError(f"the engine stopped: {error or type(error).__name__}")
    dead.__cause__ = error
    return dead


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else _dead(error)
