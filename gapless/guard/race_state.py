"""State of a race checker: agents, stacks and buffers, and the races found so far, each with its missing fence."""

from __future__ import annotations

import re
from typing import Any

from . import forks
from .race_agents import OF_GROUP, Actor, Agent, Agents, Launched
from .race_buffers import Buffer, Checksum, WatchedBuffers
from .race_ops import OperatorPlan
from .race_report import REUSE, VERBS, WRITE, Race, RaceError, RaceSide
from .race_shadow import MemoryAccess
from .sites import UNKNOWN, Sites

_OF_TORCH = re.compile(r"\w+:\d+ ")
"""Begins the names of torch's own streams: the device of each"""


class RaceState:
    """The part of a checker that its watchers of streams and allocators use too."""

    everything = False
    """Whether every tensor is watched, registered or not."""

    def __init__(self, raises: bool, one_thread: bool, floor: Any) -> None:
        self.races: list[Race] = []
        self.lock = forks.lock()
        self.agents = Agents(one_thread, self.lock)
        self.sites = Sites(floor)
        self.buffers = WatchedBuffers()
        self.plans: dict[int, OperatorPlan] = {}
        """Plans of the operators that were seen, by the id of the operator."""
        self._raises = raises
        self._raised = 0
        self._pairs: set[Any] = set()

    def check(self) -> None:
        """Raise RaceError with all findings so far, if there are any."""
        if self.races:
            self._raised = len(self.races)
            raise RaceError(self.races)

    def raise_pending(self) -> None:
        """Raise, on a host thread, what programs were found to do since the last call."""
        if self._raises and len(self.races) > self._raised and not isinstance(self.agents.here(), Launched):
            new = self.races[self._raised :]
            self._raised = len(self.races)
            raise RaceError(new)

    def reused(self, buffer: Buffer, stream: Agent, waited_for: set[int], site: int) -> bool:
        """The stream may be given the memory of this freed buffer: its users must be known to be done.

        The allocator has `waited_for` some of them. Returns whether the others are known to be done; if not, that is
        reported, unless `site` is -1.
        """
        whole = (buffer.start, buffer.end, None, None)
        conflicts = [found for found in buffer.shadow.conflicts(stream, WRITE, whole) if found.agent not in waited_for]
        if conflicts and site >= 0 and any([self.note_race(stream, buffer, REUSE, site, one) for one in conflicts]):
            self.raise_pending()
        return not conflicts

    def touched(self, actor: Actor, buffer: Buffer, site: int) -> None:
        """Note that the actor writes all of a buffer, in a way that no operator shows."""
        with self.lock:
            conflicts = buffer.shadow.touch(actor, WRITE, (buffer.start, buffer.end, None, None), site)
            found = [self.note_race(actor, buffer, WRITE, site, one) for one in conflicts]
        if any(found):
            self.raise_pending()

    def freed_for_graph(self, buffer: Buffer, stream: Agent, site: int) -> None:
        """Report that a graph is replayed which uses memory that was freed after its capture."""
        missing = (
            "it was freed after the graph was captured, so the allocator may have given its memory to another tensor"
        )
        mend = "keep a reference to each tensor that a capture reads or writes for as long as the graph is replayed"
        sides = (
            RaceSide("the allocator", "", "was given", ()),
            RaceSide(stream.title(), "", "replays a graph that uses", self.sites.frames(site)),
        )
        part = f"bytes 0..{buffer.end - buffer.start}"
        with self.lock:
            is_new = self._keep(self._group(buffer), Race(self.name(buffer), part, missing, mend, *sides))
        if is_new:
            self.raise_pending()

    def overwritten(self, checksum: Checksum, stream: Agent, program: str, stack: int, launched: int) -> None:
        """Report that memory which a stream uses was written, unseen, while the use was in flight."""
        title, use = stream.title(), f"program {program}" if program else "the copy"
        missing = (
            f"its bytes changed after {use} was launched on {title} and before it had run: it was written, "
            f"unseen by torch, without waiting for a fence of {title} after it"
        )
        mend = f"wait for the fence that {stream.name} records after {use}, or write another slot"
        stacks = [self.sites.frames(number) if number >= 0 else () for number in (stack, launched)]
        sides = RaceSide(title, program, "uses", *stacks), RaceSide("a host thread", "", "writes (unseen)", ())
        race = Race(self.name(checksum.buffer), checksum.part, missing, mend, *sides, "overwritten")
        with self.lock:
            self._keep(self._group(checksum.buffer), race)

    def note_race(self, actor: Actor, buffer: Buffer, kind: int, note: int, first: MemoryAccess) -> bool:
        """Report two unordered accesses as a race, unless the same two raced before."""
        group = self._group(buffer)
        pair = group, frozenset(((first.note, first.kind), (note, kind)))
        if pair in self._pairs:
            return False
        self._pairs.add(pair)
        second = MemoryAccess(actor.index, actor.time, kind, note, first.part)
        name = self.name(buffer)
        missing, mend = self._explain(name, first, second)
        return self._keep(group, Race(name, first.part, missing, mend, self._side(first), self._side(second)))

    def _keep(self, group: object, race: Race) -> bool:
        """Identify a race by its buffer and two lines, in either order: it is reported once."""
        sides = sorted((side.site, side.verb) for side in (race.first, race.second))
        key = (race.rule, group, *sides)
        if key in self._pairs:
            return False
        self._pairs.add(key)
        self.races.append(race)
        return True

    def _group(self, buffer: Buffer) -> object:
        """Buffers without a name stand for each other when they were first seen at the same place."""
        return buffer.group if buffer.site < 0 else self.sites.stack(buffer.site)

    def name(self, buffer: Buffer) -> str:
        if buffer.site < 0:
            return buffer.name
        return f"tensor first seen at {next(iter(self.sites.frames(buffer.site)), UNKNOWN).where}"

    def _side(self, access: MemoryAccess) -> RaceSide:
        program, launched = self.sites.label_of(access.note)
        stacks = self.sites.frames(access.note), self.sites.frames(launched) if launched >= 0 else ()
        return RaceSide(self.agents[access.agent].title(), program, VERBS[access.kind], *stacks)

    # Which fence is missing, in words.

    def _explain(self, name: str, first: MemoryAccess, second: MemoryAccess) -> tuple[str, str]:
        """Return what would have ordered the two accesses to `name`, and how to write that."""
        streams = [self.agents[access.agent].is_stream for access in (first, second)]
        if not any(streams):
            one, other = self.agents[first.agent].title(), self.agents[second.agent].title()
            missing = (
                f"{other} {VERBS[second.kind]} {name!r}, {one} {VERBS[first.kind]} it, "
                "and no join, queue, event or lock orders the two"
            )
            return missing, "hand it over by a queue, an event, a lock or a join"
        if all(streams):
            # Programs may run in another order than they were launched in; single operators do not.
            waiter, awaited = (first, second) if self._launched_later(first, second) else (second, first)
        else:
            # A launch carries the thread's order to the stream, so it is always the thread that did not wait.
            waiter, awaited = (second, first) if streams[0] else (first, second)
        who, whom = self.agents[waiter.agent], self.agents[awaited.agent]
        by = f"{who.title()} (program {program})" if (program := self._program(waiter)) else who.title()
        after = f" after program {program}" if (program := self._program(awaited)) else ""
        missing = f"{by} {VERBS[waiter.kind]} {name!r} without waiting for a fence of {whom.title()}{after}"
        return f"{missing}; {self._fence(awaited, waiter)}", _mend(who, whom, after, second.kind == REUSE)

    def _program(self, access: MemoryAccess) -> str:
        return self.sites.label_of(access.note).program

    def _launched_later(self, one: MemoryAccess, other: MemoryAccess) -> bool:
        if not self._program(one):
            return False
        a, b = self.agents.moment(one.agent, one.time), self.agents.moment(other.agent, other.time)
        return a is not None and b is not None and a.began > b.began

    def _fence(self, awaited: MemoryAccess, waiter: MemoryAccess) -> str:
        moment = self.agents.moment(awaited.agent, awaited.time)
        then = self.agents.moment(waiter.agent, waiter.time)
        if moment is None or then is None:
            return "the access is too long ago to tell of its fence"
        # A fence that a thread recorded after its own access could not have been waited for.
        too_late = not self.agents[waiter.agent].is_stream and then.began < moment.fenced
        if moment.fence is None or too_late:
            return "none has been recorded after it"
        frame = next(iter(self.sites.frames(moment.fence)), UNKNOWN)
        return f"the one recorded at {frame.where} is not waited for"


def _mend(who: Agent, whom: Agent, after: str, reuse: bool) -> str:
    if reuse:
        return f"call record_stream on it for {whom.name}, or keep it until {who.name} waits for an event after that"
    if whom.name.startswith(OF_GROUP):
        return "call wait() on the collective's work before it"
    if who.name.startswith(OF_GROUP):
        return f"have the stream that is current at the collective wait for {whom.title()} before it"
    if _OF_TORCH.match(whom.name):
        wait = f"{who.name}.wait_event(event)" if who.is_stream else "event.synchronize()"
        return f"{wait} before it, for an event that {whom.name} records after its own"
    wait = f"{who.name}.after(fence) before the launch" if who.is_stream else "fence.wait() before it"
    return f"{wait}, for a fence that {whom.name} records{after}"
