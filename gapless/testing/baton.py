"""A thread that runs only while another one waits for it, so that a function can stop in the middle and others run."""

from __future__ import annotations

import threading
from _thread import allocate_lock
from collections.abc import Callable


class Ended(BaseException):
    """Unwinds a function that is not to run any further."""


class Baton:
    """Runs functions on a thread of its own, one after another, each in parts: from one pause to the next."""

    def __init__(self, name: str) -> None:
        self.busy = False
        """Whether a function has begun and not ended"""
        self._name = name
        self._work: Callable[[], object] | None = None
        self._error: BaseException | None = None
        self._ends = False
        self._thread: threading.Thread | None = None
        # Bare locks: a checker of threads would take each turn for an order of the programs.
        self._go, self._back = allocate_lock(), allocate_lock()
        self._go.acquire()
        self._back.acquire()

    def run(self, work: Callable[[], object] | None = None) -> None:
        """Begin `work`, or continue, up to the next pause or the end. Raises what the function raises."""
        if work is not None:
            assert not self.busy, "one function at a time"
            self._work, self.busy = work, True
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._go.release()
        self._back.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def pause(self) -> None:
        """Let the caller of `run` continue; on this thread, inside a function."""
        self._back.release()
        self._go.acquire()
        if self._ends:
            raise Ended

    def end(self) -> None:
        """End the thread, and with it the function that it is in."""
        if self._thread is not None:
            self._ends = True
            self.run()
            self._thread.join()
            self._thread = None

    def _serve(self) -> None:
        ends = False
        while not ends:
            self._go.acquire()
            try:
                if self._work is not None:
                    self._work()
            except Ended:
                pass
            except BaseException as error:
                self._error = error
            self._work, self.busy = None, False
            ends = self._ends  # looked at before the caller continues, who may set it
            self._back.release()
