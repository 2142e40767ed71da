"""Child processes of a checked program: forked ones stay checked, and so do ones that start this Python again.

Each child leaves what it found in a folder of its parent's, when it ends. What is lost: the report of a child that is
killed, or that outlives its parent. Not checked are other programs, and code that a shell or `python -c` runs.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import child_commands, forks
from .patches import Patches

WAIT_S = 10.0
"""The longest wait for children that still run at the program's end; multiprocessing waits for them."""


class Children:
    """The children of one run, from its making until `close`; in a child, what ties it to its parent."""

    def __init__(
        self, patches: Patches, options: dict[str, Any], renew: Callable[[], None], state: Callable[[], Any]
    ) -> None:
        """Watch for children. `options` go to spawned ones; with a `folder` this process is one itself,
        or with `serves` one that forks them.

        `renew` is called in a forked child, which begins with an empty report; `state` returns the report, for JSON.
        """
        self._is_first = options["folder"] is None
        self.is_child = not (self._is_first or options["serves"])
        self._folder = Path(options["folder"] or tempfile.mkdtemp(prefix="gapless-san-"))
        self._options = {**options, "folder": str(self._folder)}
        self._renew, self._state = renew, state
        self._name = ""
        self._leaves = False
        patches.wrap(os, "_exit", self._exit)
        patches.wrap(subprocess.Popen, "__init__", self._popen)
        # torch has loaded it if there are processes at all.
        starter = sys.modules.get("multiprocessing.util")
        if starter is not None:
            patches.wrap(starter, "spawnv_passfds", self._spawn)
        forks.in_child.append(self._forked)
        if self.is_child:
            self._begin()

    def leave(self) -> None:
        """Let no signal end a child from now until its report is written: the detectors are about to give theirs."""
        if self.is_child and signal.getsignal(signal.SIGTERM) == self._terminated:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            self._leaves = True

    def close(self) -> tuple[list[Any], int]:
        """Wait for the children. Returns their reports and the number of children without one."""
        if not self.is_child:
            self._wait()
        forks.in_child.remove(self._forked)
        if self.is_child:
            self._write()
        if self._leaves:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if not self._is_first or self.is_child:
            return [], 0
        reports, lost = self.ended(), len(list(self._folder.glob("*.begun")))
        shutil.rmtree(self._folder, ignore_errors=True)
        return reports, lost

    def ended(self) -> list[Any]:
        """Take the reports of the children that ended since the last call."""
        files = [] if self.is_child else sorted(self._folder.glob("*.json"))
        reports = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        for file in files:
            file.with_suffix(".begun").unlink()
            file.unlink()
        return reports

    def _wait(self) -> None:
        processes: Any = sys.modules.get("multiprocessing.process")
        end = time.monotonic() + WAIT_S
        for child in processes.active_children() if processes is not None else ():
            if not child.daemon:
                child.join(max(0.0, end - time.monotonic()))

    # In a child.

    def _forked(self) -> None:
        self.is_child = True
        self._renew()
        self._begin()

    def _begin(self) -> None:
        self._name = f"{os.getpid()}-{time.time_ns()}"
        (self._folder / f"{self._name}.begun").touch()
        # Pools end their workers by this signal.
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._terminated)

    def _write(self) -> None:
        """Leave the report in the parent's folder, whole or not at all."""
        part = self._folder / f"{self._name}.part"
        try:
            part.write_text(json.dumps(self._state()), encoding="utf-8")
            part.replace(self._folder / f"{self._name}.json")
        except FileNotFoundError:
            print(f"gapless san: process {os.getpid()} ended after its parent's report", file=sys.stderr)

    def _exit(self, original: Any, status: int) -> None:
        if self.is_child:
            self._write()
        original(status)

    def _terminated(self, number: int, frame: Any) -> None:
        self._write()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    # In a parent.

    def _spawn(self, original: Any, path: str, args: list[Any], passfds: Any) -> int:
        return int(original(path, child_commands.spawned(args, self._options), passfds))

    def _popen(self, original: Any, process: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
        # `rest` begins with the buffer's size and the executable.
        if not (kwargs.get("shell") or kwargs.get("executable") or len(rest) > 1):
            watched = child_commands.started(args, self._options)
        else:
            watched = args
        original(process, watched, *rest, **kwargs)
        process.args = args
