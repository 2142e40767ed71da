"""Every error of gapless, as one tree.

GaplessError
├── UserError (also ValueError)      the caller can mend it; the text names the field or file and the mend
│   ├── ConfigError                  a flag or an engine argument
│   ├── CheckpointError              a model directory: names the file, and the tensor where there is one
│   └── RequestError                 a field of one request (`param`)
├── QueueFullError                   the bounded queue is full: try again later
├── ServerError                      a server that we called, or the hub, cannot be reached, or refused
└── EngineError (also RuntimeError)  the engine cannot go on
    ├── DeviceError                  a program raised on the device
    ├── CaptureError                 a program cannot become a graph; it can still be launched
    ├── StalledError                 work was present and nothing moved
    └── EngineDeadError              the engine is gone; every open request gets this

Broken invariants of our own are assertions, not members of this tree.
"""

from __future__ import annotations


class GaplessError(Exception):
    """Base of all errors raised on purpose by this package."""


class UserError(GaplessError, ValueError):
    """The caller can mend this."""


class ConfigError(UserError):
    """A flag or engine argument is wrong."""


class CheckpointError(UserError):
    """A model directory is wrong; the text names the file and the tensor."""


class RequestError(UserError):
    """A field of one request is wrong.

    `param` is the field's name as the client spelled it, or None. `code` is a short machine-readable word.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(GaplessError):
    """The bounded queue of waiting requests is full."""


class ServerError(GaplessError):
    """A server that we called (not ours to run) cannot be reached or answered with an error."""


class EngineError(GaplessError, RuntimeError):
    """The engine cannot go on."""


class DeviceError(EngineError):
    """A program raised on a device stream; `__cause__` holds what it raised."""


class CaptureError(EngineError):
    """A program cannot become a graph: it waits for the device, or moves memory. The text names the line."""


class StalledError(EngineError):
    """Work was present and no step completed for the watchdog's time."""


class EngineDeadError(EngineError):
    """The engine is gone; open requests end with this."""
