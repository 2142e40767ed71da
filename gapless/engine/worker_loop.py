"""Builds the core of the engine's process and drives it over the wire."""

from __future__ import annotations

import gc
import socket
import traceback
from collections.abc import Callable

import msgspec

from gapless.base import progress
from gapless.base.config import EngineConfig
from gapless.base.errors import UserError
from gapless.engine import messages as m
from gapless.engine.driver import EngineDriver
from gapless.engine.life import Control, Pulse
from gapless.engine.ports import WirePort
from gapless.engine.seam import Core
from gapless.engine.wire import Wire


def serve(number: int, settings: bytes, control: Control, pulse: Pulse, build: Callable[[EngineConfig], Core]) -> bool:
    """Build the core and run it until the parent sends Stop; False if it failed, which the control pipe explains."""
    try:
        progress.show = lambda phase: control.say(msgspec.json.encode(m.Doing(phase)))
        config = msgspec.json.decode(settings, type=EngineConfig)
        core = build(config)
        pulse.arm(max(config.watchdog_seconds, core.info.watchdog_seconds))
        port = WirePort(Wire(socket.socket(fileno=number)))
        driver = EngineDriver(core, port, pulse)
        gc.collect()
        gc.freeze()  # collections need not walk start-up's objects
        driver.run()
        # Not after a failure: a failed core may hang in close, and the last words must go first.
        core.close()
        port.close()
    except Exception as error:
        if not isinstance(error, UserError):
            traceback.print_exc()
        control.say(msgspec.json.encode(m.last_words(error)))
        return False
    return True
