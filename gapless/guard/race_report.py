"""The report of a race, as records and as text."""

from __future__ import annotations

from dataclasses import dataclass

from .report import Finding
from .sites import UNKNOWN, Frame

READ, WRITE, FREE, TAKE, REUSE = range(5)
"""Kinds of access. To free counts as a write, except that a read in flight is allowed: it may be masked out.
To take host memory counts as a write, since what is done with it is not seen. To reuse counts as a write to what an
allocator gave out again; the old tensor is gone then, so nothing is ever compared with it."""

VERBS = ("reads", "writes", "frees", "takes", "reuses the memory of")
CONFLICTS: tuple[tuple[int, ...], ...] = (
    (WRITE, TAKE),
    (READ, WRITE, FREE, TAKE),
    (WRITE, TAKE),
    (READ, WRITE, FREE, TAKE),
)
"""The earlier kinds of access that race with an unordered access, by its kind."""


@dataclass(frozen=True)
class RaceSide:
    """One of the two accesses."""

    agent: str
    """The agent, such as `stream compute` or `thread MainThread`."""
    program: str
    """The program that the stream ran, or nothing."""
    verb: str
    stack: tuple[Frame, ...]
    """The user's frames of the access, the innermost first; inside a program, the program's frames."""
    launched: tuple[Frame, ...] = ()
    """The stack that launched the program."""

    @property
    def who(self) -> str:
        return f"{self.agent}, program {self.program}," if self.program else self.agent

    @property
    def site(self) -> Frame:
        """The innermost line of the user: in the program, or else where it was launched."""
        return next(iter(self.stack or self.launched), UNKNOWN)

    def lines(self) -> list[str]:
        lines = [f"{self.who} {self.verb} it"]
        lines += [f"  at {frame.where} in {frame.function}" for frame in self.stack]
        return lines + [f"  launched at {frame.where} in {frame.function}" for frame in self.launched[:2]]


@dataclass(frozen=True)
class Race:
    """Two accesses that nothing orders. `first` was executed first in this run; in the next one it may be second."""

    buffer: str
    """The registered name of the buffer, with an index if it is one of several."""
    part: str
    """The part of the buffer, such as `bytes 0..64` or `rows 3, 7..9`."""
    missing: str
    """The fence that is missing, in words."""
    mend: str
    """The code to write."""
    first: RaceSide
    second: RaceSide
    rule: str = "race"
    """race, or overwritten: bytes changed between launch and execution by a write that was not seen."""

    def __str__(self) -> str:
        head = f"{self.rule} on {self.buffer!r} ({self.part}): {self.missing}"
        return "\n  ".join([head, f"mend: {self.mend}", *self.first.lines(), *self.second.lines()])

    def finding(self) -> Finding:
        """Return the race in the form that all detectors share."""
        side = self.second if self.second.site != UNKNOWN else self.first
        what = f"{self.second.who} {self.second.verb} {self.buffer!r} ({self.part})"
        details = (*self.first.lines(), *self.second.lines())
        return Finding("race", self.rule, what, self.missing, self.mend, side.stack or side.launched, details)


class RaceError(RuntimeError):
    """Raised by `no_race()`; `races` holds the findings."""

    def __init__(self, races: list[Race]) -> None:
        self.races = tuple(races)
        count = f"{len(races)} races" if len(races) > 1 else "a race"
        super().__init__(f"no_race found {count}\n" + "\n".join(str(race) for race in races))
