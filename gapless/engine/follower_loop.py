"""A following rank: it loads its share of the model, and then obeys its leader's orders."""

from __future__ import annotations

import gc
import itertools
import os
import select
import socket
import traceback
from typing import TypeVar

from gapless.base import progress
from gapless.base.config import EngineConfig
from gapless.base.errors import EngineDeadError, UserError
from gapless.base.share import Share
from gapless.base.shared import SharedMemory
from gapless.comm.join import group_on
from gapless.comm.seam import Group
from gapless.comm.shared import Commons
from gapless.device import Device
from gapless.engine import checkers, share
from gapless.engine import messages as m
from gapless.engine import rank_messages as rm
from gapless.engine.adapters import AdapterFiles, FollowingAdapters
from gapless.engine.on_device import on_device
from gapless.engine.rank_process import MEMORY_TAG
from gapless.engine.sizing import could_hold
from gapless.engine.tiers import host_sizes
from gapless.engine.updates import FollowingWeights
from gapless.engine.wire import Wire
from gapless.kernels.seam import Kernels
from gapless.loop.build import host_slots
from gapless.model.config import load_config
from gapless.model.drafting.seam import Head
from gapless.model.loader import load_model
from gapless.model.seam import LoadedModel
from gapless.offload.transfers import FollowingMoves
from gapless.step.executor import Executor
from gapless.step.follower import Follower, FollowerProgram
from gapless.step.keys import ForwardKey
from gapless.step.kinds import kinds
from gapless.step.memory import build_executor
from gapless.step.orders import OrderReader
from gapless.step.program import RowOptions
from gapless.step.speculation import Speculation

IDLE_SECONDS = 0.05
"""[s] A rank without orders looks so often for ended steps and for a failed device."""
MOVE_LOOK_SECONDS = 0.001
"""[s] The same while it moves pages: a request may wait for them"""

T = TypeVar("T")


def follow(rank: int, world: int, number: int) -> bool:
    """Load, and obey until the leader stops the ranks; False after a failure, which is sent to the leader."""
    os.set_inheritable(number, False)
    leader = socket.socket(fileno=number)
    shared, memory, _, _ = socket.recv_fds(leader, len(MEMORY_TAG), 2)
    if shared != MEMORY_TAG:
        return False  # the leader has ended
    wire = Wire(leader)
    try:
        commons = Commons.attach(memory[0], Share(rank, world))
        places = itertools.count(1)
        # The leader's start has the same parts, and shows them; it looks for progress of ours.
        progress.show = lambda phase: commons.board.enter(next(places))
        FollowingRank(wire, commons, memory[1]).run()
    except Exception as error:
        if not isinstance(error, UserError):
            traceback.print_exc()
        words = m.last_words(error)
        wire.send(m.encode([rm.Failed(words.kind, words.text)]))
        return False
    return True


class FollowingRank:
    """One rank's start, and its life."""

    def __init__(self, wire: Wire, commons: Commons, pages: int) -> None:
        """`pages` is the file of the host tier's memory."""
        self._wire, self._commons, self._pages = wire, commons, pages
        self._share = commons.share
        self._group: Group = commons.group

    def run(self) -> None:
        checkers.connect()
        config = self._next(rm.LoadShare).config
        model_config = load_config(config)
        device = share.open_rank_device(config, model_config, self._share)
        self._group = group = group_on(device, self._commons)
        kernels = share.choose_kernels(device, config, model_config)
        model = on_device(device, lambda: load_model(config, device.torch_device, kernels, group))
        head = on_device(device, lambda: share.head_of(config, device, model))
        facts = share.facts_of(config, device, kernels, model, self._share)
        self._say(rm.ShareLoaded(facts, could_hold(config, model.config, model, device)))
        executor = self._build(device, model, kernels, head, self._next(rm.BuildMemory).plan)
        moves, adapt = self._host_tier(config, executor), None
        if model.adapters is not None:
            adapt = FollowingAdapters(AdapterFiles(config, model.config, model.adapters, device)).obey
        self._say(rm.MemoryBuilt())
        gc.collect()
        gc.freeze()  # collections need not walk the start's objects
        self._weights = FollowingWeights(model, device, self._share)
        move = moves.begin if moves is not None else None
        self._obey(
            Follower(executor, lambda kept: self._say(rm.Captured(tuple(kept))), adapt, self._weights.obey, move), moves
        )

    def _build(
        self, device: Device, model: LoadedModel, kernels: Kernels, head: Head | None, plan: rm.RankPlan
    ) -> Executor:
        group = self._group
        drafts = Speculation(plan.drafts, None, plan.drafted_rows, head) if plan.drafts else None
        options = RowOptions(speculation=drafts, group=group)
        executor = on_device(
            device, lambda: build_executor(device, model, FollowerProgram, kernels, plan.sizes, options)
        )
        share.check_sum(device, group)
        outbox, places = plan.sizes.outbox, drafts.sizes if drafts else ()
        programs = kinds(plan.sizes.rows, outbox.rows, outbox.tokens, places, plan.drafted_rows)
        executor.compile([key for key in programs if isinstance(key, ForwardKey)])
        device.reserve(*plan.reserved)
        return executor

    def _host_tier(self, config: EngineConfig, executor: Executor) -> FollowingMoves | None:
        """Map the leader's host tier, if it has one: it made the memory before the first sum."""
        sizes = host_sizes(config)
        nbytes = os.fstat(self._pages).st_size
        if sizes is None:
            os.close(self._pages)
            return None
        memory, cache = SharedMemory(nbytes, self._pages), executor.program.cache
        slots = host_slots(sizes, cache, self._share.world)
        return FollowingMoves(executor.device, cache, executor.program.kernels.copy_pages, slots, memory, self._share)

    def _obey(self, follower: Follower, moves: FollowingMoves | None) -> None:
        ring, board, reader, taken = self._commons.ring, self._commons.board, OrderReader(), 0
        while not self._commons.stopped:
            if moves is not None:
                for order, checksums in moves.ended():
                    self._say(rm.Moved(order.stores, order.number, checksums))
            if (read := self._weights.read()) is not None:
                self._say(rm.WeightsRead(*read))
            frame = ring.take()
            if frame is None:
                follower.look()
                board.ended(follower.ended)
                ring.wait(MOVE_LOOK_SECONDS if moves is not None and moves.underway else IDLE_SECONDS)
                continue
            taken += 1
            board.taken(taken)
            follower.obey(reader.read(frame))
            board.launched(follower.launched)
            board.ended(follower.ended)

    def _say(self, message: rm.FromRank) -> None:
        self._wire.send(m.encode([message]))

    def _next(self, kind: type[T]) -> T:
        """Wait for the leader's next message."""
        frames: list[bytes] = []
        while not frames:
            select.select([self._wire], [], [])
            frames = self._wire.receive()
            if not self._wire.open:
                raise EngineDeadError("the leader has hung up")
        (message,) = rm.decode_to_rank(frames[0])
        assert isinstance(message, kind), f"the leader sent {type(message).__name__}"
        return message
