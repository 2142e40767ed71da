"""Agents: streams, the programs given to them and host threads, with the happens-before order between them.

An agent has a time of its own, which moves on whenever others can learn of what it did so far: a stream's at each
recorded fence, a thread's at each launch, put, set, release or start. Something done by agent `a` at time `t` happened
before everything done under a clock that knows `t` of `a`.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from .patches import holding
from .sites import NO_PROGRAM, Label
from .watched import TALLY

MOMENTS_KEPT = 1 << 16
OF_GROUP = "of group "
"""The beginning of the name of a process group's stream."""


class VectorClock(dict[int, int]):
    """The latest time that is known of each agent, by its index. Agents not named are known up to 0."""

    __slots__ = ()

    def join(self, other: Mapping[int, int]) -> None:
        """Merge the clock of `other`."""
        for agent, time in other.items():
            if time > self.get(agent, 0):
                self[agent] = time

    def copy(self) -> VectorClock:
        return VectorClock(self)


class Agent:
    """A stream or a host thread: `clock` has the latest ordered time of each agent, itself included."""

    __slots__ = ("clock", "enqueued_news", "index", "is_stream", "met", "name", "news", "time")
    label = NO_PROGRAM
    """The label of its stacks."""

    def __init__(self, index: int, name: str, is_stream: bool, born: Mapping[int, int] | None = None) -> None:
        """Begin at time 1; `born` is the clock of the agent that started it."""
        assert index >= 1
        self.index = index
        self.name = name
        self.is_stream = is_stream
        self.time = 1
        self.clock = VectorClock(born or {})
        self.clock[index] = 1
        self.met = VectorClock()
        """The clock of all that its programs took from other streams while they ran"""
        self.news = 0
        """Grows with every access of a thread and with every clock that it merges."""
        self.enqueued_news: dict[int, int] = {}
        """The `news` of each thread when it last enqueued something on this stream."""

    def release(self) -> VectorClock:
        """Return the agent's clock at this point, for others to merge, and begin a later time."""
        known = self.clock.copy()
        self.time += 1
        self.clock[self.index] = self.time
        return known

    def acquire(self, known: Mapping[int, int]) -> None:
        """Merge a clock that was released elsewhere."""
        self.clock.join(known)
        self.news += 1

    def title(self) -> str:
        """The agent's name for people, such as `stream compute` or `thread MainThread`."""
        return f"{'stream' if self.is_stream else 'thread'} {self.name}"


class Launched:
    """A launched program: it runs under the clock that its stream had at the launch."""

    __slots__ = ("agent", "clock", "index", "label", "news", "time")

    def __init__(self, agent: Agent, name: str, site: int) -> None:
        self.agent = agent
        self.index, self.time, self.clock = agent.index, agent.time, agent.clock.copy()
        self.label = Label(name.rpartition("<locals>.")[2], site)
        self.news = 0

    def release(self) -> VectorClock:
        return self.clock.copy()

    def acquire(self, known: VectorClock) -> None:
        self.clock.join(known)


class GroupProgram(Launched):
    """A collective on the stream of its process group, whatever stream is current."""

    __slots__ = ()


Actor = Agent | Launched
"""The agent that accesses: a thread, or a stream as it stood when it was given the program that runs now."""


@dataclass(slots=True)
class Moment:
    """One time of one agent: when it began, in the order of all, and the fence that ended it, if it is a stream's."""

    began: int
    fence: int | None = None
    fenced: int = 0
    """The moment of the fence's recording, counted like `began`."""


class _Acting(threading.local):
    actor: Actor | None = None


