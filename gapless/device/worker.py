"""A daemon thread that runs programs in order, and the interpreter setting without which such threads starve."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from queue import SimpleQueue
from typing import Any

import torch

from gapless.base.errors import DeviceError
from gapless.device.fault import Fault

SWITCH_SECONDS = 50e-6
"""A thread that needs the lock back waits this long for every torch op; the interpreter's default is 5 ms."""

GRACE_SECONDS = 2.0
"""How long closing lets a program run on before it interrupts it."""

INTERRUPT_SECONDS = 2.0
"""How long an interrupted program has to end."""

_Work = tuple[Callable[..., None], tuple[Any, ...]]


class PythonQueue:
    """A FIFO of programs that one thread works off; after a fault it drops the rest. `put` and `stop` never block.

    It needs no compiler. Native streams are queues of their own, with the same methods.
    """

    def __init__(self, name: str, fault: Fault) -> None:
        self._name = name
        self._fault = fault
        self._queue: SimpleQueue[_Work | None] = SimpleQueue()

    def put(self, program: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._queue.put((program, args))

    def stop(self) -> None:
        """Let `work` end after the queued programs."""
        self._queue.put(None)

    def work(self) -> None:
        """Work off the queue; the thread runs this."""
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        # A function of its own, so that an idle thread keeps no program's tensors alive in its locals.
        work = self._queue.get()
        if work is None:
            return False
        if self._fault.error is None:
            attempt(self._fault, self._name, *work)
        return True


def attempt(fault: Fault, name: str, program: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Run a program on a stream's thread; its exception goes to the fault."""
    try:
        program(*args)
    except BaseException as error:
        fault.set(error, f"a program on stream {name!r} raised")


class Worker:
    """The thread of a queue, started at the first use; its programs run in inference mode.

    `queue` is a PythonQueue or a native stream. `threads` is how many torch threads they use; 0 leaves torch's default.
    """

    def __init__(self, name: str, queue: PythonQueue, threads: int = 0) -> None:
        self.name = name
        self._queue = queue
        self._threads = threads
        self._thread: threading.Thread | None = None
        self._starting = threading.Lock()

    @property
    def started(self) -> bool:
        """Return whether any program was ever put."""
        return self._thread is not None

    def put(self, program: Callable[..., None], args: tuple[Any, ...]) -> None:
        if self._thread is None:
            self.start()
        self._queue.put(program, args)

    def stop(self) -> None:
        self._queue.stop()

    def join(self, seconds: float) -> bool:
        """Return whether the thread has ended within `seconds`, or is the calling one."""
        thread = self._thread
        if thread is None or thread is threading.current_thread():
            return True
        thread.join(seconds)
        return not thread.is_alive()

    def interrupt(self) -> None:
        """Raise SystemExit in the program that runs, between two of its Python instructions."""
        # A thread still inside torch when the interpreter ends would abort the process.
        if self._thread is not None and self._thread.ident is not None:
            ident = ctypes.c_ulong(self._thread.ident)
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(SystemExit))

    def start(self) -> None:
        with self._starting:
            if self._thread is None:
                # The thread holds the queue, never the device: a forgotten device can be collected.
                args = (self._queue, self._threads)
                self._thread = threading.Thread(target=_work, args=args, name=f"gapless-{self.name}", daemon=True)
                self._thread.start()


def _work(queue: PythonQueue, threads: int) -> None:
    if threads:
        # Reading first: torch sets a thread's count lazily from a global, and would undo ours at the first parallel op.
        torch.get_num_threads()
        torch.set_num_threads(threads)
    with torch.inference_mode():
        queue.work()


def stop_all(workers: Iterable[Worker]) -> None:
    """Stop the workers and wait for their threads; interrupts a program that keeps running, then warns of it."""
    workers = list(workers)
    for worker in workers:
        worker.stop()
    running = _join(workers, GRACE_SECONDS)
    for worker in running:
        worker.interrupt()
    stuck = [worker.name for worker in _join(running, INTERRUPT_SECONDS)]
    if stuck:
        text = f"closed a device while a program hangs on {', '.join(stuck)}; its thread is left behind"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def _join(workers: list[Worker], seconds: float) -> list[Worker]:
    """Return the workers whose threads have not ended `seconds` from now."""
    end = time.monotonic() + seconds
    return [worker for worker in workers if not worker.join(max(0.0, end - time.monotonic()))]


class _SwitchInterval:
    """The interpreter's switch interval: short while any device is open, then as before."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._users = 0
        self._before = 0.0

    def shorten(self) -> None:
        with self._lock:
            if self._users == 0:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, SWITCH_SECONDS))
            self._users += 1

    def restore(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                sys.setswitchinterval(self._before)


switch_interval = _SwitchInterval()


def shut(fault: Fault, workers: Iterable[Worker]) -> None:
    """End a device, also one that was forgotten and collected, or is open when the interpreter exits: torch must not be
    left running there."""
    fault.set(DeviceError("it was closed"), "the device is gone")
    try:
        stop_all(workers)
    finally:
        switch_interval.restore()
