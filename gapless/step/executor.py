"""Runs steps: from a packet's bytes and a key to programs on the compute stream. It decides nothing.

One device has one executor. With several devices each has its own, and all follow the same orders: their rings and
tables stay alike.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from gapless.base import observe
from gapless.base.errors import DeviceError
from gapless.base.records import Int32s
from gapless.device import Device, Fence, Graph, Ring, RingSlot
from gapless.kernels.layout import HEADER_WORDS, score_words
from gapless.step.keys import ForwardKey, ProgramKey, StepKey
from gapless.step.lane import Buffers
from gapless.step.logprobs import LogprobLines, LogprobShape
from gapless.step.mail import new_mail
from gapless.step.orders import CaptureOrder, Order
from gapless.step.outbox import Outbox
from gapless.step.program import StepProgram

log = logging.getLogger("gapless.step")

LAUNCHES_A_LAYER = 12
LAUNCHES_A_STEP = 60
"""Launches of an eager step, roughly: for each layer, and for the rest."""


class SentLayout(NamedTuple):
    """Places of what the host sends: fill of new rows, lists of the lanes, packet."""

    lists: int
    """First word of the lists"""
    size: int
    """Words of a list"""
    packet: int
    """First word of the packet"""


class Run(NamedTuple):
    """One step in flight. Times are ns of the device's clock."""

    outbox: RingSlot
    started: Fence
    ended: Fence
    on_host: Fence
    """Passed when the outbox slot on the host holds the step's lines."""
    launched_at: int


class _Steps(NamedTuple):
    """Shared state of steps with one key."""

    key: StepKey
    first: int
    last: int
    """Words of the packet."""
    programs: tuple[Callable[[], None], ...]
    copied: tuple[int, int]
    """Words of the outbox to copy; none if the device writes to the host."""
    eager: bool
    """Whether some program runs eagerly, other than one that only writes page tables."""
    uploads: dict[int, tuple[Tensor, Tensor]]
    """Destination and source of the upload, by packet slot"""


