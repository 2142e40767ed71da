"""The captured graphs, and the shapes worth capturing. A program without a graph runs eagerly.

`docs/concepts/graphs.md` lists the steps with graphs. Keys of a step's programs are independent: a row with more wishes
adds a lane, and no forward. A step is a miss if some program of it runs eagerly though its kind is meant to be
replayed: a step without chunks, in an engine that captures any, or one whose chunks fit a bucket.
"""

from __future__ import annotations

import itertools
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from math import inf
from operator import ge
from typing import NamedTuple

from gapless.base.progress import Count, announce
from gapless.model.seam import BatchShape
from gapless.pace.draft_gate import ENDING
from gapless.step import lanes
from gapless.step.keys import ForwardKey, ProgramKey, SampleKey
from gapless.step.lane import LaneSizes
from gapless.step.listing import LANE_SIZES
from gapless.step.orders import CaptureOrder
from gapless.step.packet import PacketShape

BUCKETS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
"""[rows] Rows of the graphs by default: at most half of a batch is padding."""
BESIDE_ROWS = (1, 4, 16, 64, 256)
CHUNK_COUNTS = (1, 4, 16, 64)
CHUNK_TOKENS = (32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
"""Decode rows, chunks and prompt tokens of captured steps with chunks. Longer steps keep a GPU busy while they are
launched."""
SHORT_TOKENS = tuple(range(8, 129, 8))
"""[tokens] Prompt tokens of steps with one chunk alone: much padding would cost more than launching."""
STAND_IN_ROWS = (64, 256, 16)
"""[rows] Decode rows of the graphs that serve every step with chunks, in the order of their capture; an engine of more
rows, or of other ones, has graphs of all its rows too. With the chunk tokens of every bucket they pad decode rows and
chunks alone, which costs a step little: so a bucket gets a graph of its own at rest only."""
GOING_ON = (0, 1, 16)
"""Unfinished chunks of a graph, which do not sample. Stand-ins have the most."""
FILLING = 1024
"""[rows and tokens] Most rows and tokens of padding that a larger graph may add to a step's bucket."""
FILLED = 2**-20
"""[share] Share of a miss that a step on a larger graph counts for: at rest, missed programs are captured before."""
MISSES_BEFORE_CAPTURE = 2
"""[misses] Misses of a program before the loop drains the device to capture it. On an H200 a capture takes about as
long as one or two eager steps lose. An engine at rest captures after the first miss."""
MOST_GRAPHS = 384
"""[graphs] Most graphs of an engine, since each takes memory: all shapes of 256 rows if graphs serve every length and
every prompt ends. The least recently used is dropped first."""
COMMON_LANES = (1, 4)
"""[rows] Lane sizes captured at every start; a GPU's captures the larger ones after the stand-ins."""


class MixedSizes(NamedTuple):
    """Padded sizes of steps with chunks."""

    beside: tuple[int, ...]
    """Decode rows, besides none and the largest bucket; empty if such steps have none"""
    chunks: tuple[int, ...]
    tokens: tuple[int, ...]
    stand_ins: tuple[int, ...] = ()
    """Prompt tokens of graphs that serve other buckets too; none if only a step's bucket serves it"""
    filling: int = FILLING
    """Most rows and tokens of padding that such a graph may add"""


ON_GPU = MixedSizes(BESIDE_ROWS, CHUNK_COUNTS, CHUNK_TOKENS, CHUNK_TOKENS)
ALONE = MixedSizes((), (1,), SHORT_TOKENS)


class GraphShapes(NamedTuple):
    """Inputs that determine an engine's graphs."""

    buckets: tuple[int, ...]
    """Rows of decode steps, ascending; none if nothing is captured"""
    mixed: MixedSizes | None
    """Captured steps with chunks; None for none"""
    bounded: bool
    """Whether a graph depends on a bound of KV lengths"""
    page_size: int
    words: int
    """Words of the largest packet"""
    row_writes: int
    """Most page writes of one row in a step, in all page groups"""
    groups: int
    adapters: bool = False
    places: tuple[int, ...] = ()
    """Tokens of a row in decode steps with drafts, ascending; none without drafts"""
    drafted_rows: int = 0
    """Most rows of a step with drafts"""
    processors: int = 0
    """Logits processors that rows may ask for"""


class StepGraphs:
    """The programs with graphs, and the ones due for capture. Nothing is in flight during `capture`."""

    def __init__(self, shapes: GraphShapes, capture: Callable[[CaptureOrder], list[bool]], patience: int) -> None:
        self.buckets = shapes.buckets
        self.shapes = shapes
        most = self.buckets[-1] if self.buckets else 0
        beside = shapes.mixed.beside if shapes.mixed else ()
        self.beside = (0, *(bucket for bucket in beside if bucket < most), most) if beside else (0,)
        drafted = min(most, shapes.drafted_rows) if shapes.places and beside else 0
        self.drafted_beside = (*(bucket for bucket in beside if bucket < drafted), drafted) if drafted else ()
        """Decode rows of steps with chunks and drafts; `beside` are the rows without drafts"""
        self._capture = capture
        self._patience = patience
        self.known: OrderedDict[ProgramKey, bool] = OrderedDict()
        """Program -> whether it has a graph; False: its capture was refused. The least recently used comes first."""
        self.misses: dict[ProgramKey, float] = {}
        self._due: dict[ProgramKey, None] = {}
        self._larger: dict[ForwardKey, ForwardKey | None] = {}
        """Cached answers of `larger`."""
        self._asked: tuple[int, int, int] = (-1, 0, 1)
        self._answer: ForwardKey | None = None
        """Last decode key: most steps need the same one."""
        self.stand_ins = tuple(dict.fromkeys(self._larger_graphs()))
        self._later: list[ProgramKey] = []
        """Likely programs that the start had no time to capture, the next one last"""

    def __len__(self) -> int:
        return sum(self.known.values())

    def decode_key(self, rows: int, bound: int, places: int = 1) -> ForwardKey | None:
        """Return the forward of `rows` decode rows, padded to a bucket, or None if no bucket holds them."""
        asked = rows, bound if self.shapes.bounded else 0, places
        if asked != self._asked:
            bucket = next((bucket for bucket in self.buckets if bucket >= rows), 0)
            self._asked = asked
            bound = asked[1] and self._round(bound)
            self._answer = (
                bucket_key(bucket, bound, row_writes=self.shapes.row_writes, places=places) if bucket else None
            )
        return self._answer

    def mixed_key(
        self, decode: int, chunks: int, tokens: int, places: int = 1, going_on: int = 0
    ) -> ForwardKey | None:  # fmt: skip
        """Return the forward of a step with `tokens` prompt tokens in all, or None if no bucket holds it. The last
        `going_on` chunks do not sample: their prompts are unfinished after the step."""
        mixed = self.shapes.mixed
        if mixed is None or not self.buckets:
            return None
        decoding, most = (
            (self.beside, mixed.chunks) if places == 1 else (self.drafted_beside, (*mixed.chunks[:1], ENDING))
        )
        ending = chunks - going_on
        sizes = ((decoding, decode), ((0, *most), ending), (GOING_ON, going_on), (mixed.tokens, tokens))
        found = [next((bucket for bucket in buckets if bucket >= size), -1) for buckets, size in sizes]
        if min(found) < 0 or chunks > most[-1]:
            return None
        decode, ending, going_on, tokens = found
        return self._chunk_key(decode, ending, going_on, tokens, places)

    def _chunk_key(self, decode: int, ending: int, going_on: int, tokens: int, places: int) -> ForwardKey | None:
        """Return the forward of exactly these counts; None if its packet is too large."""
        pages = self.shapes.groups * -(-tokens // self.shapes.page_size)
        key = bucket_key(decode, 0, ending + going_on, tokens, pages, self.shapes.row_writes, places)
        key = key._replace(samples=key.samples - going_on) if going_on else key
        return key if key.packet.words <= self.shapes.words else None

    def larger(self, key: ForwardKey) -> ForwardKey | None:
        """Return the graph that holds every step of `key` with the least padding, or None if each adds too much."""
        if not (self.shapes.mixed and self.shapes.mixed.stand_ins):
            return None
        if key not in self._larger:
            others = [other for other in self.known if isinstance(other, ForwardKey) and self.has(other)]
            fits = [other for other in others if other.batch.chunks and _holds(other, key)]
            best = min(fits, key=_tokens, default=None)
            self._larger[key] = best if best and _tokens(best) - _tokens(key) <= self.shapes.mixed.filling else None
        return self._larger[key]

    def wish(self, key: ForwardKey) -> None:
        """Count a step that replays a larger graph because this one is missing: it is captured at rest."""
        if key not in self.known:
            self.misses[key] = self.misses.get(key, 0) + FILLED

    def find(self, keys: Iterable[ProgramKey]) -> bool:
        """Return whether all have graphs, and count a miss for each one without."""
        complete = True
        for key in keys:
            captured = self.known.get(key)
            if captured is None:
                self.misses[key] = misses = self.misses.get(key, 0) + 1
                if misses >= self._patience:
                    self._due[key] = None
            else:
                self.known.move_to_end(key)
            complete = complete and bool(captured)
        return complete

    def has(self, key: ProgramKey) -> bool:
        return self.known.get(key, False)

    @property
    def due(self) -> bool:
        """Return whether a graph is due. Then call `capture_due` once nothing is in flight."""
        return bool(self._due)

    def rest(self) -> bool:
        """Make a program due: the one with the most misses, or one that the start had no time to capture. Returns
        whether there is one. Call it at rest."""
        while self._later and self._later[-1] in self.known:
            self._later.pop()
        if max(self.misses.values(), default=0) >= 1 or not self._later:
            key = max(self.misses, key=self.misses.__getitem__, default=None)
        else:
            key = self._later.pop()
        if key is not None:
            self._due[key] = None
            if isinstance(key, ForwardKey) and key.batch.chunks and (sample := _sample(key)) not in self.known:
                self._due[sample] = None
        return self.due

    def capture_due(self) -> int:
        """Capture the due programs; returns the number refused. Nothing is in flight."""
        due, self._due = tuple(self._due), {}
        return self.capture(due)

    def capture(self, keys: tuple[ProgramKey, ...]) -> int:
        """Capture these; returns the number refused. Nothing is in flight."""
        surplus = len(self) + len(keys) - MOST_GRAPHS
        unused = [key for key, captured in self.known.items() if captured and key not in self.stand_ins]
        drop = tuple(unused[: max(0, surplus)])
        for key in drop:
            del self.known[key]
        self._larger.clear()
        made = self._capture(CaptureOrder(keys, drop))
        self.known.update(zip(keys, made, strict=True))
        for key in keys:
            self.misses.pop(key, None)
        return made.count(False)

    def warm(
        self, seconds: float = inf, further: float = inf, clock: Callable[[], float] = time.monotonic
    ) -> int:  # fmt: skip
        """Capture the likely programs, the largest first, whose memory serves the others; then the stand-ins, and the
        lanes of more rows. Returns the number refused.

        Bounded to `seconds` of the `clock`, the smallest come first, as long as time is left for another one like the
        last. The others are captured when they are missed, and so are forwards that depend on a bound of the lengths.
        What `further` seconds leave of the second part is captured at rest; all of it is left to misses if they are 0.
        """
        usual = self._usual()
        others = (*self.stand_ins, *self._wide_lanes()) if further and self.buckets else ()
        count = announce("capturing graphs", len(usual) + len(others))
        refused, _ = self._warm(usual if seconds == inf else usual[::-1], seconds, count, clock)
        more, self._later = self._warm([key for key in others if key not in self.known], further, count, clock)
        return refused + more

    def _warm(
        self, keys: Sequence[ProgramKey], seconds: float, count: Count, clock: Callable[[], float]
    ) -> tuple[int, list[ProgramKey]]:
        """Capture these in order, as long as time is left for another one like the last; return the number refused,
        and the others, the next one last."""
        refused, began = 0, clock()
        before = began
        for number, key in enumerate(keys, 1):
            refused += self.capture((key,))
            count(1)
            last, before = clock() - before, clock()
            if before + last - began > seconds:
                return refused, list(keys[: number - 1 : -1])
        return refused, []

    def likely(self) -> tuple[ProgramKey, ...]:
        return (*self._usual(), *self.stand_ins)

    def _usual(self) -> tuple[ProgramKey, ...]:
        """Return the likely programs without stand-ins, the largest first."""
        if not self.buckets:
            return ()
        rows = self.buckets[::-1]
        forwards = (
            [] if self.shapes.bounded else [bucket_key(count, 0, row_writes=self.shapes.row_writes) for count in rows]
        )
        if self.shapes.adapters:
            forwards += [key.adapted for key in forwards]
        samples = [SampleKey(count, count, False) for count in rows]
        counts = [count for count in rows if count <= self.shapes.drafted_rows]
        drafted = drafted_steps(counts, self.shapes.places, not self.shapes.bounded, self.shapes.row_writes)
        return (*drafted, *forwards, *samples, *self._lanes(counts))

    def _lanes(self, counts: list[int]) -> Iterator[ProgramKey]:
        """Yield the likely programs of lanes; `counts` are the rows of decode steps that may have drafts."""
        sizes, places = tuple([size for size in COMMON_LANES if size <= self.buckets[-1]]), self.shapes.places
        beside = {key.samples for key in self.stand_ins if isinstance(key, ForwardKey) and key.batch.places > 1}
        drafted = [(size, count, places[-1]) for count in beside for size in sizes]
        for count in counts:  # one row never needs a longer list
            drafted += itertools.product(sizes if count > 1 else sizes[:1], (count,), places)
        for lane in reversed(lanes.LANES):
            yield from lane.likely(LaneSizes(sizes, places, tuple(drafted), self.shapes.processors))

    def _wide_lanes(self) -> Iterator[ProgramKey]:
        """Yield the programs of lanes for more rows than the common ones, without drafts."""
        most = self.buckets[-1]
        sizes = [size for size in LANE_SIZES if COMMON_LANES[-1] < size < most]
        for lane in lanes.LANES:
            yield from lane.likely(LaneSizes((*sizes, most), (), (), self.shapes.processors))

    def _larger_graphs(self) -> Iterator[ProgramKey]:
        """Yield the graphs that serve other buckets too, in the order of their use, with their samples."""
        mixed = self.shapes.mixed
        if mixed is None or not self.buckets:
            return
        most = self.buckets[-1]
        rows = [count for count in STAND_IN_ROWS if count < most]
        rows.insert(sum(count >= STAND_IN_ROWS[0] for count in rows), most)  # less padding is worth less than a graph
        chunks = min(most, mixed.chunks[-1])
        sizes = [(count, chunks, 1) for count in rows]
        if self.drafted_beside:
            sizes.insert(1, (self.drafted_beside[-1], min(chunks, ENDING), self.shapes.places[-1]))
        for (decode, chunks, each), tokens in itertools.product(sizes, mixed.stand_ins):
            key = self.mixed_key(decode, chunks, tokens, each)
            key = key and self._chunk_key(key.batch.decode // each, key.packet.chunks, GOING_ON[-1], tokens, each)
            if key is not None:
                yield _sample(key)
                yield key
                if self.shapes.adapters:
                    yield key.adapted

    def _round(self, bound: int) -> int:
        """Round the bound up to a power of two of pages, so that few graphs serve all lengths."""
        pages = max(1, -(-bound // self.shapes.page_size))
        return (1 << (pages - 1).bit_length()) * self.shapes.page_size


@cache
def bucket_key(
    decode: int, bound: int, chunks: int = 0, tokens: int = 0, pages: int = 0, row_writes: int = 1, places: int = 1
) -> ForwardKey:
    """Return the key of a forward padded to these counts; `pages` are page writes beyond `row_writes` of each row.

    Every row may begin pages in a step, and every chunk may belong to a new row. All rows sample; null rows have no
    effect. The first chunk may have all the tokens.
    """
    rows = decode + chunks
    shape = ((0, tokens), *[(0, 0)] * (chunks - 1)) if chunks else ()
    packet = PacketShape(rows, rows * row_writes + pages, chunks, chunks, tokens)
    return ForwardKey(BatchShape(decode * places, shape, bound, places), packet, rows)


def drafted_steps(
    counts: Iterable[int], places: tuple[int, ...], forwards: bool = True, row_writes: int = 1
) -> Iterator[ProgramKey]:
    """Yield the programs of decode steps with these row counts, for each number of drafts under trial: no trial may
    make rows wait for a graph or a kernel. `forwards`: include the forwards."""
    for count in counts if places else ():
        for size in places[::-1]:
            if forwards:
                yield bucket_key(count, 0, row_writes=row_writes, places=size)
            yield SampleKey(count, count, False, size, drafts=True)
        yield SampleKey(count, count, False, drafts=True)


def _sample(key: ForwardKey) -> SampleKey:
    return SampleKey(key.packet.rows, key.samples, True, key.batch.places, drafts=key.batch.places > 1)


def _holds(larger: ForwardKey, key: ForwardKey) -> bool:
    """Return whether every step of `key` fits into `larger`."""
    alike = larger.adapters == key.adapters and larger.batch.places == key.batch.places
    return alike and all(map(ge, _capacity(larger), _capacity(key)))


def _capacity(key: ForwardKey) -> tuple[int, ...]:
    """Return the capacities of a forward; sampling and other chunks count separately."""
    going_on = key.packet.rows - key.samples
    return *key.packet, key.batch.decode, going_on, key.packet.chunks - going_on


def _tokens(key: ForwardKey) -> int:
    """Return the rows of tokens of its products, null rows included."""
    return key.batch.decode + key.packet.chunk_tokens


def buckets_up_to(rows: int) -> tuple[int, ...]:
    """Return the buckets of an engine of `rows` rows; the last one holds all of them."""
    return (*(bucket for bucket in BUCKETS if bucket < rows), rows)
