"""Vector clocks: what every stream and host thread knows of all the others.

An agent is a stream or a host thread. It has a time of its own, which moves on whenever others can learn of what it
did so far: a stream's at each recorded fence, a thread's at each launch, put, set, release or start. Something done by
agent `a` at time `t` happened before everything done under a clock that knows `t` of `a`.
"""

from __future__ import annotations

from collections.abc import Mapping


class Clock(dict[int, int]):
    """The latest time that is known of each agent, by its index. Agents not named are known up to 0."""

    __slots__ = ()

    def join(self, other: Mapping[int, int]) -> None:
        """Know what `other` knows as well."""
        for agent, time in other.items():
            if time > self.get(agent, 0):
                self[agent] = time

    def knows(self, agent: int, time: int) -> bool:
        return self.get(agent, 0) >= time

    def copy(self) -> Clock:
        return Clock(self)


class Agent:
    """A stream or a host thread: `clock` is what it knows now, itself included."""

    __slots__ = ("clock", "index", "is_stream", "name", "news", "time", "told")
    label = 0
    """Of its stacks: it runs no program."""

    def __init__(self, index: int, name: str, is_stream: bool, born: Mapping[int, int] | None = None) -> None:
        """`born` is what a new agent knows from the one that started it."""
        assert index >= 1
        self.index = index
        self.name = name
        self.is_stream = is_stream
        self.time = 1
        self.clock = Clock(born or {})
        self.clock[index] = 1
        self.news = 0
        """Counts what a thread did to memory and learnt from others."""
        self.told: dict[int, int] = {}
        """Of a stream: the news of each thread when that last put something on it."""

    def release(self) -> Clock:
        """What another agent may learn from this point: all that this one knows and did. What follows is later."""
        known = self.clock.copy()
        self.time += 1
        self.clock[self.index] = self.time
        return known

    def acquire(self, known: Mapping[int, int]) -> None:
        """Learn what was released elsewhere."""
        self.clock.join(known)
        self.news += 1

    def title(self) -> str:
        """`stream compute` or `thread MainThread`."""
        return f"{'stream' if self.is_stream else 'thread'} {self.name}"
