"""The ranks that follow an engine's leader: their start, their orders, and the watch over their lives.

They fail together: once one has ended, hangs or has failed, the leader's device fails with that rank's last words, all
waits for other ranks end, and all processes of the engine with them.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError, EngineDeadError, GaplessError
from gapless.base.records import MoveOrder
from gapless.base.shared import SharedMemory, empty_file
from gapless.comm.join import group_on
from gapless.comm.seam import Group
from gapless.comm.shared import MOST_FRAME, BoardLine, Commons
from gapless.device import Device
from gapless.engine import rank_messages as rm
from gapless.engine.rank_moves import MOVE_LOOKS, OpenMove, RankMoves
from gapless.engine.rank_process import RankProcess
from gapless.step.lanes import LANES
from gapless.step.memory import MemorySizes
from gapless.step.orders import AnyOrder, CaptureOrder, Order, OrderWriter, WeightsOrder, followed

log = logging.getLogger("gapless.engine.ranks")

LOOK_SECONDS = 0.1
SILENT_LOOKS = 18
"""A rank that gives no sign of life between this many looks is stopped. Looks, not time: the whole machine may have
slept."""
STUCK_LOOKS = 3_000
"""Looks at a rank that the leader awaits, at its start or for a capture, without any progress: kernels may compile"""
LIST_WORDS = 16
"""[words] Most padding of a list of a lane"""
KEPT_ORDERS = 64
"""Orders in the report of a stall"""
FURTHER_BYTES, ROW_BYTES, PATH_BYTES = 64, 160, 8192
"""[bytes] At most: an order without words, the names of a row's part of another one, and an order with a path"""

T = TypeVar("T")


class Life(NamedTuple):
    """The signs of life of a rank, and the looks since each was the same."""

    pulse: int = 0
    silent: int = 0
    state: int = 0
    """The part of its start"""
    stuck: int = 0


