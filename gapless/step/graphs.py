"""Captured steps: a graph for each bucket of decode rows and way to sample. A step without one runs eagerly.

The batch is filled up to its bucket with null rows, which are inert. Chunks, admissions and log-probabilities are as
many as they are, so steps that hold them have no graph.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from gapless.base.errors import CaptureError
from gapless.device import Device, Graph
from gapless.model.seam import BatchShape, Model
from gapless.step.packet import PacketShape
from gapless.step.program import StepKey, StepProgram
from gapless.step.sampler import SampleMode

BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Rows of the graphs, unless told otherwise: never more than half of a batch is filled up."""
COMMON = (SampleMode(random=True), SampleMode())
"""Ways to sample that are captured at start; the others when they are missed."""
PATIENCE = 16
"""Steps that miss a graph before the loop lets the device run dry to capture it: that costs about as much."""


class GraphKey(NamedTuple):
    """What a graph of decode rows is for."""

    rows: int
    mode: SampleMode
    bound: int
    """Upper bound of the KV lengths; 0 where the kernels need none."""

    @property
    def packet(self) -> PacketShape:
        """Every row may begin a page in a step."""
        return PacketShape(self.rows, self.rows, 0, 0, 0)

    def step(self, model: Model) -> StepKey:
        """The step that is captured."""
        batch = BatchShape(self.rows, (), self.bound)
        return StepKey(batch, self.packet, self.rows, self.mode, model.plan(batch))


class StepGraphs:
    """The graphs of one engine. With `buckets` empty, or on a device that captures nothing, there are none."""

    def __init__(
        self, device: Device, model: Model, program: StepProgram, words: Tensor, outboxes: Tensor,
        buckets: Iterable[int], patience: int = PATIENCE,
    ) -> None:  # fmt: skip
        self.buckets = tuple(sorted(set(buckets))) if device.captures else ()
        self._device = device
        self._model = model
        self._program = program
        self._words = words
        self._outboxes = outboxes
        self._patience = patience
        self._graphs: dict[GraphKey, Graph | None] = {}
        """None: it was tried and refused."""
        self._misses: dict[GraphKey, int] = {}
        self._due: GraphKey | None = None

    def __len__(self) -> int:
        return sum(graph is not None for graph in self._graphs.values())

    def key(self, rows: int, mode: SampleMode, bound: int) -> GraphKey | None:
        """The graph that a step of so many decode rows needs; None when there is no bucket for it."""
        bucket = next((bucket for bucket in self.buckets if bucket >= rows), 0)
        return GraphKey(bucket, mode, self._round(bound) if self._model.bounded else 0) if bucket else None

    def find(self, key: GraphKey) -> Graph | None:
        """The graph, if it is there; a miss is noted."""
        graph = self._graphs.get(key)
        if graph is None and key not in self._graphs:
            self._misses[key] = misses = self._misses.get(key, 0) + 1
            if misses >= self._patience:
                self._due = key
        return graph

    @property
    def due(self) -> bool:
        """Whether a graph has been missed often enough: `capture_due` is to be called when nothing is in flight."""
        return self._due is not None

    def capture_due(self) -> None:
        """Capture it. Nothing is in flight."""
        assert self._due is not None
        key, self._due = self._due, None
        self.capture(key)

    def capture(self, key: GraphKey) -> None:
        """Capture this graph. Nothing is in flight: the step that runs on the way holds null rows alone."""
        step = key.step(self._model)
        self._device.run(_clear, self._words)
        try:
            self._graphs[key] = self._device.capture(key, self._program.run, (step, self._words, self._outboxes))
        except CaptureError as error:
            self._graphs[key] = None
            warnings.warn(f"steps of {key.rows} rows run eagerly: {error}", RuntimeWarning, stacklevel=2)

    def warm(self) -> None:
        """Capture every bucket for the common ways to sample; the largest first, whose memory serves the others.

        Where graphs depend on a bound of the lengths, they are left to come when they are missed.
        """
        if self._model.bounded:
            return
        for rows in reversed(self.buckets):
            for mode in COMMON:
                self.capture(GraphKey(rows, mode, 0))

    def _round(self, bound: int) -> int:
        """Few bounds, so that few graphs serve all lengths: whole pages, a power of two of them."""
        size = self._program.cache.page_size
        pages = max(1, -(-bound // size))
        return (1 << (pages - 1).bit_length()) * size


def _clear(words: Tensor) -> None:
    words.zero_()


def buckets_up_to(rows: int, asked: Iterable[int] = ()) -> tuple[int, ...]:
    """The buckets of an engine of so many rows; the last one holds all of them."""
    return (*(bucket for bucket in asked or BUCKETS if bucket < rows), rows)
