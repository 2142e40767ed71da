"""Captured steps: a graph for each bucket of shapes and way to sample. A step without one runs eagerly.

The batch is filled up to its bucket with null rows, which are inert. Steps with chunks are captured where launching
costs more than filling up, that is on a GPU, and when all chunks end their prompts, since every row then samples.
Steps with log-probabilities are as wide as they are, and have no graph; nor have those that exceed every bucket.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor

from gapless.base.errors import CaptureError
from gapless.device import Device, Graph
from gapless.kernels.layout import HEADER_WORDS
from gapless.model.seam import BatchShape, Model
from gapless.step.packet import PacketShape
from gapless.step.program import StepKey, StepProgram
from gapless.step.sampler import SampleMode

BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""Rows of the graphs, unless told otherwise: never more than half of a batch is filled up."""
COMMON = SampleMode(random=True)
"""The way to sample that is captured at start; others are captured when they are missed."""
BESIDE = (1, 4, 16, 64, 256)
CHUNKS = (1, 4, 16)
TOKENS = (32, 64, 128, 256, 512, 1024)
"""Decode rows, chunks and prompt tokens of steps with chunks. Longer ones keep a GPU busy while they are launched."""
PATIENCE = 16
"""Steps that miss a graph before the loop lets the device run dry to capture it: that costs about as much."""
MOST = 512
"""Graphs of an engine. Each takes memory and a pause, and clients choose how many kinds there are."""


class GraphKey(NamedTuple):
    """What a graph is for: upper bounds of all counts."""

    decode: int
    mode: SampleMode
    bound: int
    """Upper bound of the KV lengths of decode rows; 0 where the kernels need none."""
    chunks: int = 0
    tokens: int = 0
    """Of all chunks."""
    pages: int = 0
    """Page writes beyond one a row."""

    @property
    def rows(self) -> int:
        """All of them sample, null rows to no effect."""
        return self.decode + self.chunks

    @property
    def packet(self) -> PacketShape:
        """Every row may begin a page in a step, and every chunk may be a new row's."""
        return PacketShape(self.rows, self.rows + self.pages, self.chunks, self.chunks, self.tokens)

    def step(self, model: Model) -> StepKey:
        """The step that is captured: the first chunk stands for one that has all the tokens."""
        chunks = ((0, self.tokens), *[(0, 0)] * (self.chunks - 1)) if self.chunks else ()
        batch = BatchShape(self.decode, chunks, self.bound)
        return StepKey(batch, self.packet, self.rows, self.mode, model.plan(batch))


class StepGraphs:
    """The graphs of one engine. With `buckets` empty, or on a device that captures nothing, there are none."""

    def __init__(
        self, device: Device, model: Model, program: StepProgram, words: Tensor, outboxes: Tensor,
        buckets: Iterable[int], patience: int = PATIENCE, mixed: bool = False,
    ) -> None:  # fmt: skip
        self.buckets = tuple(sorted(set(buckets))) if device.captures else ()
        most = self.buckets[-1] if self.buckets else 0
        self._beside = (0, *(bucket for bucket in BESIDE if bucket < most), most)
        self._mixed = mixed and program.kernels.begin_mixed is not None and not model.bounded
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
        return GraphKey(bucket, self._wide(mode), self._round(bound) if self._model.bounded else 0) if bucket else None

    def mixed_key(self, decode: int, mode: SampleMode, chunks: int, tokens: int, pages: int) -> GraphKey | None:
        """The same for a step with chunks, all of which sample, of so many tokens together and page writes."""
        if not self._mixed or not self.buckets:
            return None
        sizes = ((self._beside, decode), (CHUNKS, chunks), (TOKENS, tokens))
        found = [next((bucket for bucket in buckets if bucket >= size), -1) for buckets, size in sizes]
        if min(found) < 0:
            return None
        key = GraphKey(found[0], self._wide(mode), 0, found[1], found[2], -(-found[2] // self._program.cache.page_size))
        fits = pages <= key.packet.page_writes and key.packet.words <= self._words.shape[0]
        return key if fits else None

    def find(self, key: GraphKey) -> Graph | None:
        """The graph, if it is there; a miss is noted."""
        graph = self._graphs.get(key)
        if graph is None and key not in self._graphs:
            self._misses[key] = misses = self._misses.get(key, 0) + 1
            if misses >= self._patience and len(self._graphs) < MOST:
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
        self._device.run(_make_inert, self._words, key)
        try:
            self._graphs[key] = self._device.capture(key, self._program.run, (step, self._words, self._outboxes))
        except CaptureError as error:
            self._graphs[key] = None
            warnings.warn(f"steps of {key.rows} rows run eagerly: {error}", RuntimeWarning, stacklevel=2)

    def warm(self) -> None:
        """Capture every bucket for the common way to sample; the largest first, whose memory serves the others.

        Where graphs depend on a bound of the lengths, they are left to come when they are missed.
        """
        if self._model.bounded:
            return
        for rows in reversed(self.buckets):
            self.capture(GraphKey(rows, COMMON, 0))

    def _wide(self, mode: SampleMode) -> SampleMode:
        """A way to sample that serves this one too: fused samplers draw for rows with a temperature alone, so greedy
        ones cost next to nothing there. torch's would draw for all."""
        return mode if self._model.bounded or mode.bans else mode._replace(random=True)

    def _round(self, bound: int) -> int:
        """Few bounds, so that few graphs serve all lengths: whole pages, a power of two of them."""
        size = self._program.cache.page_size
        pages = max(1, -(-bound // size))
        return (1 << (pages - 1).bit_length()) * size


def _make_inert(words: Tensor, key: GraphKey) -> None:
    """A packet of null rows alone, which changes nothing."""
    words.zero_()
    if key.chunks:
        # One token each, and one for the first chunk, as in every step: the row before it may not be there to end at.
        sizes = words[HEADER_WORDS + key.rows :]
        sizes[: key.decode + 1].fill_(1)


def buckets_up_to(rows: int) -> tuple[int, ...]:
    """The buckets of an engine of so many rows; the last one holds all of them."""
    return (*(bucket for bucket in BUCKETS if bucket < rows), rows)
