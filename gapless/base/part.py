"""A part of the loop: a feature that acts beside the steps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from gapless.base.bell import Bell
from gapless.base.errors import GaplessError
from gapless.base.records import Int64s, Request, StepPlan, StepTokens


class Part:
    """The loop calls the methods that a part overrides, and no others. They run on the loop's thread and never wait,
    except `wait`. A `flight` is a `step.launcher.Flight`, `lines` are `loop.settle.Lines`, `measured` is
    `loop.steplog.Measured`."""

    busy: bool = False
    """Whether the loop has to turn for this part although no request needs a step. May be a property."""

    brings_pages: bool = False
    """Whether a wait for this part is a wait for copies of pages, in the timeline"""

    def check(self, request: Request) -> Request:
        """Return a new request, changed or not. Raises RequestError to refuse it."""
        return request

    def begin(self, request: Request) -> None:
        """Note a queued request. RequestError ends it again."""

    def end(self, request: Request) -> None:
        """Note the end of a request, also of one whose `begin` failed here or in another part."""

    def failed(self) -> Iterable[tuple[int, GaplessError]]:
        """Return the keys of requests to end now, with the errors for their callers. Called in each turn."""
        return ()

    def before_plan(self) -> None:
        """Act before each plan."""

    def admit(self, plan: StepPlan) -> None:
        """Act before the launch of a plan that gives rows to requests."""

    def launched(self, flight: Any) -> None:
        """Act after the launch of each step."""

    def poll(self) -> bool:
        """Act after the launches of a turn, so that no step waits for it, and before a wait without steps in flight.
        Returns whether requests may run that could not before."""
        return False

    def rung(self) -> None:
        """Act after the bell has ended a wait for a step."""

    def awaited(self) -> bool:
        """Return whether a request waits for this part without a claim in the ledger: no step is overdue then."""
        return False

    def wait(self, bell: Bell, seconds: float) -> bool:
        """Wait for news of this part or the bell, at most `seconds`; without any, only for work that has begun. Returns
        False, at once, if there is nothing to wait for. Called without steps in flight."""
        return False

    def held(self, rows: Int64s) -> None:
        """Note rows that a step held for lack of a mask."""

    def settled(self, flight: Any, lines: Any, tokens: StepTokens) -> None:
        """Take in an observed step: all its lines, and the tokens that requests get, before the row table has them."""

    def retired(self, flight: Any, measured: Any) -> None:
        """Take in the measured times of a settled step."""

    def close(self) -> None:
        """End threads. May be called twice."""


class Hooks(NamedTuple):
    """The parts that override each method, in order: a step pays for no others."""

    busy: tuple[Part, ...]
    check: tuple[Part, ...]
    begin: tuple[Part, ...]
    end: tuple[Part, ...]
    failed: tuple[Part, ...]
    before_plan: tuple[Part, ...]
    admit: tuple[Part, ...]
    launched: tuple[Part, ...]
    poll: tuple[Part, ...]
    rung: tuple[Part, ...]
    awaited: tuple[Part, ...]
    wait: tuple[Part, ...]
    held: tuple[Part, ...]
    settled: tuple[Part, ...]
    retired: tuple[Part, ...]

    @classmethod
    def of(cls, parts: Iterable[Part]) -> Hooks:
        parts = tuple(parts)
        return cls(*(tuple(part for part in parts if _overrides(part, name)) for name in cls._fields))


def _overrides(part: Part, name: str) -> bool:
    return getattr(type(part), name) is not getattr(Part, name)
