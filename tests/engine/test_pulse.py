"""The pulse of the engine's process: it counts its own beats, so a stopped process is no stuck turn."""

from __future__ import annotations

import threading
from typing import cast

from gapless.engine.life import GRACE_SECONDS, Control, Pulse


def test_beats_of_one_turn_count_and_not_the_time_on_the_clock(monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", lambda thread: None)
    pulse = Pulse(cast(Control, None))
    pulse.arm(10)
    limit = int(10 + GRACE_SECONDS)
    began = 1e-9  # long ago, as after hours in which the process was stopped
    assert not any(pulse.look(began) for _ in range(limit + 1)), "each beat counts for a second, the first for none"
    assert pulse.look(began)
    assert not any(pulse.look(began) for began in (124.0, 0.0) * limit), "turns come and go"
    pulse.arm(0)
    assert not any(pulse.look(125.0) for _ in range(1000)), "no limit"
