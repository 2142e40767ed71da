"""The fence that is missing, in words."""

from __future__ import annotations

from gapless.guard.race_agents import Agents
from gapless.guard.race_sites import Sites


class Deed:
    """One side of a race, with what the wording needs."""

    __slots__ = ("index", "program", "time", "verb")

    def __init__(self, index: int, time: int, verb: str, program: str) -> None:
        self.index = index
        self.time = time
        self.verb = verb
        self.program = program


def missing(agents: Agents, sites: Sites, name: str, first: Deed, second: Deed) -> str:
    """What would have ordered the two deeds on `name`."""
    streams = [agents[deed.index].is_stream for deed in (first, second)]
    if not any(streams):
        one, other = agents[first.index].title(), agents[second.index].title()
        return (
            f"{other} {second.verb} {name!r} and {one} {first.verb} it, and no join, queue, event or lock orders them"
        )
    if all(streams):
        waiter, awaited = (first, second) if _launched_later(agents, first, second) else (second, first)
    else:
        # A launch carries the thread's order to the stream, so it is always the thread that did not wait.
        waiter, awaited = (second, first) if streams[0] else (first, second)
    who = agents[waiter.index].title()
    if waiter.program:
        who += f" (program {waiter.program})"
    behind = f" behind program {awaited.program}" if awaited.program else ""
    text = f"{who} {waiter.verb} {name!r} without waiting for a fence of {agents[awaited.index].title()}{behind}"
    return f"{text}; {_fence(agents, sites, awaited)}"


def _launched_later(agents: Agents, one: Deed, other: Deed) -> bool:
    a, b = agents.moment(one.index, one.time), agents.moment(other.index, other.time)
    return a is not None and b is not None and a.began > b.began


def _fence(agents: Agents, sites: Sites, awaited: Deed) -> str:
    moment = agents.moment(awaited.index, awaited.time)
    if moment is None:
        return "the access is too long ago to tell of its fence"
    if moment.fence is None:
        return "none has been recorded behind it"
    frame = next(iter(sites.frames(moment.fence)), None)
    return f"the one recorded at {frame} is not waited for" if frame else "one was recorded, and is not waited for"
