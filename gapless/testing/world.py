"""A world of ranks: N simulated ranks of one engine, under adversaries that one seed makes, on one virtual time.

The caller's thread is the leader's host. While it touches its device or waits, any stream of any rank may move, and
the hosts of the ranks that follow take orders from their rings. A program that comes to an operation of its group
stops there until the other ranks' programs come too. Orders come late, captures fail on one rank alone, and a rank may
die at any moment, as the seed decides.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple

from gapless.base import observe
from gapless.base.errors import DeviceError
from gapless.base.records import MoveOrder
from gapless.base.share import Share
from gapless.base.shared import SharedMemory
from gapless.device.record import TapeGraph
from gapless.device.seam import Program
from gapless.engine.rank_moves import RankMoves
from gapless.kernels.tables import Tables
from gapless.loop.loop import Loop
from gapless.offload.transfers import FollowingMoves
from gapless.step.executor import Executor
from gapless.step.follower import Follower, FollowerProgram
from gapless.step.keys import ForwardKey
from gapless.step.orders import AnyOrder, CaptureOrder, Order, OrderReader, OrderWriter
from gapless.step.program import RowOptions
from gapless.testing.adversary import MOODS
from gapless.testing.baton import Baton
from gapless.testing.meetings import Given, Meeting, RankGroup
from gapless.testing.sim import TICK_NS, SimDevice, SimFence, SimStream

LAST_ORDERS = 4
"""Orders of each rank that a deadlock names"""


class Faults(NamedTuple):
    """Injected faults. A moment is a number of moves of all ranks."""

    late: int = 0
    """[moves] Most that an order may come late"""
    ring: int = 16
    """[orders] Room for orders that a rank has not taken"""
    refused: float = 0.0
    """Share of captures that fail, on each rank by itself"""
    dies: tuple[int, int] | None = None
    """A rank, and the moment of its death"""


class RankDiedError(Exception):
    """Raised on the other ranks after a rank has died."""


class RankHost(SimStream):
    """The host of a rank that follows, on a thread of its own: it takes an order when the adversary lets it."""

    def __init__(self, device: RankDevice) -> None:
        super().__init__("host", device)
        self.inbox: deque[tuple[bytes, int]] = deque()
        """Orders on the wire, each with its earliest moment"""
        self.made: deque[list[bool]] = deque()
        """Answers to orders of captures"""
        self.taken: deque[str] = deque(maxlen=LAST_ORDERS)
        self.follower: Follower | None = None
        self.moves: FollowingMoves | None = None
        self._answer = partial(device.world.answer, device.rank)
        self.baton = Baton(f"host of rank {device.rank}")
        self.fence: SimFence | None = None
        """The fence that the host waits for in the middle of an order"""
        self._reader = OrderReader()

    def awaited(self) -> SimFence | None:
        return self.fence if self.fence is not None and self.fence.at is None else None

    def can_move(self, moment: int) -> bool:
        if self.baton.busy:
            return self.awaited() is None or self.device.fault.error is not None
        comes = bool(self.inbox) and self.inbox[0][1] <= moment
        return (comes or self._has_moved()) and self.device.fault.error is None

    def _has_moved(self) -> bool:
        underway: Any = self.moves.underway if self.moves is not None else ()
        return any([fence.at is not None for _, fence, _ in underway])

    def head(self) -> str:
        return f"host: {'in' if self.baton.busy else 'after'} {self.taken[-1] if self.taken else 'no order'}"

    def obey(self) -> None:
        """Answer for transfers that have ended, or take the next order. Raises DeviceError if the device has failed."""
        assert self.follower is not None
        if self.moves is not None and self._has_moved():
            for move, checksums in self.moves.ended():
                self._answer(move, checksums)
            return
        order = self._reader.read(self.inbox.popleft()[0])
        self.taken.append(named(order))
        self.follower.obey(order)


class RankDevice(SimDevice):
    """The simulated device of one rank."""

    def __init__(self, world: World, rank: int, mood: str | None, maps_host: bool) -> None:
        self.world, self.rank = world, rank
        self.dead = False
        self.closed = False
        self._baton = Baton(f"compute of rank {rank}")
        self._meeting: tuple[Meeting, Sequence[int]] | None = None
        super().__init__(world.random.randrange(1 << 30), mood, maps_host)
        self.host = RankHost(self)

    @property
    def host_now(self) -> int:
        return self.world.now

    @host_now.setter
    def host_now(self, now: int) -> None:
        self.world.now = max(self.world.now, now)

    def touch(self) -> None:
        assert not self._inside, "a program may not launch, record, wait or ask the time"
        self.world.touched()

    def force(self, fence: SimFence | None = None) -> SimStream | None:
        if self.world.running is None:
            return self.world.force(fence)
        self.host.fence = fence
        self.host.baton.pause()
        self.host.fence = None
        return self.compute

    def ready(self) -> list[SimStream]:
        if self.dead or self.closed:
            return []
        found = [stream for stream in super().ready() if stream is not self.compute or not self._baton.busy]
        if self._baton.busy and (self.world.stopped or not self.lacking()):
            found.append(self.compute)
        if self.host.can_move(self.world.moment):
            found.append(self.host)
        return found

    def lacking(self) -> list[int]:
        """Return the ranks that the program which runs waits for."""
        if self._meeting is None:
            return []
        meeting, needed = self._meeting
        return [rank for rank in needed if rank not in meeting.given]

    def execute(self, stream: SimStream) -> None:
        self.world.moves_on()
        stream.passed_over = 0
        if stream is self.host:
            self.world.run(self.host.baton, None if self.host.baton.busy else self.host.obey)
        elif stream is self.compute and self._baton.busy:
            self.world.run(self._baton)
        elif stream is self.compute and stream.queue[0].program is not None:
            self.world.run(self._baton, partial(super().execute, stream))
        else:
            op = stream.queue[0]
            super().execute(stream)
            fence = op.fence or op.awaited
            if observe.watcher is not None and fence is not None and fence.mark is not None:
                observe.watcher.reached(stream, fence.mark, fence is op.awaited)

    def come(self, number: int, what: str, given: Given) -> Meeting:
        return self.world.come(self.rank, number, what, given)

    def leave(self, number: int) -> None:
        self.world.leave(number)

    def stop(self, why: str) -> None:
        self.world.stop(why)

    def waits_in(self, meeting: Meeting, needed: Sequence[int]) -> None:
        """Stop the running program until the needed ranks come to the meeting; sometimes longer."""
        self._meeting = meeting, needed
        try:
            while self.lacking() or self.world.random.random() < 0.2:
                self._inside = False
                self._baton.pause()
                self._inside = True
                if self.world.stopped:
                    raise RankDiedError(self.world.stopped)
        finally:
            self._meeting = None

    def capture(self, key: Hashable, program: Program, buffers: tuple[Any, ...] = ()) -> TapeGraph:
        if self.world.random.random() < self.world.faults.refused:
            raise MemoryError(f"no room for a graph on rank {self.rank}")
        return super().capture(key, program, buffers)

    def deadlock(self, fence: SimFence) -> str:
        return self.world.deadlock(f"{fence.stream.name} of rank {self.rank} to pass a fence")

    def close(self) -> None:
        super().close()
        if self.rank == 0:
            self.world.close()

    def end(self) -> None:
        """End the threads of this rank."""
        self.closed = True
        self._baton.end()
        self.host.baton.end()

    def describe(self) -> str:
        """Describe the rank's streams, and its last orders."""
        held = f" in {self._meeting[0].what}, without rank {self.lacking()}" if self._meeting and self.lacking() else ""
        heads = "; ".join(stream.head() for stream in (*self.streams, self.host) if stream.queue or stream is self.host)
        orders = self.host.taken if self.rank else self.world.sent
        state = "dead; " if self.dead else ""
        return f"rank {self.rank}{held}: {state}{heads}; last orders: {', '.join(orders) or 'none'}"


