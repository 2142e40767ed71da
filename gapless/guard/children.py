"""Child processes of a checked program: forked ones stay checked, and so do ones that start this Python again.

Each child leaves what it found in a folder of its parent's, when it ends. What is lost: the report of a child that is
killed, or that outlives its parent. Not checked are other programs, and code that a shell or `python -c` runs.

A process may also end at once: by os._exit, by SIGTERM, or when it puts another program in its place. Its report is
given just before.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from torch.utils.data._utils import signal_handling

from . import child_commands, forks
from .patches import Patches


class Children:
    """The children of one run, from its making until `close`; in a child, what ties it to its parent."""

    def __init__(
        self, patches: Patches, options: dict[str, Any], renew: Callable[[], None], state: Callable[[], Any],
        report: Callable[[int, str], int],
    ) -> None:  # fmt: skip
        """Watch for children. `options` go to spawned ones; with a `folder` this process is one itself,
        or with `serves` one that forks them.

        `renew` is called in a forked child, which begins with an empty report; `state` returns the report, for JSON.
        `report` is called in the first process before an end at once, with the exit code and the reason why the report
        is incomplete, or nothing; it returns the exit code.
        """
        self._is_first = options["folder"] is None
        self.is_child = not (self._is_first or options["serves"])
        self._folder = Path(options["folder"] or tempfile.mkdtemp(prefix="gapless-san-"))
        self._options = {**options, "folder": str(self._folder)}
        self._renew, self._state, self._report = renew, state, report
        self._name = ""
        """The name of the report's file; empty where none is to be written."""
        self._ending = forks.lock()
        self._pid = os.getpid()
        """The process that this is for; another's in a forked child that has not come to `_forked`."""
        self._ends = False
        """Whether the process is giving its report, during which SIGTERM is ignored."""
        self._starting: set[int] = set()
        """The idents of threads within subprocess: a function may run in the child before its program does."""
        self._exit_at_once = os._exit
        self._before = set(multiprocessing.active_children())
        patches.wrap(os, "_exit", self._exit)
        patches.wrap(os, "execv", self._exec)
        patches.wrap(os, "execve", self._exec)
        patches.wrap(subprocess.Popen, "__init__", self._popen)
        patches.wrap(util, "spawnv_passfds", self._spawn)
        patches.wrap(signal_handling, "_set_worker_signal_handlers", self._load)
        forks.in_child.append(self._forked)
        if self.is_child:
            self._begin()
        elif self._is_first:
            self._on_terminate(signal.SIG_DFL, self._terminated)

    def leave(self) -> None:
        """Let no signal end a child from now until its report is written: the detectors are about to give theirs."""
        self._ends = self.is_child

    def close(self) -> tuple[list[Any], int]:
        """Wait for the children. Returns their reports and the number of children without one."""
        if not self.is_child:
            with suppress(KeyboardInterrupt):
                self._wait()
        forks.in_child.remove(self._forked)
        if self.is_child:
            self._write()
        self._on_terminate(self._terminated, signal.SIG_DFL)
        if not self._is_first or self.is_child:
            return [], 0
        reports, lost = self.ended(), self.without_report()
        shutil.rmtree(self._folder, ignore_errors=True)
        return reports, lost

    def ended(self) -> list[Any]:
        """Take the reports of the children that ended since the last call."""
        files = [] if self.is_child else sorted(self._folder.glob("*.json"))
        reports = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        for file in files:
            file.with_suffix(".begun").unlink(missing_ok=True)
            file.unlink()
        return reports

    def without_report(self) -> int:
        """Return the number of children that began and have left no report so far."""
        return len(list(self._folder.glob("*.begun")))

    def _wait(self) -> None:
        """End daemons and pools, and wait for the other children, as multiprocessing does at Python's end."""
        if not self._started():
            return
        util._run_finalizers(0)  # type: ignore[attr-defined]
        for child in self._started():
            if child.daemon:
                child.terminate()
        for child in self._started():
            child.join()

    def _started(self) -> set[BaseProcess]:
        return set(multiprocessing.active_children()) - self._before

    # An end at once.

    def _exit(self, original: Any, status: int) -> None:
        self._end(status)

    def _terminated(self, number: int, frame: Any) -> None:
        if self._ends:
            return
        begins = self._pid != os.getpid()
        if not (begins or self.is_child):
            self._end(128 + number, "the program was terminated, and the rest of it was not seen")
        try:
            if not begins:
                self._give(0, "")
        finally:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _end(self, code: int, wrong: str = "") -> None:
        with self._ending:
            try:
                code = self._give(code, wrong)
            finally:
                self._exit_at_once(code)

    def _exec(self, original: Any, path: Any, *rest: Any, **kwargs: Any) -> None:
        # A name is looked for in one folder after another.
        if os.path.isfile(path):
            with self._ending:
                self._give(0, "the program put another one in its place, which was not seen")
                self._ends = False
        original(path, *rest, **kwargs)

    def _give(self, code: int, wrong: str) -> int:
        """Give the report, or leave it for the parent. Returns the exit code."""
        self._ends = True
        if self.is_child:
            self._write()
        elif self._is_first:
            try:
                return self._report(code, wrong)
            finally:
                shutil.rmtree(self._folder, ignore_errors=True)
        return code

    def _on_terminate(self, before: Any, handler: Any) -> None:
        if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) == before:
            signal.signal(signal.SIGTERM, handler)

    # In a child.

    def _forked(self) -> None:
        self.is_child, self._pid, self._ends, self._name = True, os.getpid(), False, ""
        if threading.get_ident() not in self._starting:
            self._renew()
            self._begin()

    def _begin(self) -> None:
        name = f"{os.getpid()}-{time.time_ns()}"
        try:
            (self._folder / f"{name}.begun").touch()
        except OSError:
            _tell(f"process {os.getpid()} began after its parent's report, and is not watched")
        else:
            self._name = name
        # Pools end their workers by this signal.
        self._on_terminate(signal.SIG_DFL, self._terminated)

    def _write(self) -> None:
        """Leave the report in the parent's folder, whole or not at all."""
        if not self._name:
            return
        part = self._folder / f"{self._name}.part"
        try:
            part.write_text(json.dumps(self._state()), encoding="utf-8")
            part.replace(self._folder / f"{self._name}.json")
        except FileNotFoundError:
            _tell(f"process {os.getpid()} ended after its parent's report")
        except OSError as error:
            _tell(f"the report of process {os.getpid()} cannot be written: {error.strerror}")

    def _load(self, original: Any) -> None:
        """Have a worker of a DataLoader that is terminated end without a failure, as torch's own handler does."""
        original()
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(0))

    # In a parent.

    def _spawn(self, original: Any, path: str, args: list[Any], passfds: Any) -> int:
        return int(original(path, child_commands.spawned(args, self._options), passfds))

    def _popen(self, original: Any, process: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
        # `rest` begins with the buffer's size and the executable.
        if not (kwargs.get("shell") or kwargs.get("executable") or len(rest) > 1):
            watched = child_commands.started(args, self._options)
        else:
            watched = args
        self._starting.add(threading.get_ident())
        try:
            original(process, watched, *rest, **kwargs)
        finally:
            self._starting.discard(threading.get_ident())
        process.args = args


def _tell(text: str) -> None:
    with suppress(OSError):
        print(f"gapless san: {text}", file=sys.stderr)
