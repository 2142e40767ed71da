"""Every error of gapless, as one tree. Broken invariants of our own are assertions, not members of it."""

from __future__ import annotations


class GaplessError(Exception):
    """Base of all errors raised on purpose by this package."""


class UserError(GaplessError, ValueError):
    """The caller can mend this; the text names the field or file, and the mend."""


class ConfigError(UserError):
    """A flag or engine argument is wrong."""


def exit_code(error: GaplessError) -> int:
    """The exit code of a command that ends with this error: 2 where it was asked for wrongly, else 1."""
    return 2 if isinstance(error, ConfigError) else 1


class CheckpointError(UserError):
    """A model directory is wrong; the text names the file, and the tensor where there is one."""


class ForeignModelError(CheckpointError):
    """A config.json asks for a forward that no native family computes, though another implementation may."""


class RequestError(UserError):
    """A field of one request is wrong.

    `param` is the field's name as the client spelled it, or None. `code` is a short machine-readable word.
    """

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class QueueFullError(GaplessError):
    """The bounded queue of waiting requests is full: try again later."""


class ServerError(GaplessError):
    """A server that we called (not ours to run), or the hub, cannot be reached or answered with an error."""


class EngineError(GaplessError, RuntimeError):
    """The engine cannot continue."""


class DeviceError(EngineError):
    """A program raised on a device stream; `__cause__` holds its exception."""


class CaptureError(EngineError):
    """A program cannot become a graph: it waits for the device, or moves memory. It can still be launched.

    The text names the line.
    """


class StalledError(EngineError):
    """Work was present and no step completed for the watchdog's time."""


class EngineDeadError(EngineError):
    """The engine has stopped; open requests end with this."""
