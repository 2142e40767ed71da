"""Folders for the unix sockets between the processes of one server."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER_PREFIX = "gapless-sockets-"
NEW_SECONDS = 10.0
"""How long a folder may be without its lock: it has just been made."""


@contextmanager
def own_folder() -> Iterator[Path]:
    """A folder for sockets, locked while this process lives. Folders of killed processes are removed first."""
    for old in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        if _left_behind(old):
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as name, _locked(Path(name)):
        yield Path(name)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The lock of a folder itself: a file in it could be cleaned away. Raises OSError if another process has it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def _left_behind(folder: Path) -> bool:
    """Return whether this is our user's folder, and no process has its lock."""
    try:
        facts = folder.lstat()
        if facts.st_uid != os.getuid() or time.time() - facts.st_mtime < NEW_SECONDS:
            return False
        with _locked(folder):
            return True
    except OSError:  # it is held, no folder, or not ours to read
        return False
