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

FOLDER_PREFIX, LOCK = "gapless-sockets-", "lock"
NEW_SECONDS = 10.0
"""How long a folder may be without its lock: it has just been made."""


@contextmanager
def own_folder() -> Iterator[Path]:
    """A folder for sockets, locked while this process lives. Folders of killed processes are removed first."""
    for old in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
        if _left_behind(old):
            shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as name, open(Path(name) / LOCK, "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield Path(name)


def _left_behind(folder: Path) -> bool:
    """Return whether this is our user's folder, and no process has its lock."""
    try:
        facts = folder.lstat()
        if facts.st_uid != os.getuid() or time.time() - facts.st_mtime < NEW_SECONDS or folder.is_symlink():
            return False
        with open(folder / LOCK, "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return folder.is_dir()
    except OSError:  # it is held, or not ours to read
        return False
    return True
