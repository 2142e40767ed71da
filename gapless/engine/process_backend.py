"""ProcessBackend: a Core in a supervised child process. If it dies, another starts and continues its requests."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from gapless.base.config import EngineConfig
from gapless.base.errors import EngineDeadError, GaplessError, QueueFullError, RequestError
from gapless.base.params import PREFIX_FUNCTION
from gapless.base.records import Request
from gapless.engine import messages as m
from gapless.engine.backend import MessageBackend
from gapless.engine.child import WORKER, Child
from gapless.engine.seam import AdapterChange, Sink
from gapless.engine.stats import Stats
from gapless.model.config import resolve_model_dir
from gapless.model.fingerprint import stamp

log = logging.getLogger("gapless.engine")

CRASH_WINDOW = 600.0
MAX_CRASHES = 3
MAX_BACKOFF = 60.0
SAME_WEIGHTS = 0
"""Number of the backend's own update, which gives a new process its predecessor's weights. Others are larger."""
SAME_ADAPTERS = -2
"""Numbers from here down are of its own changes of adapters"""


class ProcessBackend(MessageBackend):
    """Runs the module `worker`, with its arguments, in a child process.

    Three crashes within ten minutes end the restarts and all open requests: ready() stays false, and `on_give_up` is
    called with the cause.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        worker: Sequence[str] = WORKER,
        on_give_up: Callable[[GaplessError], None] | None = None,
        number: int | None = None,
    ) -> None:
        """`number` is the engine's among several of one model."""
        super().__init__()
        self._number = number
        self.name = "the engine" if number is None else f"engine {number}"
        self.config = config
        self._worker = worker
        self._on_give_up = on_give_up
        self._child: Child | None = None
        self.weights: str | None = None
        """Directory of the updated weights, also for the next child; None for the model's own."""
        self._updates: dict[int, str] = {}
        """Directories of requested updates, by question number"""
        self.adapters: dict[str, AdapterChange] = {}
        """Last change of each adapter, also for the next child"""
        self._changes: dict[int, AdapterChange] = {}
        """Requested changes of adapters, by question number; of a new child, changes and updates to be made first"""
        self._replaced: set[str] = set()
        """Adapters replaced or unloaded since this child came up"""
        self._stale: set[str] = set()
        """Adapters whose requests may have begun with other weights, before this child came up"""
        self._stamp: object = None
        """The files of the weights in use, as they were when they were read; None before"""
        self._rewritten = False
        """Whether these files were written since the child before this one read them."""
        self._crashes: list[float] = []
        self._supervisor: asyncio.Task[None] | None = None
        self.given_up = False
        """Whether no further child is started"""
        self.may_restart = asyncio.Event()
        """Clear while another child has to wait: for the outcome of a change"""
        self.may_restart.set()

    @property
    def pid(self) -> int | None:
        return self._child.pid if self._child else None

    async def start(self, sink: Sink) -> None:
        """Start the engine. Raises the child's own root cause (CheckpointError, ConfigError, ...)."""
        self.sink = sink
        await self._launch()
        self._stamp = self._stamped()
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")
        self._supervisor.add_done_callback(self._unsupervised)

    def submit(self, request: Request, engine: int | None = None) -> None:
        """Submit a request. Errors arrive through the sink, as refusals of the core do."""
        error: GaplessError | None
        if request.params.prefix_allowed_tokens_fn is not None:
            error = RequestError(
                f"{PREFIX_FUNCTION} is a function of this process, and the engine runs in another: use LLM, or "
                "AsyncLLM without a ProcessBackend", PREFIX_FUNCTION
            )  # fmt: skip
        else:
            error = self.offer(m.pack_request(request))
        if error is not None:
            asyncio.get_running_loop().call_soon(self.sink.refused, request.key, error)

    def offer(self, add: m.Add) -> GaplessError | None:
        """Pass a request to the engine, or return why that is refused."""
        if not self._ready.is_set():
            return EngineDeadError("the engine is not running")
        if add.output is not None and len(add.output) and self._rewritten:
            return EngineDeadError("the engine died, and the files of its weights have changed since it read them")
        if add.output is not None and len(add.output) and add.adapter in self._stale:
            return EngineDeadError(f"the engine died, and the adapter {add.adapter!r} has changed since it began")
        if not self._post(add):
            return QueueFullError("the engine does not take requests fast enough; try again later")
        return None

    def came_up(self) -> None:
        # It started like its first predecessor, and gets later changes in the same way: all else stays the same.
        for place, change in enumerate(self.adapters.values()):
            self._post(m.ChangeAdapter(SAME_ADAPTERS - place, change._replace(in_place=True)))
        if self.weights is not None:
            self._post(m.UpdateWeights(SAME_WEIGHTS, self.weights))
        self._restored()

    def _restored(self) -> None:
        """Take requests, once the child has what its predecessor had."""
        if not any(number <= SAME_WEIGHTS for number in (*self._changes, *self._updates)):
            before, self._stamp = self._stamp, self._stamped()
            self._rewritten = before not in (None, self._stamp)
            super().came_up()

    def _stamped(self) -> object:
        """Return a stamp of the files of the weights in use; None without them."""
        with suppress(OSError, GaplessError):
            return stamp(resolve_model_dir(self.weights or self.config.model))
        return None

    def changed(self, number: int, refusal: GaplessError | None) -> None:
        path, change = self._updates.pop(number, None), self._changes.pop(number, None)
        if refusal is None and path is not None:
            self.weights = path
            self.changes[""] += number > SAME_WEIGHTS
            self._stamp = self._stamp if number == SAME_WEIGHTS else self._stamped()
        elif refusal is None and change is not None and number > SAME_WEIGHTS:
            self.adapters[change.name] = change
            self.changes[change.name] += 1
            self._replaced |= {change.name}.intersection(self.info.adapters)
        if number > SAME_WEIGHTS or (path is None and change is None):
            super().changed(number, refusal)
        elif refusal is None or change is not None:
            if refusal is not None and change is not None and change.path:
                log.warning("the new engine is without the adapter %s: %s", change.name, refusal)
            self._restored()
        elif self._child is not None:
            self._child.condemn(f"the weights in use cannot be loaded again: {refusal}")

    def adopt(self, order: m.ChangeAdapter | m.UpdateWeights, why: str) -> None:
        """Have the next child begin with a change that this one did not make, and end this one."""
        if isinstance(order, m.UpdateWeights):
            self.weights, self._stamp = order.path, None
        else:
            self.adapters[order.change.name] = order.change
        self.changes["" if isinstance(order, m.UpdateWeights) else order.change.name] += 1
        if self._child is not None:
            self._child.condemn(why)

    def _post(self, message: m.ToCore) -> bool:
        if isinstance(message, m.UpdateWeights):
            self._updates[message.number] = message.path
        elif isinstance(message, m.ChangeAdapter):
            self._changes[message.number] = message.change
        return self._child is not None and self._child.send(message)

    async def close(self) -> None:
        """End the child and the supervision. May be called at any time, also during start."""
        self._ready.clear()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.gather(self._supervisor, return_exceptions=True)
        if self._child is not None:
            child, self._child = self._child, None
            await child.stop()

    async def _launch(self) -> None:
        child = Child(self.receive, "" if self._number is None else f"{self.name}: ")
        self._child = child
        try:
            await child.start(self.config, self._worker)
            ready, ended = asyncio.ensure_future(self._ready.wait()), asyncio.ensure_future(child.ended())
            try:
                await asyncio.wait([ready, ended], return_when=asyncio.FIRST_COMPLETED)
                if not self._ready.is_set():
                    raise ended.result()
            finally:
                for task in (ready, ended):
                    task.cancel()
                await asyncio.gather(ready, ended, return_exceptions=True)
        except BaseException:
            # If the caller stops waiting (Ctrl-C while the model loads), no process is left running.
            self._ready.clear()
            await child.close()
            self._child = None
            raise
        child.watch_silence()

    async def _supervise(self) -> None:
        while True:
            child = self._child
            assert child is not None
            error = await child.ended()
            self._bury(error)
            await child.close()
            self._child = None
            if not await self._restart():
                return

    def _unsupervised(self, task: asyncio.Task[None]) -> None:
        """Give up after a fault of the supervisor: the engine would not be restarted any more."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.critical("the supervision of %s failed", self.name, exc_info=error)
            self._give_up(EngineDeadError(f"the supervision of {self.name} failed: {error}"))

    def _give_up(self, error: GaplessError) -> None:
        self.last_death, self.given_up = error, True
        self.died(EngineDeadError(f"{self.name} died: {error}"))
        if self._on_give_up is not None:
            self._on_give_up(error)

    async def _restart(self) -> bool:
        """Start another child, with back-off. False after too many crashes."""
        while len(self._crashes) < MAX_CRASHES:
            delay = min(2.0 ** (len(self._crashes) - 1), MAX_BACKOFF)
            log.warning("restarting %s in %g s", self.name, delay)
            await asyncio.sleep(delay)
            await self.may_restart.wait()
            if self._number is not None and self._stamp is not None and self._stamped() != self._stamp:
                why = f"{self.name} is not started again: its files have changed, and the others have the old weights"
                log.error(why)
                self._give_up(EngineDeadError(why))
                return False
            try:
                await self._launch()
            except Exception as error:  # also a failed fork
                self._note_crash(error if isinstance(error, GaplessError) else EngineDeadError(str(error)))
            else:
                log.info("%s is back", self.name)
                return True
        assert self.last_death is not None
        text = "%s crashed %d times within %g minutes; giving up"
        log.error(text, self.name, MAX_CRASHES, CRASH_WINDOW / 60)
        self._give_up(self.last_death)
        return False

    def _bury(self, error: GaplessError) -> None:
        self._updates.clear()
        self._changes.clear()
        self._stale, self._replaced = self._replaced, set()
        self._before = self._stats = Stats().plus(self._stats)
        self._note_crash(error)
        self.broke(EngineDeadError(f"{self.name} died: {error}"))

    def _note_crash(self, error: GaplessError) -> None:
        self.last_death = error
        now = time.monotonic()
        self._crashes = [at for at in self._crashes if now - at < CRASH_WINDOW] + [now]
        log.error("%s died: %s", self.name, error)