class Agents:
    """All agents of a checker. May be called from any thread."""

    def __init__(self, one_thread: bool, lock: threading.RLock) -> None:
        """Start with no agents. With `one_thread` all host threads are one agent, and their accesses are ordered."""
        self._one_thread = one_thread
        self._lock = lock
        self._all: list[Agent] = []
        self._streams: dict[Any, tuple[Agent, Any]] = {}
        self._counted: set[Any] = set()
        self._moments: dict[tuple[int, int], Moment] = {}
        self._released: WeakKeyDictionary[Any, VectorClock] = WeakKeyDictionary()
        self._born: WeakKeyDictionary[threading.Thread, Agent] = WeakKeyDictionary()
        self._local = _Acting()
        self._order = 0
        self._owner = self.add(threading.current_thread().name, False)
        self._local.actor = self._owner

    def __getitem__(self, index: int) -> Agent:
        return self._all[index - 1]

    def add(self, name: str, is_stream: bool, born: VectorClock | None = None) -> Agent:
        with self._lock:
            agent = Agent(len(self._all) + 1, name, is_stream, born)
            self._all.append(agent)
            self._moments[agent.index, agent.time] = Moment(self._order)
        return agent

    def begin_again(self) -> None:
        """Forget all orders: every thread and stream is a new agent, and no old clock names one."""
        with self._lock:
            for table in (self._streams, self._released, self._born):
                table.clear()
            self._local = _Acting()
            self._local.actor = self._owner = self.add(threading.current_thread().name, False)

    # The calling thread.

    def here(self) -> Actor:
        """Return the agent that acts now on the calling thread."""
        return self._local.actor or self._adopt()

    def acting_as(self, actor: Actor) -> AbstractContextManager[None]:
        """Let the calling thread act as `actor` inside."""
        return holding(self._local, actor=actor)

    def known_thread(self) -> bool:
        """Return whether `here` may be called: a thread that is just being started has no name yet."""
        return self._local.actor is not None or threading.get_ident() in _threads()

    def _adopt(self) -> Agent:
        thread = _threads().get(threading.get_ident())
        # A thread that Python did not start is one of torch's own: autograd's, which works for the thread that asked.
        if thread is None or isinstance(thread, threading._DummyThread) or self._one_thread:
            agent = self._owner
        else:
            agent = self._born.get(thread) or self.add(thread.name, False)
        self._local.actor = agent
        return agent

    def forked(self) -> None:
        """Order everything before this process's fork before its own accesses."""
        here = self.here()
        for agent in self._all:
            here.acquire(agent.clock)

    def starting(self, thread: threading.Thread) -> None:
        """The calling thread is about to start this one, which begins with its starter's clock."""
        if not self._one_thread:
            self._born[thread] = self.add(thread.name, False, self.give())

    # Orders between agents.

    def release(self, key: object) -> None:
        """Order what the caller did so far before everything that follows a later `acquire(key)`."""
        with self._lock:
            known = self._released.get(key)
            if known is None:
                known = self._released[key] = VectorClock()
            known.join(self.give())

    def acquire(self, key: object) -> None:
        with self._lock:
            known = self._released.get(key)
            if known is not None:
                self.here().acquire(known)

    def learn(self, known: VectorClock) -> None:
        """Merge the given clock into the calling thread's."""
        with self._lock:
            self.here().acquire(known)

    def give(self) -> VectorClock:
        """Return the caller's clock, for another to merge."""
        actor = self.here()
        with self._lock:
            known = actor.release()
            if isinstance(actor, Agent):
                self._moment(actor)
        return known

    def stream(self, key: Any, name: str, keep: Any) -> Agent:
        """The agent of a stream. `keep` is held, so that `key` stays its own."""
        with self._lock:
            found = self._streams.get(key)
            if found is None:
                if key not in self._counted:
                    self._counted.add(key)
                    TALLY.add("streams")
                same = sum(agent.name.split("#")[0] == name for agent in self.streams())
                found = self._streams[key] = self.add(f"{name}#{same + 1}" if same else name, True), keep
        return found[0]

    def streams(self) -> list[Agent]:
        return [agent for agent, _ in self._streams.values()]

    def enqueue(self, stream: Agent) -> None:
        """Enqueue something on the stream from the calling thread: it comes after what the thread did."""
        with self._lock:
            stream.acquire(self.give())

    def enqueue_again(self, stream: Agent, actor: Actor) -> None:
        """Do what `enqueue` does for the calling thread, `actor`, unless that has done and learnt nothing since."""
        news = actor.news
        if stream.enqueued_news.get(actor.index) != news or isinstance(actor, Launched):
            self.enqueue(stream)
            stream.enqueued_news[actor.index] = news

    def wait(self, stream: Agent, known: VectorClock) -> None:
        """Enqueue a wait on the stream: its later work comes after that point of another."""
        with self._lock:
            self.enqueue(stream)
            stream.acquire(known)

    def record(self, stream: Agent, site: int) -> VectorClock:
        """Record a fence on the stream; returns the clock of a thread that has seen it passed."""
        with self._lock:
            self.enqueue(stream)
            moment = self._moments[stream.index, stream.time]
            moment.fence, moment.fenced = site, self._order
            known = stream.release()
            self._moment(stream)
        return known

    def _moment(self, agent: Agent) -> None:
        self._order += 1
        self._moments[agent.index, agent.time] = Moment(self._order)
        if len(self._moments) > MOMENTS_KEPT:
            for key in [key for key in self._moments if key[1] < self[key[0]].time][: MOMENTS_KEPT // 2]:
                del self._moments[key]

    def moment(self, agent: int, time: int) -> Moment | None:
        """The beginning of this time of an agent; None when that is too long ago."""
        return self._moments.get((agent, time))


def _threads() -> dict[int, threading.Thread]:
    """Return Python's threads by ident, without the lock that `threading.enumerate` takes: it may be one of ours."""
    threads: dict[int, threading.Thread] = getattr(threading, "_active")  # noqa: B009 - it has no public name
    return threads
