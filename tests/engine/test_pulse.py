"""The pulse of the engine's process: it counts looks, so a stopped process is no stuck turn."""

from __future__ import annotations

import threading
from typing import cast

from gapless.engine.life import WATCHDOG_GRACE_SECONDS, Control, Pulse


def test_looks_at_one_turn_count_and_not_the_time_on_the_clock(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    pulse = Pulse(cast(Control, None))
    pulse.arm(10)
    limit = int(10 + WATCHDOG_GRACE_SECONDS)

    def look(began):
        pulse.turn_began = began
        return pulse.watchdog.look()

    began = 1e-9  # long ago, as after hours in which the process was stopped
    assert not any(look(began) for _ in range(limit + 1)), "each look counts for a second, the first for none"
    assert look(began)
    assert not any(look(began) for began in (124.0, 0.0) * limit), "turns come and go"


def test_a_pulse_without_a_limit_has_no_watchdog(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    pulse = Pulse(cast(Control, None))
    pulse.arm(0)
    assert pulse.watchdog is None
