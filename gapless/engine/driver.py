"""EngineDriver: messages in, one turn of the core, messages out. A thread and a process differ in the Port alone."""

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
"""How old the numbers of a busy engine may be, seconds."""
REPORT_IDLE = 1.0
REST_SECONDS = 0.25
"""An engine is at rest when nothing has come for this long. A capture takes about 0.1 s, which requests that come then
wait for: under a load of some requests a second those between two of them cost more than they bring."""
SEND_STEPS_SECONDS = 0.05


class Port(Protocol):
    """The core's end of its connection with the front. Belongs to the thread that drives the core."""

    @property
    def open(self) -> bool:
        """False once the front is gone."""

    @property
    def clear(self) -> bool:
        """Whether the front has read, as far as can be seen, what was sent."""

    def ring_with(self, ring: Callable[[], None]) -> None:
        """Call `ring` for every later message that arrives between two calls of `receive`, or for more of them."""

    def wake(self) -> None:
        """End the wait of `receive`, the present one or the next; from any thread."""

    def receive(self, seconds: float) -> Sequence[m.ToCore]:
        """Everything that has come; when that is nothing, waits for something or `wake`, `seconds` at most."""

    def send(self, messages: list[m.FromCore]) -> None:
        """Pass these on and go on with what earlier calls left over. Never waits for the front."""


class EngineDriver:
    """Serves one core on one thread.

    While the core has nothing to do, this waits in the port. Else the core may wait for its device inside a step; the
    port rings the core's bell, which ends that wait.
    """

    def __init__(self, core: Core, port: Port, pulse: Pulse | None = None) -> None:
        self._core = core
        self._port = port
        self._pulse = pulse
        self._seen: int | None = None
        """The last step that watchers know of; None while no client watches"""
        self._due = 0.0
        self._out: list[m.FromCore] = [m.Ready(core.info)]
        self._page_events: PageEvents | None = None
        self._reported = 0.0
        self._worked = False
        self._stopped = self._rested = False
        port.ring_with(core.bell.ring)
        core.wakes(port.wake)

    def run(self) -> None:
        """Serve until Stop arrives or the front is gone. Raises what the core raises."""
        while not self._stopped and self._port.open:
            self.turn()

    def turn(self) -> None:
        """Take the messages that have come and run one step; without work, wait for a message."""
        busy = self._core.has_work()
        if not busy:
            self._report(REPORT_IDLE)
            self.show(rest=True)
        self._flush()
        # The core's bell does not end this wait: without work, the core waits for nothing that could ring it.
        messages = self._port.receive(0.0)
        # What has come goes before what may come of use later.
        if not messages and not busy:
            messages = self._rest()
        self._rested = self._rested and not messages
        for message in messages:
            self._take(message)
        if self._core.has_work() and not self._stopped:
            if self._out:
                self._flush()  # answers need not wait for the step
            self._step()
            self._report(REPORT_BUSY)
            self.show()

    def _rest(self) -> Sequence[m.ToCore]:
        """Have the core prepare what may come of use once it is at rest; wait for a message if there is nothing."""
        if not self._rested:
            if self._core.has_work():  # the wake for it may be spent
                return []
            messages = self._port.receive(REST_SECONDS)
            if messages or self._core.has_work():
                return messages
            self._rested = True
        # A wake that was for what has come by now may be spent.
        return [] if self._core.has_work() or self._core.rest() else self._port.receive(REPORT_IDLE)

    def _flush(self) -> None:
        """Send what there is to say. Open requests bound what gathers for a front that does not read.

        Events of pages stay where they are until it does: there they cannot outgrow the pages.
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
        """Say the numbers when they are due, and at once when the last request has gone."""
        now = time.monotonic()
        last_gone = every == REPORT_IDLE and self._worked
        if last_gone or now - self._reported >= every:
            self._worked = self._worked and not last_gone
            self._reported = now
            self._out.append(m.StatsReport(self._core.stats()))

    def show(self, rest: bool = False) -> None:
        """Say which steps watchers have not seen: now and then in small batches, and before a rest all of them."""
        if self._seen is None or not (rest or time.monotonic() >= self._due):
            return
        self._due = time.monotonic() + SEND_STEPS_SECONDS
        if steps := self._core.steps_after(self._seen):
            self._seen = steps[-1].step
            self._out.append(m.pack_steps(steps))