class Executor:
    """Owns the packet ring, the outbox ring, the buffers of the programs, and their graphs."""

    def __init__(self, device: Device, program: StepProgram, words: int, slots: int, outboxes: int, fill: int) -> None:
        """Packets have `words` words, and up to `fill` before them. At most `slots` packets and `outboxes` outboxes are
        in use at once."""
        rows, at = program.outbox.rows, device.torch_device
        vocab = program.model.vocab_size if program.samples_here else 0  # logits, and mail: for sampling
        self.device = device
        self.program = program
        counts = [lane.lists for lane in program.lanes]
        # Multiples of 64 bytes keep the next part aligned for copies and kernels.
        first, size = _aligned(fill), _aligned(rows * program.width)
        self.layout = layout = SentLayout(first, size, first + sum(counts) * size)
        self.packets: Ring = device.ring(slots, 4 * (layout.packet + words))
        self.outboxes: Ring = device.ring(outboxes, 4 * program.outbox.words)
        sent = torch.zeros(layout.packet + words, dtype=torch.int32, device=at)
        lists = iter(torch.split(sent[layout.lists : layout.packet], layout.size))
        self.host_lines = host = self.outboxes.memory.view(torch.int32)
        """The outboxes on the host, int32 [slots, words]."""
        own = host if device.caps.maps_host else torch.zeros_like(host, device=at)
        records, places, _ = program.tables.masks.shape if vocab else (1, 1, 0)
        stores_on_host = program.kernels.stores_on_host
        self.buffers = Buffers(
            sent, sent[layout.packet :], sent[:first], tuple([tuple(islice(lists, count)) for count in counts]),
            logits=torch.zeros(program.samples, vocab, dtype=program.model.dtype, device=at),
            tokens=torch.zeros(rows, program.width, dtype=torch.int32, device=at),
            lines=host if stores_on_host else own, scores=own,
            mail=new_mail(device, records, vocab, places, stores_on_host or not device.caps.own_memory),
        )  # fmt: skip
        self.graphs: dict[ProgramKey, Graph] = {}
        self._refused = False
        """Whether a capture has failed before."""
        self._steps: _Steps | None = None
        self._read: dict[int, Outbox] = {}
        """The last step of each outbox slot; a next step of the same shape uses its views."""
        self._packet: RingSlot | None = None
        self._free: deque[RingSlot] = deque()
        """Outboxes kept for the next steps, in ring order."""
        queue, launches = device.caps.launch_queue, LAUNCHES_A_LAYER * program.cache.data.shape[1] + LAUNCHES_A_STEP
        self._eager: deque[Fence] = deque(maxlen=max(1, queue // launches) if queue else None)
        """Ends of the eager steps in flight, which fill the launch queue, if it is bounded"""
        observe.built(self)

    # Before a step.

    def ready(self, most: int = 1) -> int:
        """Return the number of steps from one packet that the rings have slots for, up to `most`, and keep the
        slots."""
        self._packet = self._packet or self.packets.acquire()
        while len(self._free) < most and (slot := self.outboxes.acquire()) is not None:
            self._free.append(slot)
        return 0 if self._packet is None else min(most, len(self._free))

    @property
    def crowded(self) -> bool:
        """Return whether another eager step might block in the driver on a full launch queue."""
        while self._eager and self._eager[0].done():
            self._eager.popleft()
        return len(self._eager) == self._eager.maxlen

    @property
    def packet(self) -> Int32s:
        """Words of the next packet from its header on. Call `ready` first."""
        assert self._packet is not None
        return _words(self._packet)[self.layout.packet :]

    @property
    def outbox(self) -> int:
        """Outbox slot of the next step, or of the one that is enqueued."""
        return self._free[0].index

    def lists(self, lists: Sequence[tuple[int, Int32s]]) -> None:
        """Write lists of the lanes into the next packet, by their numbers."""
        assert self._packet is not None
        words, (first, size, _) = _words(self._packet), self.layout
        for number, values in lists:
            words[first + number * size :][: len(values)] = values

    def fill(self, parts: Sequence[Int32s]) -> None:
        """Write the fill of new rows before the next packet."""
        assert self._packet is not None
        first = self.buffers.loads.numel()
        np.concatenate(parts, out=_words(self._packet)[first - sum(map(len, parts)) : first])

    # A step.

    def order(self, key: StepKey) -> Order:
        """Return the order for other executors to run the packed step."""
        assert self._packet is not None
        first, last = self._travels_from(key), self.layout.packet + key.forward.packet.words
        return Order(key, _words(self._packet)[first:last].tobytes())

    def launch(self, key: StepKey, fresh: bool) -> Run:
        """Enqueue one step, from the next packet or from the one that the last step left. Call `ready` first."""
        device, compute = self.device, self.device.compute
        steps = self._resolve(key)
        started = compute.record(timed=True)
        packet = self._packet if fresh else None
        if packet is not None:
            self._packet = None
            self._upload(packet, steps)
        self.enqueue(steps)
        outbox = self._free.popleft()
        ended = compute.record(timed=True)
        if packet is not None:
            self.packets.retire(packet, ended)
        on_host = ended if steps.copied[0] == steps.copied[1] else self.download_lines(outbox, *steps.copied, ended)
        if steps.eager and self._eager.maxlen:
            self._eager.append(ended)
        return Run(outbox, started, ended, on_host, device.clock())

    def obey(self, order: Order) -> Fence:
        """Run the leader's step, and return its end. Call `ready` first. The outbox is released unread."""
        if order.words is not None:
            steps = self._resolve(order.key)
            assert self._packet is not None
            _words(self._packet)[steps.first : steps.last] = np.frombuffer(order.words, np.int32)
        with nullcontext() if observe.steps is None else observe.steps.launches(self):
            run = self.launch(order.key, order.words is not None)
        self.release(run.outbox, run.on_host)
        return run.ended

    def _resolve(self, key: StepKey) -> _Steps:
        if self._steps is not None and self._steps.key is key:
            return self._steps
        last, first = self.layout.packet + key.forward.packet.words, self._travels_from(key)
        keys = self.program.own(key)
        eager = any(one not in self.graphs for one in keys if one is not key.load or key.load.loads)
        self._steps = _Steps(key, first, last, tuple(map(self._launching, keys)), self._copied_words(key), eager, {})
        return self._steps

    def _travels_from(self, key: StepKey) -> int:
        """Return the first sent word."""
        if key.load is not None:
            return self.buffers.loads.numel() - key.load.words
        return self.layout.packet - key.lists * self.layout.size

    def _launching(self, key: ProgramKey) -> Callable[[], None]:
        """Return the function that enqueues one program."""
        compute, graph = self.device.compute, self.graphs.get(key)
        if graph is not None:
            return lambda: graph.launch(compute, () if observe.watcher is None else self._written())
        program = self.program.of(key)
        if observe.steps is not None:
            program = observe.steps.runs(self, key, program)
        return lambda: compute.launch(program, key, self.buffers)

    def _written(self) -> list[Tensor]:
        """Return what the launched step writes of the outboxes on the device, which it counts modulo their number."""
        return [lines[self.outbox % len(lines)] for lines in (self.buffers.lines, self.buffers.scores)]

    def _copied_words(self, key: StepKey) -> tuple[int, int]:
        """Return the range of outbox words to copy to the host."""
        if not self.program.samples_here:
            return 0, 0  # it has no reader
        shape, stored = self.program.outbox, self.buffers.lines is self.host_lines
        start, end = 0, (1 + key.forward.samples) * shape.line
        if stored:
            start = end = shape.prompts
        elif key.scores:
            end = shape.scores + key.scores
        prompts = key.forward.packet.prompts
        if prompts and self.buffers.scores is not self.host_lines:
            end = shape.prompts + prompts * score_words(key.forward.width)
        return start, end

    def _upload(self, packet: RingSlot, steps: _Steps) -> None:
        if packet.index not in steps.uploads:
            words = packet.tensor.view(torch.int32)
            steps.uploads[packet.index] = self.buffers.sent[steps.first : steps.last], words[steps.first : steps.last]
        self.device.compute.upload(*steps.uploads[packet.index])

    def enqueue(self, steps: _Steps) -> None:
        for launch in steps.programs:
            launch()

    def download_lines(self, outbox: RingSlot, start: int, end: int, ended: Fence) -> Fence:
        stream = self.device.token_out
        stream.after(ended)
        copy_lines = self.copy_lines if observe.steps is None else observe.steps.runs(self, None, self.copy_lines)
        stream.launch(copy_lines, outbox, start, end, reads=(self.buffers.scores,), writes=(outbox,))
        return stream.record(timed=True)

    def copy_lines(self, outbox: RingSlot, start: int, end: int) -> None:
        self.device.download(self.host_lines[outbox.index, start:end], self.buffers.scores[outbox.index, start:end])

    # After a step.

    def read(self, outbox: RingSlot, samples: int) -> Outbox:
        """Return the outbox of an observed step, as views that are valid until `release`."""
        words, shape, last = _words(outbox), self.program.outbox, self._read.get(outbox.index)
        alike = last is not None and len(last.rows) == samples
        found = shape.read_again(words, last) if last and alike else shape.read(words, samples)
        self._read[outbox.index] = found
        return found

    def read_scores(self, outbox: RingSlot, shape: LogprobShape) -> LogprobLines:
        """Return the log-probabilities of an observed step."""
        return self.program.outbox.read_scores(_words(outbox), shape)

    def release(self, outbox: RingSlot, on_host: Fence) -> None:
        """Release the slot after the host has read it."""
        self.outboxes.retire(outbox, on_host)

    def slots_in_use(self) -> dict[str, list[int]]:
        """Return the slots of each ring in use by steps, without the ones kept for the next steps."""
        kept = {"packet": [self._packet] if self._packet else [], "outbox": self._free}
        return {name: ring.in_use(kept[name]) for name, ring in (("packet", self.packets), ("outbox", self.outboxes))}

    # Before the first step.

    def compile(self, keys: Sequence[ProgramKey]) -> None:
        """Compile the kernels of these programs ahead, if they need it. Nothing is in flight."""
        ahead = self.program.kernels.ahead
        if ahead is not None:
            self.device.run(self._compile, ahead, keys)

    def peak(self, keys: Iterable[ProgramKey]) -> int:
        """Return the most bytes that one of these programs takes of the device at once, by running them on null rows.
        Nothing is in flight."""
        return max([self._peak(key) for key in keys])

    def _peak(self, key: ProgramKey) -> int:
        self.device.run(_make_inert, self.buffers.sent, self.buffers.words, key)
        if isinstance(key, ForwardKey) and key.packet.chunks:
            size = HEADER_WORDS + 2 * key.packet.rows - key.packet.chunks
            self.device.run(_fill, self.buffers.words[size : size + 1], key.packet.chunk_tokens)
        return self.device.peak(self._compile, nullcontext, (key,))

    def _compile(self, ahead: Callable[[], AbstractContextManager[None]], keys: Sequence[ProgramKey]) -> None:
        program = copy(self.program)
        program.model = program.model.first_layers()  # the others launch the same
        program.head = program.head and program.head.beside(program.model)
        with ahead(), self.program.group.muted():
            for key in keys:
                program.of(key)(key, self.buffers)

    # Graphs.

    def capture(self, order: CaptureOrder) -> list[bool]:
        """Drop graphs and capture others; return which were captured. Nothing is in flight.

        A capture runs its program, on null rows.
        """
        self._steps = None
        for key in order.drop:
            self.graphs.pop(key, None)
        with self.program.group.muted():
            return [self._captured(key) for key in order.capture]

    def _captured(self, key: ProgramKey) -> bool:
        self.device.run(_make_inert, self.buffers.sent, self.buffers.words, key)
        try:
            self.graphs[key] = self.device.capture(key, self.program.of(key), (key, self.buffers))
        except DeviceError:
            raise
        except Exception as error:
            # Clients choose the shapes to capture: no refused capture may end the engine.
            if not self._refused:
                log.warning("a step's program runs eagerly; further refusals are only counted", exc_info=error)
            self._refused = True
            return False
        return True


def _make_inert(sent: Tensor, words: Tensor, key: ProgramKey) -> None:
    """Fill the packet with null rows alone, which change nothing."""
    sent.zero_()
    if isinstance(key, ForwardKey) and key.batch.chunks:
        # Each decode row and the first chunk have one token: an empty chunk needs a token before it.
        rows, chunks = key.packet.rows, key.packet.chunks
        words[HEADER_WORDS + rows :][: rows - chunks + 1].fill_(1)


def _aligned(words: int) -> int:
    return -(-words // 16) * 16


def _words(slot: RingSlot) -> Int32s:
    return slot.array.view(np.int32)


def _fill(words: Tensor, value: int) -> None:
    words.fill_(value)
