"""EngineDriver: messages in, one turn of the core, messages out. A thread and a process differ only in the Port."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from gapless.base.errors import EngineDeadError, GaplessError
from gapless.engine import messages as m
from gapless.engine.life import Pulse
from gapless.engine.seam import Core
from gapless.memory.events import PageEvents

REPORT_BUSY = 0.05
"""Longest age of a busy engine's numbers, seconds."""
REPORT_IDLE = 1.0
REST_SECONDS = 0.25
"""[s] An engine without messages for this long is at rest. A capture takes about 0.1 s, which delays new requests:
under a load of some requests a second, captures between two of them would cost more than they gain."""
SEND_STEPS_SECONDS = 0.05


class Port(Protocol):
    """The core's end of its connection with the front. Belongs to the core's thread."""

    @property
    def open(self) -> bool:
        """Whether the front is still connected."""

    @property
    def clear(self) -> bool:
        """Whether the front appears to have read all sent messages."""

    def ring_with(self, ring: Callable[[], None]) -> None:
        """Call `ring` for every later message that arrives between two calls of `receive`, possibly more often."""

    def wake(self) -> None:
        """End the present or next wait of `receive`; from any thread."""

    def receive(self, seconds: float) -> Sequence[m.ToCore]:
        """Return all new messages; if there are none, wait for one or `wake`, at most `seconds`."""

    def send(self, messages: list[m.FromCore]) -> None:
        """Send these after the unsent rest of earlier calls. Never waits for the front."""


class EngineDriver:
    """Serves one core on one thread.

    An idle driver waits in the port. A busy core may wait for its device inside a step; the port rings the core's bell,
    which ends that wait.
    """

    def __init__(self, core: Core, port: Port, pulse: Pulse | None = None) -> None:
        self._core = core
        self._port = port
        self._pulse = pulse
        self._seen: int | None = None
        """Last step sent to watchers; None while no client watches"""
        self._due = 0.0
        self._out: list[m.FromCore] = [m.Ready(core.info)]
        self._page_events: PageEvents | None = None
        self._reported = 0.0
        self._worked = False
        self._stopped = self._rested = False
        port.ring_with(core.bell.ring)
        core.wakes(port.wake)

    def run(self) -> None:
        """Serve until Stop arrives or the front disconnects. Raises the core's errors."""
        while not self._stopped and self._port.open:
            self.turn()

    def turn(self) -> None:
        """Take new messages and run one step; without work, wait for a message."""
        busy = self._core.has_work()
        if not busy:
            self._report(REPORT_IDLE)
            self.show(rest=True)
        self._flush()
        # The core's bell does not end this wait: an idle core waits for nothing that could ring it.
        messages = self._port.receive(0.0)
        # Messages go before speculative work.
        if not messages and not busy:
            messages = self._rest()
        self._rested = self._rested and not messages
        for message in messages:
            self._take(message)
        if self._core.has_work() and not self._stopped:
            if self._out:
                self._flush()  # answers do not wait for the step
            self._step()
            self._report(REPORT_BUSY)
            self.show()

    def _rest(self) -> Sequence[m.ToCore]:
        """Let a core at rest prepare likely steps; if there are none, wait for a message."""
        if not self._rested:
            if self._core.has_work():  # its wake-up may be spent
                return []
            messages = self._port.receive(REST_SECONDS)
            if messages or self._core.has_work():
                return messages
            self._rested = True
        # The wake-up for this work may be spent.
        return [] if self._core.has_work() or self._core.rest() else self._port.receive(REPORT_IDLE)

    def _flush(self) -> None:
        """Send queued messages. Open requests bound their number for a front that does not read.

        Page events stay in the index until the front reads: there they cannot outgrow the pages.
        """
        if self._page_events is not None and self._port.clear and (events := self._page_events.take()):
            self._out.append(m.PageEventList(tuple(events)))
        out, self._out = self._out, []
        self._port.send(out)

    def _take(self, message: m.ToCore) -> None:
        match message:
            case m.Add():
                self._add(message)
            case m.Abort(key):
                self._core.abort(key)
            case m.SetWatching(on):
                latest = self._core.steps_after(0) if on else None
                self._seen = None if latest is None else latest[-1].step if latest else 0
            case m.Look(number, since):
                steps = m.pack_steps(self._core.steps_after(0, since))
                self._out.append(m.View(number, steps, self._core.page_map()))
            case m.ChangeAdapter(number, change):
                self._core.change_adapter(change, partial(self._changed, number))
            case m.UpdateWeights(number, path):
                self._core.update_weights(path, partial(self._changed, number))
            case m.Operate(number, order):
                self._core.obey(order, partial(self._changed, number))
            case m.SendPageEvents():
                self._page_events = self._core.page_events()
            case m.Stop():
                self._stopped = True

    def _changed(self, number: int, error: GaplessError | None) -> None:
        self._out.append(m.Changed(number, self._core.info.adapters, error))

    def _add(self, message: m.Add) -> None:
        try:
            self._core.submit(m.unpack_request(message))
        except EngineDeadError:
            raise
        except GaplessError as error:
            self._out.append(m.Refused(message.key, error))

    def _step(self) -> None:
        if self._pulse is not None:
            self._pulse.turn_began = time.monotonic()
        turn = self._core.step()
        if self._pulse is not None:
            self._pulse.turn_began = 0.0
        self._worked = True
        self._out += [m.Admitted(key, cached) for key, cached in turn.started]
        self._out += map(m.Tokens, turn.tokens)
        self._out += [m.Refused(key, error) for key, error in turn.failed]

    def _report(self, every: float) -> None:
        """Send the numbers when due, and at once after the last request."""
        now = time.monotonic()
        last_gone = every == REPORT_IDLE and self._worked
        if last_gone or now - self._reported >= every:
            self._worked = self._worked and not last_gone
            self._reported = now
            self._out.append(m.StatsReport(self._core.stats()))

    def show(self, rest: bool = False) -> None:
        """Send the steps that watchers have not seen: periodically, and before a rest."""
        if self._seen is None or not (rest or time.monotonic() >= self._due):
            return
        self._due = time.monotonic() + SEND_STEPS_SECONDS
        if steps := self._core.steps_after(self._seen):
            self._seen = steps[-1].step
            self._out.append(m.pack_steps(steps))
