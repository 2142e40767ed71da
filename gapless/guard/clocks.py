"""Vector clocks: what every stream and host thread knows of all the others.

An agent is a stream or a host thread. It has a time of its own, which moves on whenever others can learn of what it
did so far: a stream's at each recorded fence, a thread's at each launch, put, set, release or start. Something done by
agent `a` at time `t` happened before everything done under a clock that knows `t` of `a`.
"""

from __future__ import annotations

from collections.abc import Mapping

from .race_sites import NO_PROGRAM


class VectorClock(dict[int, int]):
    """The latest time that is known of each agent, by its index. Agents not named are known up to 0."""

    __slots__ = ()

    def join(self, other: Mapping[int, int]) -> None:
        """Know what `other` knows as well."""
        for agent, time in other.items():
            if time > self.get(agent, 0):
                self[agent] = time

    def knows(self, agent: int, time: int) -> bool:
        return self.get(agent, 0) >= time

    def copy(self) -> VectorClock:
        return VectorClock(self)


class Agent:
    """A stream or a host thread: `clock` is what it knows now, itself included."""

    __slots__ = ("clock", "enqueued_news", "index", "is_stream", "name", "news", "time")
    label = NO_PROGRAM
    """The label of its stacks."""

    def __init__(self, index: int, name: str, is_stream: bool, born: Mapping[int, int] | None = None) -> None:
        """Begin at time 1; `born` is what the agent knows from the one that started it."""
        assert index >= 1
        self.index = index
        self.name = name
        self.is_stream = is_stream
        self.time = 1
        self.clock = VectorClock(born or {})
        self.clock[index] = 1
        self.news = 0
        """Grows with everything that a thread does to memory or learns from another agent."""
        self.enqueued_news: dict[int, int] = {}
        """The `news` of each thread when it last enqueued something on this stream."""

    def release(self) -> VectorClock:
        """Return what others may learn at this point, all that this agent knows and did, and begin a later time."""
        known = self.clock.copy()
        self.time += 1
        self.clock[self.index] = self.time
        return known

    def acquire(self, known: Mapping[int, int]) -> None:
        """Learn what was released elsewhere."""
        self.clock.join(known)
        self.news += 1

    def title(self) -> str:
        """The agent's name for people, such as `stream compute` or `thread MainThread`."""
        return f"{'stream' if self.is_stream else 'thread'} {self.name}"
