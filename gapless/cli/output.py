"""Files that commands write. A path that cannot be written is reported before the work begins."""

from __future__ import annotations

import sys
from pathlib import Path

from gapless.cli.errors import UsageError


def say(text: str) -> None:
    """Print a line on standard error at once."""
    print(text, file=sys.stderr, flush=True)


def check_writable(path: str | Path, flag: str) -> None:
    """Raises UsageError where nothing can be written. The file keeps its content, and no new file remains."""
    path = Path(path)
    there = path.exists()
    if there and not (path.is_file() or path.is_dir()):
        return  # a pipe's reader would take the end of a trial for the end of all
    try:
        with path.open("ab"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise _cannot(path, flag, error) from error


def make_folder(path: str | Path, flag: str) -> None:
    """Raises UsageError."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"cannot make {flag} {path}: {error.strerror or error}") from error


def write_text(path: str | Path, text: str, flag: str, *, append: bool = False) -> None:
    """Write `text` as UTF-8. Raises UsageError where that fails."""
    try:
        with Path(path).open("a" if append else "w", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise _cannot(path, flag, error) from error


def _cannot(path: str | Path, flag: str, error: OSError) -> UsageError:
    why = "there is no such folder" if isinstance(error, FileNotFoundError) else error.strerror or error
    return UsageError(f"cannot write {flag} {path}: {why}")