class World:
    """The ranks of one engine. Implements `Ranks`; `group` is the leader's, and `device` its device."""

    def __init__(
        self, seed: int = 0, ranks: int = 2, mood: str | None = None, maps_host: bool = False,
        faults: Faults | None = None,
    ) -> None:  # fmt: skip
        """`mood` is the leader's, as of a SimDevice; the others have moods of their own."""
        self.random = random.Random(seed)
        self.faults = faults or Faults()
        self.now = 0
        self.moment = 0
        """Moves of all ranks, and touches"""
        self.stopped = ""
        """Reason, once the ranks were stopped"""
        self.running: Baton | None = None
        self.sent: deque[str] = deque(maxlen=LAST_ORDERS)
        self._stops: tuple[int, str] | None = None
        """Moment and reason of the stop: a death is noticed later"""
        moods = [mood, *(self.random.choice((None, *MOODS)) for _ in range(ranks - 1))]
        self.devices = [RankDevice(self, rank, mood, maps_host) for rank, mood in enumerate(moods)]
        self.groups = [RankGroup(Share(device.rank, ranks), device) for device in self.devices]
        self.hosts = [device.host for device in self.devices[1:]]
        self.device, self.group = self.devices[0], self.groups[0]
        self._writer = OrderWriter()
        self._moves = RankMoves(ranks)
        self.memory: SharedMemory | None = None
        """The memory of the host tier, which all ranks map"""
        self._meetings: dict[int, Meeting] = {}

    def follow(self, loop: Loop) -> None:
        """Let the other ranks follow this loop, which was built with the world's device, group and ranks."""
        leader = loop.launcher.executor
        words, fill = leader.buffers.words.numel(), leader.buffers.loads.numel()
        loop.launcher.program.model.group = self.group  # type: ignore[attr-defined]
        for host, group in zip(self.hosts, self.groups[1:], strict=True):
            program = _following(leader, group, host.device)
            executor = Executor(
                host.device, program, words, len(leader.packets.slots), len(leader.outboxes.slots), fill
            )
            host.follower = Follower(executor, host.made.append, move=self._moves_of(host, loop, executor))
        observe.built(self)

    def _moves_of(self, host: RankHost, loop: Loop, executor: Executor) -> Callable[..., None] | None:
        transfers, share = loop.parts.transfers, self.groups[self.hosts.index(host) + 1].share
        if transfers is None or self.memory is None:
            return None
        program, slots = executor.program, transfers.host.groups[0].size
        copy_pages = program.kernels.copy_pages
        host.moves = FollowingMoves(executor.device, program.cache, copy_pages, slots, self.memory, share)
        return host.moves.begin

    @property
    def executors(self) -> list[Executor]:
        """The executors of the ranks that follow."""
        return [host.follower.executor for host in self.hosts if host.follower is not None]

    # Ranks.

    def room(self, orders: int) -> int:
        return max(0, min([orders, *(self.faults.ring - len(host.inbox) for host in self.hosts)]))

    def send(self, order: AnyOrder) -> None:
        if isinstance(order, MoveOrder):
            self._moves.sent(order)
        full = any(len(host.inbox) >= self.faults.ring for host in self.hosts)
        assert isinstance(order, CaptureOrder) or not full, "a full ring takes no order"
        data = self._writer.write(order)
        self.sent.append(named(order))
        for host in self.hosts:
            host.inbox.append((data, self.moment + self.random.randint(0, self.faults.late)))

    def captured(self, order: CaptureOrder) -> list[bool]:
        while not all(host.made for host in self.hosts):
            self.device.fault.check()
            assert self.force() is not None, self.deadlock("the answers about captures")
        made = [iter(host.made.popleft()) for host in self.hosts]  # in the order of their orders, as sockets bring them
        return [not isinstance(key, ForwardKey) or all([next(one) for one in made]) for key in order.capture]

    def host_memory(self, nbytes: int) -> SharedMemory:
        self.memory = SharedMemory(nbytes)
        return self.memory

    def moved(self, stores: bool, number: int) -> Sequence[bytes] | None:
        return self._moves.ended(stores, number)

    def answer(self, rank: int, order: MoveOrder, checksums: bytes) -> None:
        """Take in the end of a rank's transfer."""
        self._moves.said(rank, order.stores, order.number, checksums)
        self.device.bell.ring()

    def read_weights(self) -> None:
        raise AssertionError("the checksum model has no files")

    def waited(self) -> list[int]:
        return [0] * len(self.devices)

    def lags(self) -> list[int]:
        return [0, *(len(host.inbox) for host in self.hosts)]

    # The adversaries.

    def touched(self) -> None:
        """Let time pass at a call of a host: any rank may move."""
        self.now += TICK_NS
        self.moment += 1
        if self.running is not None:
            if self.random.random() < 0.3:
                self.running.pause()
            return
        for device in self.random.sample(self.devices, len(self.devices)):
            for stream in device.adversary.moves(device.ready):
                device.execute(stream)

    def force(self, fence: SimFence | None = None) -> SimStream | None:
        """Move one stream or host of any rank, while the leader's host waits."""
        ready = self._ready()
        if not ready:
            self.device.fault.check()
            return None
        needed = self._needed(fence, ready) if fence is not None else None
        adversary = self.random.choice(self.devices).adversary
        stream = adversary.forced(ready, needed or self.random.choice(ready))
        stream.device.execute(stream)
        return stream

    def run(self, baton: Baton, work: Any = None) -> None:
        """Run a program, or a host that follows, up to its next stop."""
        self.running = baton
        try:
            baton.run(work)
        except DeviceError as error:
            self._notice(f"a rank that follows has ended: {error}")
        finally:
            self.running = None

    def moves_on(self) -> None:
        """Count a move; a rank may die now, and the others may be stopped."""
        self.moment += 1
        dies = self.faults.dies
        if dies is not None and dies[1] <= self.moment and not self.devices[dies[0]].dead:
            self.devices[dies[0]].dead = True
            self._notice(f"rank {dies[0]} died")
        if self._stops is not None and self._stops[0] <= self.moment:
            self.stop(self._stops[1])

    def stop(self, why: str) -> None:
        """End all ranks: programs that wait raise, and so do hosts."""
        if not self.stopped:
            self.stopped = why
            for device in self.devices:
                device.fault.set(RankDiedError(why), "the ranks were stopped")

    def close(self) -> None:
        """End all that still runs: stopped, nothing may wait for a dead rank."""
        self.stop("the engine was closed")
        while ready := self._ready():
            stream = self.random.choice(ready)
            stream.device.execute(stream)
        waits = [device.describe() for device in self.devices if device.lacking() and not device.dead]
        for device in self.devices:
            device.end()
        for device in self.devices[1:]:
            device.close()
        assert not waits, f"stopped, and still waiting: {waits}"

    # Meetings.

    def come(self, rank: int, number: int, what: str, given: Given) -> Meeting:
        """Bring a rank's part to the meeting with this number."""
        meeting = self._meetings.setdefault(number, Meeting(what))
        assert meeting.what == what, f"rank {rank} comes to {what}, and others to {meeting.what}"
        assert rank not in meeting.given, f"rank {rank} comes twice to {what}"
        meeting.given[rank] = given
        return meeting

    def leave(self, number: int) -> None:
        """Note that a rank has its result."""
        self._meetings[number].left += 1
        if self._meetings[number].left == len(self.devices):
            del self._meetings[number]

    def deadlock(self, awaited: str) -> str:
        """Describe the ranks when none can move."""
        ranks = "".join(f"\n  {device.describe()}" for device in self.devices)
        return f"deadlock: the leader waits for {awaited}, and no stream of any rank can move:{ranks}"

    def check_alike(self, loop: Loop) -> None:
        """Assert that no rank at rest has calls or orders of its own, and that all have the same graphs.

        None dies from now on; if one died before, the ranks are stopped.
        """
        self.faults = self.faults._replace(dies=None)
        if any(device.dead for device in self.devices):
            return self.stop("a rank died")
        while self.force() is not None:
            pass
        assert not self._meetings, f"at rest, ranks wait in {[one.what for one in self._meetings.values()]}"
        graphs = {key for key in loop.launcher.executor.graphs if isinstance(key, ForwardKey)}
        for rank, host in enumerate(self.hosts, 1):
            assert host.follower is not None and not host.inbox and not host.baton.busy, self.deadlock("rest")
            own = host.follower.executor.graphs.keys()
            assert own == graphs, f"rank {rank} alone has graphs, or lacks some: {own ^ graphs}"

    def _notice(self, why: str) -> None:
        """Stop the ranks, some time later."""
        if self._stops is None:
            self._stops = self.moment + self.random.randrange(100), why

    def _ready(self) -> list[SimStream]:
        ready = [stream for device in self.devices for stream in device.ready()]
        if ready:
            return ready
        if self._stops is not None and not self.stopped:
            self.stop(self._stops[1])
            return self._ready()
        for device in self.devices[1:]:
            if device.fault.error is not None and not self.stopped:
                self.stop(f"rank {device.rank} has failed: {device.fault.error!r}")
                return self._ready()
        self.moment = max([self.moment, *(host.inbox[0][1] for host in self.hosts if host.inbox)])
        return [stream for device in self.devices for stream in device.ready()]

    def _needed(self, fence: SimFence, ready: list[SimStream]) -> SimStream | None:
        """Return the stream or host that must move first for `fence` to pass, if it is found."""
        stream, seen = fence.stream, set[int]()
        while stream not in ready and id(stream) not in seen:
            seen.add(id(stream))
            device = next(device for device in self.devices if device is stream.device)
            if (awaited := stream.awaited()) is not None:
                stream = awaited.stream
            elif stream is device.compute and device.lacking():
                stream = self.devices[device.lacking()[0]].compute
            elif not stream.queue and device.rank:
                stream = device.host
        return stream if stream in ready else None


def named(order: AnyOrder) -> str:
    """Name an order, for messages."""
    if isinstance(order, CaptureOrder):
        return f"captures of {len(order.capture)} graphs"
    if isinstance(order, MoveOrder):
        return f"{'a store' if order.stores else 'a load'} of {sum([count for _, count in order.counts])} pages"
    if not isinstance(order, Order):
        return f"files of {order.path or order.digest}"
    packet = order.key.forward.packet
    again = ", again" if order.words is None else ""
    return f"a step of {packet.rows} rows, {packet.chunks} chunks{again}"


def _following(leader: Executor, group: RankGroup, device: SimDevice) -> FollowerProgram:
    """Return the program of a rank that follows: its own tables, pages and share of the model."""
    program = leader.program
    tables = Tables(*(table.clone() for table in program.tables))
    model: Any = copy(program.model)
    model.group = group
    cache = model.new_cache(program.cache.pages, program.cache.page_size, device.torch_device)
    slots = len(program.adjustments.owners) - 1
    made = FollowerProgram(model, tables, cache, program.kernels, program.outbox, RowOptions(slots, group=group))
    made.samples = program.samples
    return made
