"""Replays of tapes report to the race checker without the mode that sees every operator, which takes several times as
long: the calls of a tape that touch watched memory are the same at every replay."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from gapless.device.record import Call, Place, Tape, TapeGraph, filled, keep
from gapless.guard.race_buffers import Buffer, region_of
from gapless.guard.race_checker import RaceChecker
from gapless.guard.race_mode import RaceMode
from gapless.guard.race_ops import OperatorPlan, tensors
from gapless.testing.guarded import left


class Reported(NamedTuple):
    """A call of a tape, and what the checker needs to know of it."""

    op: Any
    args: list[Any]
    fills: tuple[tuple[int, Place], ...]
    """The arguments that are places, each by its position."""
    lists: tuple[int, ...]
    """The positions of arguments that are lists, which may hold places."""
    named: tuple[str, ...]
    results: Any
    drops: tuple[int, ...]
    plan: OperatorPlan
    touches: bool
    """Whether it may touch a registered buffer."""

    @classmethod
    def of(cls, call: Call, checker: RaceChecker) -> Reported:
        args, plan = list(call.args), checker.plans.get(id(call.op)) or checker.plan(call.op)
        count = len(args) - len(call.named)
        uses = () if plan.is_idle else tensors(plan, args[:count], dict(zip(call.named, args[count:], strict=True)))
        touches = any(is_watched(tensor, checker) for tensor, _ in uses)
        fills = tuple((at, value) for at, value in enumerate(args) if type(value) is Place)
        lists = tuple(at for at, value in enumerate(args) if type(value) is list)
        return cls(call.op, args, fills, lists, call.named, call.results, call.drops, plan, touches)


class ReportingTape(Tape):
    """A tape that reports what it is about to touch. It does nothing else differently."""

    known: tuple[list[Buffer], list[Reported]] | None = None
    """The calls as they stand to these registered buffers."""

    def replay(self) -> None:
        mode = _get_current_dispatch_mode()
        # What follows all tensors, or results, needs the mode.
        if not isinstance(mode, RaceMode) or not mode.checker.active or mode.checker.follows_results:
            return super().replay()
        with left(mode):
            self.report(mode.checker)

    def report(self, checker: RaceChecker) -> None:
        """Run the operators; those that may touch registered buffers are shown to the checker first."""
        named = checker.buffers.named
        is_new = self.known is None or self.known[0] is not named
        calls = [Reported.of(call, checker) for call in self.calls] if is_new else self.known[1]
        places: list[Any] = [None] * self.places
        for op, template, fills, lists, names, results, drops, plan, touches in calls:
            args = template.copy()
            for at, place in fills:
                args[at] = places[place]
            for at in lists:
                args[at] = filled(args[at], places)
            kwargs = {name: args.pop() for name in reversed(names)} if names else {}
            if touches:
                checker.saw(plan, args, kwargs)
            made = op(*args, **kwargs) if kwargs else op(*args)
            if results is not None:
                keep(places, results, made)
            if is_new:
                assert not any(is_watched(new, checker) for new in _new(results, made)), f"{op} gives watched memory"
            for place in drops:
                places[place] = None
        self.known = named, calls


def is_watched(tensor: Tensor, checker: RaceChecker) -> bool:
    """Whether a tensor shares a byte with a registered buffer."""
    region = region_of(tensor)
    return region is not None and bool(checker.buffers.find(region[0], region[1]))


def _new(results: Any, made: Any) -> Iterator[Tensor]:
    """What of a call's results is new, and no argument."""
    if type(results) is Place:
        yield made
    elif type(results) is tuple:
        for one, item in zip(results, made, strict=True):
            yield from _new(one, item)


def reports(part: Any) -> None:
    """A tape that was recorded reports by itself from now on."""
    if isinstance(part, TapeGraph):
        part.tape = ReportingTape(*part.tape)
