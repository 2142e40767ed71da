"""Launches steps: the leader packs the plan, the executor enqueues it. They enqueue or decline, and never wait."""

from __future__ import annotations

from typing import NamedTuple

from gapless.base.records import Request, StepPlan
from gapless.device import Fence, RingSlot
from gapless.model.seam import BatchShape
from gapless.pace.draft_gate import DraftGate
from gapless.step.executor import Executor
from gapless.step.graphs import GraphShapes, StepGraphs
from gapless.step.keys import ForwardKey
from gapless.step.kinds import kinds
from gapless.step.leader import Decision, Leader
from gapless.step.listing import Lanes
from gapless.step.logprobs import LogprobLines
from gapless.step.orders import CaptureOrder, Order, Ranks
from gapless.step.outbox import Outbox
from gapless.step.packet import DecodeRows, Packer


class Flight(NamedTuple):
    """A step between launch and observe. Times are ns of the device's clock."""

    plan: StepPlan
    outbox: RingSlot
    started: Fence
    ended: Fence
    on_host: Fence
    """Passed when the outbox slot on the host holds the step's lines."""
    decoded: DecodeRows
    """Steps of the same rows share the record."""
    packed_at: int
    launched_at: int
    decision: Decision

    @property
    def batch(self) -> BatchShape:
        """Shape of the step, padded to its graph."""
        return self.decision.key.forward.batch


class Launcher:
    """A leader and the executor of the same process."""

    def __init__(
        self, executor: Executor, packer: Packer, lanes: Lanes, shapes: GraphShapes, patience: int,
        gate: DraftGate | None = None, ranks: Ranks | None = None,
    ) -> None:  # fmt: skip
        """A program is captured after `patience` misses. `gate` decides which steps run drafts, and `ranks` get
        every order."""
        self._device, self.program = executor.device, executor.program
        self._queues = executor.device.caps.launch_queue > 0
        self.executor = executor
        self.graphs = StepGraphs(shapes, self._capture, patience)
        self.gate = gate
        self.leader = Leader(packer, lanes, self.graphs, gate)
        self.ranks = ranks
        self._last: Decision | None = None

    def compile(self) -> None:
        """Compile kernels for steps of all kinds, if the device compiles kernels. Nothing is in flight."""
        program, shapes = self.program, self.graphs.shapes
        rows = program.tables.state.shape[0] - 1  # without the null row
        keys = tuple(kinds(rows, *program.outbox[:2], shapes.places, shapes.drafted_rows))
        if shapes.adapters:
            keys += tuple(key.adapted for key in keys if isinstance(key, ForwardKey))
        self.executor.compile(keys)

    def ready(self, most: int = 1) -> int:
        """Return the number of steps from one packet that there is room for, up to `most`, and keep that room."""
        if self.executor.crowded:
            return 0
        # A chain of eager steps would fill the launch queue at once.
        if self._queues and self._last is not None and not self._last.captured:
            most = 1
        if self.ranks is not None and not (most := self.ranks.room(most)):
            return 0
        return self.executor.ready(most)

    @property
    def lacks(self) -> str:
        """Return why `ready` found no room: queue, ranks or ring."""
        if self.executor.crowded:
            return "queue"
        return "ranks" if self.ranks is not None and not self.ranks.room(1) else "ring"

    def launch(self, plan: StepPlan, requests: list[Request]) -> Flight:
        """Enqueue one step. Call `ready` first. `requests` belong to the plan's admissions, in order."""
        executor, leader = self.executor, self.leader
        if requests:
            leader.admit(plan, requests)
        self._last = decision = leader.decide(plan)
        leader.write(plan, decision, requests, executor.packet, executor.outbox)
        if decision.lists:
            executor.lists(decision.lists)
        if decision.fill is not None:
            executor.fill(decision.fill.words)
        if self.ranks is not None:
            self.ranks.send(executor.order(decision.key))
        return self.enqueue(plan, decision, True)

    def relaunch(self, plan: StepPlan) -> Flight:
        """Enqueue another step from the last packet, which the last step has advanced on the device.

        The plan differs from the last one in its number alone; `ready` had room for both.
        """
        decision = self._last
        assert decision is not None and not (plan.chunks or plan.admissions or plan.pages)
        if decision.missed:
            self.graphs.find(decision.wanted)  # one more miss
        if self.ranks is not None:
            self.ranks.send(Order(decision.key, None))
        return self.enqueue(plan, decision, False)

    def read(self, flight: Flight) -> Outbox:
        """Return the outbox of an observed step, as views that are valid until `release`."""
        assert flight.on_host.done()
        return self.executor.read(flight.outbox, flight.decision.samples)

    def read_logprobs(self, flight: Flight) -> LogprobLines:
        """Return the log-probabilities of an observed step, as views that are valid until `release`."""
        assert flight.decision.logprobs is not None
        return self.executor.read_scores(flight.outbox, flight.decision.logprobs)

    def release(self, flight: Flight) -> None:
        """Release the flight's outbox slot after the host has read it."""
        self.executor.release(flight.outbox, flight.on_host)

    def enqueue(self, plan: StepPlan, decision: Decision, fresh: bool) -> Flight:
        packed_at = self._device.clock()
        outbox, started, ended, on_host, launched_at = self.executor.launch(decision.key, fresh)
        decoded = self.leader.packer.decoded
        return Flight(plan, outbox, started, ended, on_host, decoded, packed_at, launched_at, decision)

    def _capture(self, order: CaptureOrder) -> list[bool]:
        """Return which programs every rank has captured; the others run eagerly everywhere."""
        self.leader.forget()
        if self.ranks is None:
            return self.executor.capture(order)
        self.ranks.send(order)
        made = self.executor.capture(order)
        everywhere = [all(pair) for pair in zip(made, self.ranks.captured(order), strict=True)]
        apart = tuple(key for key, kept in zip(order.capture, everywhere, strict=True) if not kept)
        if apart:
            drop = CaptureOrder((), apart)
            self.ranks.send(drop)
            self.executor.capture(drop)
            self.ranks.captured(drop)
        return everywhere
