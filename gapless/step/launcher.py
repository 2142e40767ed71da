"""Launching a step: pack the plan, enqueue the program, bring the outbox home. Enqueues or declines, never waits."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from gapless.base.records import Int32s, Int64s, Request, StepPlan
from gapless.device import Device, Fence, Graph, Ring, Slot
from gapless.model.seam import BatchShape, Model
from gapless.step.asked import Asked, Asking
from gapless.step.graphs import PATIENCE, GraphKey, StepGraphs
from gapless.step.logprobs import LogprobLines, LogprobShape
from gapless.step.outbox import Outbox, slot_bytes, table_words
from gapless.step.packet import Packer, PacketShape, max_words
from gapless.step.program import StepKey, StepProgram
from gapless.step.sampler import SampleMode

MAX_CANDIDATES = 1024
"""Top-k values below this sample from the best candidates; above it the whole vocabulary is sorted."""


class Flight(NamedTuple):
    """A step between launch and observe. Times are ns of the device's clock."""

    plan: StepPlan
    outbox: Slot
    started: Fence
    ended: Fence
    home: Fence
    """Behind it the outbox slot holds the step's lines."""
    decode_keys: Int64s
    """Requests of the decode rows."""
    packed_at: int
    launched_at: int
    samples: int
    """Rows that sampled a token."""
    captured: bool
    """It was a replay of a graph."""
    missed: bool
    """It ran eagerly for want of one."""
    logprobs: LogprobShape | None = None
    """What was asked for beside the tokens."""


class _Kind(NamedTuple):
    """What steps of a chain have in common."""

    graph: Graph | None
    key: StepKey | None
    """What runs when there is no graph."""
    wanted: GraphKey | None
    lines: Tensor
    """Where the outbox goes."""
    words: int
    """Of the outbox."""
    samples: int
    logprobs: LogprobShape | None


