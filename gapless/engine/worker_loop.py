"""Drives a Core inside the engine's process: inbox, one turn, outbox, for ever."""

from __future__ import annotations

import gc
import select
import time
import traceback
from typing import TYPE_CHECKING

import msgspec

from gapless.base.config import EngineConfig
from gapless.base.errors import EngineDeadError, GaplessError, UserError
from gapless.base.records import StepTokens
from gapless.engine import messages as m
from gapless.engine.feed import StepFeed
from gapless.engine.seam import Core, Started, View
from gapless.engine.wire import Wire, connect

if TYPE_CHECKING:
    from gapless.engine.worker import Control, ParentWatch, Pulse

REPORT_BUSY = 0.25
REPORT_IDLE = 1.0


def serve(parent: ParentWatch, control: Control, pulse: Pulse, fake: str) -> bool:
    """Build the core and run it until the parent says stop; false when it failed, which the control pipe explains."""
    try:
        boot = msgspec.json.decode(parent.settings(), type=m.Boot)
        core = _build(boot.engine, fake)
        pulse.arm(boot.engine.watchdog_seconds)
        Worker(core, connect(parent.address), pulse).run()
        parent.tidy()  # if the parent died, this thread may have seen it first
    except Exception as error:
        if not isinstance(error, UserError):
            traceback.print_exc()
        control.say(msgspec.json.encode(m.last_words(error)))
        return False
    return True


def _build(config: EngineConfig, fake: str) -> Core:
    if fake:
        return _fake_core(*fake.split(":"))
    from gapless.engine.core import build_core

    return build_core(config)


def _fake_core(vocab_size: str, seconds: str, fail_at: str = "") -> Core:
    """The shipped test double, at `seconds` a step; it fails at step `fail_at`."""
    from gapless.engine.fake import FakeCore

    class Paced(FakeCore):
        def step(self) -> tuple[list[Started], list[StepTokens]]:
            time.sleep(float(seconds))
            return super().step()

    return Paced(int(vocab_size), fail_at_step=int(fail_at) if fail_at else None)


class Worker:
    """One core, one wire, one thread."""

    def __init__(self, core: Core, wire: Wire, pulse: Pulse) -> None:
        self._core = core
        self._pulse = pulse
        self._wire = wire
        self._out: list[m.FromChild] = []
        self._reported = 0.0
        self._worked = False
        self._stopped = False
        self._feed = StepFeed(core)

    def run(self) -> None:
        """Serve until Stop arrives. Raises what the core raises."""
        self._out.append(m.Ready(self._core.info))
        gc.collect()
        gc.freeze()  # what start-up made stays; collections need not walk it
        while not self._stopped and self._wire.open:
            self._turn()
        # Not after a failure: a core in doubt may hang in close, and the last words have to come first.
        self._core.close()
        self._wire.close()

    def _turn(self) -> None:
        busy = self._core.has_work()
        if not busy:
            self._report(REPORT_IDLE)
            self._show(rest=True)
        self._flush()
        if not busy:
            wake_for = (self._wire,) if not self._wire.clear else ()
            select.select((self._wire,), wake_for, (), REPORT_IDLE)
        for frame in self._wire.receive():
            for message in m.decode_to_child(frame):
                self._take(message)
        if self._core.has_work():
            self._step()
            self._report(REPORT_BUSY)
            self._show()

    def _take(self, message: m.ToChild) -> None:
        if isinstance(message, m.Add):
            self._add(message)
        elif isinstance(message, m.Abort):
            self._core.abort(message.key)
        elif isinstance(message, m.Watch):
            self._feed.switch(message.on)
        elif isinstance(message, m.Look):
            view = View(message.number, self._core.steps_after(0, message.since), self._core.page_map())
            self._out.append(m.pack_view(view))
        else:
            self._stopped = True

    def _add(self, message: m.Add) -> None:
        try:
            self._core.submit(m.unpack_request(message))
        except EngineDeadError:
            raise
        except GaplessError as error:
            self._out.append(m.pack_refusal(message.key, error))

    def _step(self) -> None:
        self._pulse.turn_began = time.monotonic()
        started, tokens = self._core.step()
        self._worked = True
        self._pulse.turn_began = 0.0
        self._out.extend(m.Began(item.key, item.cached) for item in started)
        self._out.extend(m.pack_tokens(item) for item in tokens)

    def _report(self, every: float) -> None:
        """Say the numbers when they are due, and at once when the last request has gone."""
        now = time.monotonic()
        last_gone = every == REPORT_IDLE and self._worked
        if last_gone or now - self._reported >= every:
            self._worked = self._worked and not last_gone
            self._reported = now
            self._out.append(m.Report(self._core.stats()))

    def _show(self, rest: bool = False) -> None:
        """Send step records to those who watch."""
        if self._feed.on and (records := self._feed.take(rest)):
            self._out.append(m.pack_steps(records))

    def _flush(self) -> None:
        """Send what there is to say. The loop never waits for the front; open requests bound what gathers."""
        if self._out:
            self._wire.send(m.encode(self._out))
            self._out = []
        elif not self._wire.clear:
            self._wire.flush()
