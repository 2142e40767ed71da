"""Engines in processes that tests start: their steps are checked too, and findings go to files. See tests/children."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gapless.step.program import StepProgram
from gapless.testing.guarded import StepGuard


class InChild(StepGuard):
    """Writes what it finds to files of a folder, for `filed`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._files = 0

    @contextmanager
    def checked(self) -> Iterator[None]:
        try:
            with super().checked():
                yield
        finally:
            if self.launched == 1:
                (self._folder / f"{os.getpid()}.guarded").touch()
            if trouble := self.trouble():
                self._files += 1
                file = self._folder / f"{os.getpid()}-{self._files}"
                file.write_text(f"in process {os.getpid()}, {' '.join(sys.orig_argv)}:\n" + "\n".join(trouble))
                file.rename(file.with_suffix(".found"))


def filed(folder: Path) -> list[str]:
    """What children have found since the last call."""
    files = sorted(folder.glob("*.found"))
    found = [file.read_text() for file in files]
    for file in files:
        file.unlink()
    return found


def plant_a_sync() -> None:
    """Make every step of this process read a value on the host."""
    draw = StepProgram.draw

    def asking(*args: Any) -> Any:
        tokens, flags = draw(*args)
        assert int(tokens.max()) >= -1
        return tokens, flags

    StepProgram.draw = asking  # type: ignore[method-assign]
