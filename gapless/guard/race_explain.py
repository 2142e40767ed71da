"""Says in words which fence is missing, and what to write."""

from __future__ import annotations

from typing import NamedTuple

from .clocks import Agent
from .race_agents import Agents
from .race_report import REUSE, VERBS
from .race_sites import Sites
from .sites import UNKNOWN


class Deed(NamedTuple):
    """One side of a race, with what the wording needs."""

    agent: int
    time: int
    verb: str
    program: str


def explain(agents: Agents, sites: Sites, name: str, first: Deed, second: Deed) -> tuple[str, str]:
    """Return what would have ordered the two deeds on `name`, and how to write that."""
    streams = [agents[deed.agent].is_stream for deed in (first, second)]
    if not any(streams):
        one, other = agents[first.agent].title(), agents[second.agent].title()
        missing = (
            f"{other} {second.verb} {name!r}, {one} {first.verb} it, and no join, queue, event or lock orders the two"
        )
        return missing, "hand it over by a queue, an event, a lock or a join"
    if all(streams):
        # Programs may run in another order than they were launched in; single operators do not.
        waiter, awaited = (first, second) if _launched_later(agents, first, second) else (second, first)
    else:
        # A launch carries the thread's order to the stream, so it is always the thread that did not wait.
        waiter, awaited = (second, first) if streams[0] else (first, second)
    who, whom = agents[waiter.agent], agents[awaited.agent]
    by = f"{who.title()} (program {waiter.program})" if waiter.program else who.title()
    after = f" after program {awaited.program}" if awaited.program else ""
    missing = f"{by} {waiter.verb} {name!r} without waiting for a fence of {whom.title()}{after}"
    mend = _mend(who, whom, after, second.verb == VERBS[REUSE])
    return f"{missing}; {_fence(agents, sites, awaited, waiter)}", mend


def _mend(who: Agent, whom: Agent, after: str, reuse: bool) -> str:
    if reuse:
        return f"call record_stream on it for {whom.name}, or keep it until {who.name} waits for an event after that"
    if whom.name.startswith("cuda:"):  # a stream of torch's own
        wait = f"{who.name}.wait_event(event)" if who.is_stream else "event.synchronize()"
        return f"{wait} before it, for an event that {whom.name} records after its own"
    wait = f"{who.name}.after(fence) before the launch" if who.is_stream else "fence.wait() before it"
    return f"{wait}, for a fence that {whom.name} records{after}"


def _launched_later(agents: Agents, one: Deed, other: Deed) -> bool:
    if not one.program:
        return False
    a, b = agents.moment(one.agent, one.time), agents.moment(other.agent, other.time)
    return a is not None and b is not None and a.began > b.began


def _fence(agents: Agents, sites: Sites, awaited: Deed, waiter: Deed) -> str:
    moment, then = agents.moment(awaited.agent, awaited.time), agents.moment(waiter.agent, waiter.time)
    if moment is None or then is None:
        return "the access is too long ago to tell of its fence"
    # What a thread recorded after its own access is no fence that it could have waited for.
    too_late = not agents[waiter.agent].is_stream and then.began < moment.fenced
    if moment.fence is None or too_late:
        return "none has been recorded after it"
    frame = next(iter(sites.frames(moment.fence)), UNKNOWN)
    return f"the one recorded at {frame.where} is not waited for"