class FollowingRanks:
    """The ranks after the first, as the leader of an engine starts and orders them. Implements `Ranks`.

    A thread of its own reads their messages and logs, and watches their lives.
    """

    def __init__(self, processes: Sequence[RankProcess]) -> None:
        """Raises ConfigError where there is no shared memory or no C++."""
        self._processes = processes
        self.world = 1 + len(processes)
        self._pages: SharedMemory | None = None
        self._moves = RankMoves(self.world)
        self._weights: dict[int, tuple[str, str]] = {}
        """The ranks' answers to the last of the orders to read weights"""
        self._reads = 0
        try:
            self._commons = Commons.create(self.world)
            self._pages_file = empty_file()
        except BaseException:
            for process in processes:
                process.close()
            raise
        self.group: Group = self._commons.group
        self.failure: GaplessError | None = None
        self._news = threading.Condition()
        self._messages: defaultdict[int, deque[Any]] = defaultdict(deque)
        self._device: Device | None = None
        self._wake: Callable[[], None] | None = None
        self._wants_steps: Callable[[], bool] = lambda: True  # at the start, all have work
        self._awaits = self._stopped = False
        self._writer, self._most = OrderWriter(), 0
        self._sent = self._steps = 0
        """Orders, and the steps among them"""
        self._last: deque[tuple[int, AnyOrder]] = deque(maxlen=KEPT_ORDERS)
        self._watcher = threading.Thread(target=self._watch, name="gapless-ranks", daemon=True)
        for process in processes:
            process.share(self._commons.fd, self._pages_file)
        self._watcher.start()

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple([process.pid for process in self._processes])

    # The start.

    def fails(self, device: Device) -> None:
        """Fail this device with the ranks."""
        self._device = device
        self.check(device)

    def join(self, device: Device) -> Group:
        """Return the group for the leader's device, once all ranks have opened theirs."""
        self.group = group_on(device, self._commons)
        return self.group

    def load(self, config: EngineConfig) -> None:
        """Let all load their shares."""
        self._say(rm.LoadShare(config))

    def agree(self, own: rm.Facts) -> int:
        """Wait until all have loaded; return the most pages that each could hold.

        Raises ConfigError if some fact is another one than the leader's.
        """
        pages = []
        for rank, loaded in self._await(rm.ShareLoaded):
            for name, ours, theirs in zip(rm.Facts._fields, own, loaded.facts, strict=True):
                if ours != theirs:
                    raise ConfigError(
                        f"tensor_parallel_size: rank {rank} differs from rank 0 in {name}: {theirs!r}, not {ours!r}"
                    )
            pages.append(loaded.pages)
        return min(pages)

    def build(self, plan: rm.RankPlan) -> None:
        """Let all allocate their memory. Raises ConfigError for steps whose orders do not fit the ring."""
        self._most = _most_bytes(plan.sizes)
        if self._most + plan.sizes.outboxes * FURTHER_BYTES > MOST_FRAME:
            raise ConfigError(
                f"max_model_len: ranks are sent a new row's tokens in one order, which would take {self._most:,} bytes "
                f"of {MOST_FRAME:,}: lower --max-model-len or --max-num-batched-tokens"
            )
        self._say(rm.BuildMemory(plan))

    def built(self) -> None:
        """Wait until all obey orders."""
        self._await(rm.MemoryBuilt)
        if self._pages is not None:
            self._pages.seal()  # all have mapped it

    def serve(self, wants_steps: Callable[[], bool]) -> None:
        """Watch over the ranks also while `wants_steps`: then all of them have work."""
        self._wants_steps = wants_steps

    def wakes(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from any thread, at their failure."""
        self._wake = wake

    # Orders: see `Ranks`.

    def room(self, orders: int) -> int:
        for count in (orders, 1):
            if self._commons.ring.room(self._most + count * FURTHER_BYTES):
                return count
        return 0

    def send(self, order: AnyOrder) -> None:
        if isinstance(order, CaptureOrder) and not any(followed(order)):
            return
        if isinstance(order, MoveOrder):
            self._moves.sent(order)
        elif isinstance(order, WeightsOrder):
            self._weights.clear()
            self._reads += not order.digest and bool(order.path)
        self._sent += 1
        self._steps += isinstance(order, Order)
        self._last.append((self._sent, order))
        frame = self._writer.write(order)
        while not isinstance(order, Order) and not self._commons.ring.room(len(frame)):
            self.check()
            time.sleep(LOOK_SECONDS / 10)  # it is being read
        self._commons.ring.put(frame)

    def captured(self, order: CaptureOrder) -> list[bool]:
        sent = followed(order)
        assert isinstance(sent, CaptureOrder)
        kept = dict.fromkeys(order.capture, True)
        if any(sent):
            for _, answer in self._await(rm.Captured):
                for key, made in zip(sent.capture, answer.kept, strict=True):
                    kept[key] = kept[key] and made
        return [*kept.values()]

    def host_memory(self, nbytes: int) -> SharedMemory:
        try:
            os.ftruncate(self._pages_file, nbytes)
        except OSError as error:
            raise ConfigError(f"kv_tiers: the host tier of {nbytes:,} bytes: {error.strerror or error}") from error
        self._pages, self._pages_file = SharedMemory(nbytes, self._pages_file), -1
        return self._pages

    def moved(self, stores: bool, number: int) -> Sequence[bytes] | None:
        return self._moves.ended(stores, number)

    def read_weights(self) -> Sequence[tuple[str, str]] | None:
        return [*self._weights.values()] if len(self._weights) == len(self._processes) else None

    # The board.

    def waited(self) -> Sequence[int]:
        return self._commons.board.waited()

    def lags(self) -> Sequence[int]:
        return [0, *[self._steps - self._commons.board.line(rank).launched for rank in range(1, self.world)]]

    def behind(self) -> str:
        """Say which rank the others wait for."""
        rank = rank_behind([self._commons.board.line(rank) for rank in range(self.world)])
        return f"rank {rank} is behind: {self._place(rank)}"

    def report(self) -> str:
        """Return the place of every rank, and the last orders."""
        places = [f"rank {rank}: {self._place(rank)}\n" for rank in range(self.world)]
        orders = [f"  {number}: {_named(order)}\n" for number, order in [*self._last]]
        return "".join([*places, self._moves.report(), "the last orders:\n", *orders])

    def _place(self, rank: int) -> str:
        line = self._commons.board.line(rank)
        steps = f"launched {line.launched} of {self._steps} steps, {line.ended} have ended"
        did = f"took {line.taken} of {self._sent} orders, {steps}"
        waits = f"waits for {(time.monotonic_ns() - line.waiting_since) / 1e9:.1f} s"
        began = f"began {line.calls} sums, {waits if line.waiting_since else 'and waits in none'}"
        return began if rank == 0 else f"{did}, {began}"

    # Lives.

    def check(self, device: Device | None = None) -> None:
        """Raise the failure of the ranks, if there is one, and fail `device` with it."""
        if self.failure is not None:
            if device is not None:
                device.fail(self.failure)
            raise self.failure from None

    def stop(self) -> None:
        """End all waits for other ranks."""
        with self._news:
            self._stopped = True
            self._news.notify_all()
        self.group.stop()

    def close(self) -> None:
        """End the processes, and wait for that."""
        self.stop()
        self._watcher.join()
        for process in self._processes:
            process.close()
        if self.failure is None:
            self.group.close()
        self._commons.close()
        if self._pages_file >= 0:
            os.close(self._pages_file)
            self._pages_file = -1

    def fail(self, error: GaplessError) -> None:
        """Fail the leader's device, and end all ranks. From any thread; the first error counts."""
        with self._news:
            if self.failure is not None or self._stopped:
                return
            self.failure = error
            self._news.notify_all()
        if self._device is not None:
            self._device.fail(error)
        self.group.stop()
        for process in self._processes:
            process.kill()
        if self._wake is not None:
            self._wake()

    def _say(self, message: rm.ToRank) -> None:
        self.check()
        for process in self._processes:
            process.send(message)

    def _await(self, kind: type[T]) -> list[tuple[int, T]]:
        """Wait for a message of every rank. Raises their failure."""
        self._awaits = True
        answers = []
        for process in self._processes:
            messages = self._messages[process.rank]
            with self._news:
                self._news.wait_for(lambda messages=messages: messages or self.failure or self._stopped)  # type: ignore[misc]
            self.check()
            assert messages, "ranks that are stopped answer nothing"
            message = messages.popleft()
            assert isinstance(message, kind), f"rank {process.rank} sent {type(message).__name__}"
            answers.append((process.rank, message))
        self._awaits = False
        return answers

    def _watch(self) -> None:
        try:
            self._follow_lives()
        except Exception as error:
            log.critical("the watch over the ranks failed", exc_info=error)
            self.fail(EngineDeadError(f"the watch over the ranks failed: {type(error).__name__}: {error}"))

    def _follow_lives(self) -> None:
        with selectors.DefaultSelector() as selector:
            for process in self._processes:
                selector.register(process.wire, selectors.EVENT_READ, (process, self._hear))
                selector.register(process.stderr, selectors.EVENT_READ, (process, RankProcess.read_log))
            pulses = {process.rank: Life() for process in self._processes}
            due = time.monotonic() + LOOK_SECONDS
            while not self._stopped and self.failure is None:
                for key, _ in selector.select(max(0.0, due - time.monotonic())):
                    process, read = key.data
                    if not read(process):
                        selector.unregister(key.fileobj)
                if time.monotonic() >= due:
                    self._look(pulses)
                    due = time.monotonic() + LOOK_SECONDS

    def _hear(self, process: RankProcess) -> bool:
        """Take a rank's messages; False once it has hung up."""
        try:
            messages = [message for frame in process.wire.receive() for message in rm.decode_from_rank(frame)]
        except ValueError as error:
            self.fail(EngineDeadError(f"rank {process.rank} broke the protocol: {error}"))
            return False
        for message in messages:
            if isinstance(message, rm.Failed):
                process.take_words(message.kind, message.text)
            elif isinstance(message, rm.WeightsRead):
                if message.number == self._reads:
                    self._weights[process.rank] = message.digest, message.refusal
                if self._device is not None:
                    self._device.bell.ring()
            elif isinstance(message, rm.Moved):
                self._take_move(process, message)
            else:
                with self._news:
                    self._messages[process.rank].append(message)
                    self._news.notify_all()
        if process.died is not None or not process.wire.open:
            self.fail(process.died or process.ended())
        return process.wire.open

    def _take_move(self, process: RankProcess, message: rm.Moved) -> None:
        try:
            self._moves.said(process.rank, message.stores, message.number, message.checksums)
        except ValueError as error:
            self.fail(EngineDeadError(f"rank {process.rank} broke the protocol: {error}"))
        if self._device is not None:
            self._device.bell.ring()

    def _look(self, lives: dict[int, Life]) -> None:
        """Fail with a rank that gives no sign of life while it has work, or that the leader awaits for too long."""
        if late := self._moves.late():
            self.fail(EngineDeadError(f"{late} for {MOVE_LOOKS * LOOK_SECONDS:g} s: it hangs"))
        works = self._awaits or self._wants_steps()
        for rank, life in lives.items():
            line = self._commons.board.line(rank)
            silent = life.silent + 1 if works and line.pulse and line.pulse == life.pulse else 0
            stuck = life.stuck + 1 if self._awaits and not self._messages[rank] and line.state == life.state else 0
            lives[rank] = Life(line.pulse, silent, line.state, stuck)
            for looks, most, said in (
                (silent, SILENT_LOOKS, "gave no sign of life"), (stuck, STUCK_LOOKS, "made no progress")
            ):  # fmt: skip
                if looks >= most:
                    text = f"rank {rank} {said} for {looks * LOOK_SECONDS:g} s: it is stopped or hangs"
                    self.fail(EngineDeadError(text))


def rank_behind(lines: Sequence[BoardLine]) -> int:
    """Return the rank that the others wait for: it waits in no sum, and has begun the fewest."""
    working = [rank for rank, line in enumerate(lines) if not line.waiting_since] or [*range(len(lines))]
    return min(working, key=lambda rank: (lines[rank].calls, rank == 0))


def _named(order: AnyOrder) -> str:
    """Describe an order for a report."""
    if isinstance(order, CaptureOrder):
        return f"captures {len(order.capture)} programs, drops {len(order.drop)}"
    if isinstance(order, MoveOrder):
        return str(OpenMove(order))
    if not isinstance(order, Order):
        return f"reads, takes or drops {order.path or order.digest}"
    again = "" if order.words is not None else ", from the packet before"
    return f"{order.key.forward}{again}"


def _most_bytes(sizes: MemorySizes) -> int:
    """Return the bytes of the longest order of a step."""
    lists = sum(lane.lists for lane in LANES) * (sizes.outbox.rows * sizes.outbox.width + LIST_WORDS)
    return 4 * (sizes.fill + sizes.words + lists) + (1 + sizes.rows) * ROW_BYTES + PATH_BYTES
