"""The interface of a fence: a point of a stream that the host can ask about or wait for."""

from __future__ import annotations

from typing import Any, Protocol


class Fence(Protocol):
    """A point of one stream."""

    def done(self) -> bool:
        """Return whether all work before this point has completed; never blocks.

        Raises:
            DeviceError: the device failed before this point was reached.
        """
        ...

    def wait(self, bell: Any = None) -> bool:
        """Block the host until done, or until the device's `bell` is rung, where it is given. Returns whether done.

        Only the loop's observe and drain call it. Raises as `done`.
        """
        ...

    def time(self) -> int:
        """Return when this point was passed, in ns of Device.clock. The fence must be timed, and seen as done."""
        ...