class Launcher:
    """Owns the packet ring, the outbox ring and their device buffers."""

    def __init__(
        self, device: Device, model: Model, program: StepProgram, packer: Packer, asking: Asking, slots: int, rows: int,
        page_writes: int, tokens: int, buckets: Iterable[int] = (), patience: int = PATIENCE,
        mixed: bool = False, chain: int = 1,
    ) -> None:  # fmt: skip
        """`slots` packets and as many steps may be on their way, and `chain` - 1 steps more."""
        words, nbytes = max_words(rows, page_writes, tokens), slot_bytes(rows, tokens)
        self._device = device
        self._model = model
        self._program = program
        self._packer = packer
        self._asking = asking
        self._packets: Ring = device.ring(slots, 4 * words)
        self._outboxes: Ring = device.ring(slots + chain - 1, nbytes)
        self._words = torch.zeros(words, dtype=torch.int32, device=device.torch_device)
        self._home = self._outboxes.memory.view(torch.int32)
        """Where steps publish that may write host memory; the others write `_lines`, and a copy brings them home."""
        self._lines = self._home
        if not device.maps_host:
            self._lines = torch.zeros_like(self._home, device=device.torch_device)
        outboxes = self._outbox_of(scored=False)
        self.graphs = StepGraphs(device, model, program, self._words, outboxes, buckets, patience, mixed)
        self._graph_key: GraphKey | None = None
        self._graph_of: tuple[Any, ...] = ()
        self._modes: list[SampleMode] = [SampleMode()] * (rows + 1)
        self._decode: tuple[int, ...] = ()
        self._decode_mode = SampleMode()
        self._packet: Slot | None = None
        self._free: deque[Slot] = deque()
        """Outboxes that are kept for the next steps, in ring order."""
        self._kind: _Kind | None = None

    def ready(self, most: int = 1) -> int:
        """For how many steps from one packet the rings have slots, `most` at most; what is found is kept for them."""
        self._packet = self._packet or self._packets.acquire()
        while len(self._free) < most and (slot := self._outboxes.acquire()) is not None:
            self._free.append(slot)
        return 0 if self._packet is None else min(most, len(self._free))

    def launch(self, plan: StepPlan, requests: list[Request]) -> Flight:
        """Enqueue one step. `ready` had one; `requests` belong to the plan's admissions, in order."""
        packet = self._packet
        assert packet is not None
        self._packet = None
        for admission, request in zip(plan.admissions, requests, strict=True):
            self._modes[admission.row] = _mode(request)
            self._asking.admit(admission.row, request)
        asked = self._asking.of(plan)
        mode, samples = self._sampling(plan)
        wanted = self._wanted(plan, asked, mode)
        graph = self.graphs.find(wanted) if wanted else None
        shape = wanted.packet if wanted and graph else self._packer.shape(plan, asked)
        self._packer.write(plan, shape, requests, _words(packet), self._free[0].index)
        if asked is not None:
            asked.write(_words(packet)[: shape.words])
        if wanted and graph and plan.chunks:
            samples = wanted.rows  # null rows lie among them, whose lines nobody takes
        lines = self._outbox_of(scored=asked is not None)
        key = None if graph else self._key(plan, shape, samples, mode)
        words = table_words(samples) + (asked.shape.words if asked else 0)
        self._kind = _Kind(graph, key, wanted, lines, words, samples, asked and asked.shape)
        flight = self._enqueue(plan, self._kind, packet, shape.words)
        self._packets.retire(packet, flight.ended)
        return flight

    def again(self, plan: StepPlan) -> Flight:
        """Enqueue one step more from the packet of the last: each makes it the packet of the next. `ready` had it too.

        The plan differs from that one's by nothing but its number.
        """
        kind = self._kind
        assert kind is not None and not (plan.chunks or plan.admissions or plan.pages)
        if kind.wanted is not None and kind.graph is None:
            self.graphs.find(kind.wanted)  # one more that missed it
        return self._enqueue(plan, kind, None, 0)

    def _enqueue(self, plan: StepPlan, kind: _Kind, packet: Slot | None, words: int) -> Flight:
        """One step, from so many words of a packet or from what the step before left."""
        device, compute = self._device, self._device.compute
        packed_at, outbox = device.clock(), self._free.popleft()
        started = compute.record(timed=True)
        if kind.graph:
            if packet:
                compute.upload(self._words[:words], _flat(packet)[:words])
            kind.graph.launch(compute)
        else:
            reads = (packet,) if packet else ()
            compute.launch(self._run, kind.key, packet, reads=reads, writes=(kind.lines,))
        ended = compute.record(timed=True)
        home = ended if kind.lines is self._home else self._bring_home(outbox, kind.words, ended)
        captured = kind.graph is not None
        missed = kind.wanted is not None and not captured
        return Flight(
            plan, outbox, started, ended, home, self._packer.decode_keys, packed_at, device.clock(), kind.samples,
            captured, missed, kind.logprobs,
        )  # fmt: skip

    def read(self, flight: Flight) -> Outbox:
        """What an observed step says. The views are good until `give_back`."""
        assert flight.home.done()
        return Outbox.of(_words(flight.outbox), flight.samples)

    def read_logprobs(self, flight: Flight) -> LogprobLines:
        """The log-probabilities that an observed step was asked for. Views, as above."""
        assert flight.logprobs is not None
        words = _words(flight.outbox)
        start = table_words(flight.samples)
        return LogprobLines.of(words[start : start + flight.logprobs.words], flight.logprobs)

    def give_back(self, flight: Flight) -> None:
        """The host has read the flight's outbox slot."""
        self._outboxes.retire(flight.outbox, flight.home)

    def _run(self, key: StepKey, packet: Slot | None) -> None:
        if packet is not None:
            count = key.packet.words
            self._device.upload(self._words[:count], _flat(packet)[:count])
        self._program.run(key, self._words, self._outbox_of(key.packet.logprobs.lines > 0))

    def _outbox_of(self, scored: bool) -> Tensor:
        """Where a step publishes. Log-probabilities are written by torch, which keeps device and host apart."""
        mapped = self._device.maps_host or (self._program.kernels.stores_home and not scored)
        return self._home if mapped else self._lines

    def _bring_home(self, outbox: Slot, words: int, ended: Fence) -> Fence:
        stream = self._device.token_out
        stream.after(ended)
        stream.launch(self._copy_home, outbox, words, reads=(self._lines,), writes=(outbox,))
        return stream.record(timed=True)

    def _copy_home(self, outbox: Slot, words: int) -> None:
        self._device.download(_flat(outbox)[:words], self._lines[outbox.index, :words])

    def _wanted(self, plan: StepPlan, asked: Asked | None, mode: SampleMode) -> GraphKey | None:
        """The graph that this step needs, if steps like it have graphs."""
        if asked is not None:
            return None
        if plan.chunks:
            # The last chunk is the one that may stop before its prompt ends.
            if not plan.chunks[-1].last:
                return None
            return self.graphs.mixed_key(len(plan.decode), mode, len(plan.chunks), plan.chunk_tokens, len(plan.pages))
        if len(plan.pages) > len(plan.decode):
            return None
        now = (len(plan.decode), mode, plan.bound)
        if now != self._graph_of:
            self._graph_of, self._graph_key = now, self.graphs.key(*now)
        return self._graph_key

    def _key(self, plan: StepPlan, shape: PacketShape, samples: int, mode: SampleMode) -> StepKey:
        batch = BatchShape(len(plan.decode), tuple((chunk.start, chunk.size) for chunk in plan.chunks), plan.bound)
        return StepKey(batch, shape, samples, mode, self._model.plan(batch))

    def _sampling(self, plan: StepPlan) -> tuple[SampleMode, int]:
        """How the step's rows sample, and how many do."""
        if plan.decode is not self._decode:
            self._decode = plan.decode
            self._decode_mode = _union([self._modes[row] for row in plan.decode])
        mode, samples = self._decode_mode, len(plan.decode)
        sampling = [chunk.row for chunk in plan.chunks if chunk.last]
        if sampling:
            samples += len(sampling)
            mode = _union([mode, *(self._modes[row] for row in sampling)])
        return mode, samples


def _words(slot: Slot) -> Int32s:
    return slot.array.view(np.int32)


def _flat(slot: Slot) -> Tensor:
    return slot.tensor.view(torch.int32)


def _mode(request: Request) -> SampleMode:
    """What one request needs of the sampler."""
    sampling = request.params
    random = sampling.temperature > 0
    filters = random and bool(sampling.top_k or sampling.top_p < 1.0 or sampling.min_p > 0.0)
    few = 0 < sampling.top_k < MAX_CANDIDATES
    # A power of two, so that few programs serve all.
    candidates = 1 << sampling.top_k.bit_length() if filters and few else 0
    return SampleMode(random, filters, candidates, sampling.min_tokens > 0)


def _union(modes: list[SampleMode]) -> SampleMode:
    """One program for all: candidates only when every random row can do with them."""
    random = [mode for mode in modes if mode.random]
    few = random and all(mode.candidates for mode in random)
    return SampleMode(
        random=bool(random),
        filters=any(mode.filters for mode in random),
        candidates=max(mode.candidates for mode in random) if few else 0,
        bans=any(mode.bans for mode in modes),
    )
