"""What a race report holds, and how it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gapless.guard.race_sites import Frame

READ, WRITE, FREE, TAKE = range(4)
"""Kinds of access. To free is to write, except that a read in flight is let be: it may be masked out.
To take host memory into one's hands is to write: what is done with it is not seen."""

VERBS = ("reads", "writes", "frees", "takes")
CONFLICTS: tuple[tuple[int, ...], ...] = (
    (WRITE, TAKE),
    (READ, WRITE, FREE, TAKE),
    (WRITE, TAKE),
    (READ, WRITE, FREE, TAKE),
)
"""By kind: the earlier kinds that an unordered access of this one races with."""


@dataclass(frozen=True)
class Side:
    """One of the two accesses."""

    agent: str
    """`stream compute` or `thread MainThread`."""
    program: str
    """The program that the stream ran, or nothing."""
    verb: str
    stack: tuple[Frame, ...]
    launched: tuple[Frame, ...] = ()
    """Where the program was launched."""

    def lines(self) -> list[str]:
        by = f"{self.agent}, program {self.program}" if self.program else self.agent
        head = [f"  {by} {self.verb} it"]
        head += [f"    at {frame}" for frame in self.stack] or ["    at a place outside user code"]
        return head + [f"    launched at {frame}" for frame in self.launched[:2]]

    def where(self) -> Frame | None:
        """The innermost user line: in the program, or else where it was launched."""
        return next(iter(self.stack or self.launched), None)


@dataclass(frozen=True)
class Finding:
    """A race: two accesses that nothing orders. `first` was executed first in this run; the next run may differ."""

    buffer: str
    """Its registered name, with an index where it is one of several."""
    part: str
    """`bytes 0..64` or `rows 3, 7..9`."""
    missing: str
    """The fence that is missing, in words."""
    first: Side
    second: Side
    kind: str = "race"
    """race, or overwritten: bytes changed between launch and execution by a write that was not seen."""

    def __str__(self) -> str:
        lines = [f"{self.kind} on {self.buffer!r} ({self.part}): {self.missing}"]
        return "\n".join(lines + self.first.lines() + self.second.lines())

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""

        def side(it: Side) -> dict[str, Any]:
            stacks = {"stack": it.stack, "launched": it.launched}
            frames = {name: [frame._asdict() for frame in stack] for name, stack in stacks.items()}
            return {"agent": it.agent, "program": it.program, "verb": it.verb, **frames}

        head = {"kind": self.kind, "buffer": self.buffer, "part": self.part, "missing": self.missing}
        return {**head, "first": side(self.first), "second": side(self.second)}


class RaceError(RuntimeError):
    """Raised by `no_race()`; `findings` holds what was found."""

    def __init__(self, findings: list[Finding]) -> None:
        self.findings = tuple(findings)
        count = f"{len(findings)} races" if len(findings) > 1 else "a race"
        super().__init__(f"no_race found {count}\n" + "\n".join(str(finding) for finding in findings))
