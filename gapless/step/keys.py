"""Keys of a step's programs: the host integers that fix their shapes. A graph is captured for one of them.

Keys of different programs have different lengths or field types, so that no two are equal. Lanes have keys of their
own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple, Protocol

from gapless.model.seam import BatchShape
from gapless.step.packet import PacketShape


class Load(NamedTuple):
    """Fill of one row."""

    row: int
    slots: tuple[tuple[str, int, int], ...]
    """Lane, slot, and words of the row's wishes, of each slot that it leases for a lane"""
    past: int
    """Tokens of its history outside its chunks; none if nothing reads them"""


class LoadKey(NamedTuple):
    """Fills slots, histories and page tables of new rows. It has no graph: such rows are few, and come with chunks."""

    loads: tuple[Load, ...]
    words: int
    """Words in the packet"""
    pages: int = 0
    """Page table entries beyond the room of a captured step's packet, last: a row may find any number of pages"""


class SampleKey(NamedTuple):
    """Samples and ends the step."""

    rows: int
    """Rows of the batch."""
    samples: int
    """Leading rows that sample."""
    sized: bool
    """Whether the packet has the query token count of each row."""
    places: int = 1
    """Sampling tokens of each row: the last one and its drafts."""
    drafts: bool = False
    """Whether rows get drafts for the next step"""

    @property
    def drafted(self) -> int:
        """Rows that sample, if they have drafts; else 0."""
        return self.samples if self.places > 1 else 0


class ForwardKey(NamedTuple):
    """Computes logits from the packet."""

    batch: BatchShape
    packet: PacketShape
    samples: int
    """Leading rows that get logits."""
    width: int = 0
    """Number of most likely tokens for each scored prompt token."""
    adapters: bool = False
    """Whether some row has an adapter"""

    @property
    def kind(self) -> tuple[object, ...]:
        """Traits that choose the code of its program, whatever the sizes: a device may check each kind once."""
        return ForwardKey, bool(self.batch.chunks), self.batch.places > 1, self.adapters

    @property
    def adapted(self) -> ForwardKey:
        """Key of the same batch with an adapter on some row."""
        return _adapted(self)


@cache
def _adapted(key: ForwardKey) -> ForwardKey:
    return key._replace(adapters=True)  # one object: steps compare keys by identity


class LaneKey(Protocol):
    """The key of a lane's program, a named tuple."""

    @property
    def run(self) -> Callable[..., None]:
        """The program: (device state, buffers, each of the lane's lists)."""
        ...

    def __hash__(self) -> int: ...


ProgramKey = LoadKey | SampleKey | ForwardKey | LaneKey


class StepKey(NamedTuple):
    """The programs of a step."""

    forward: ForwardKey
    sample: SampleKey
    before: tuple[LaneKey, ...] = ()
    """Programs of lanes before sampling, in order"""
    after: tuple[LaneKey, ...] = ()
    lists: int = 0
    """Lists of lanes that travel, the last ones before the packet"""
    scores: int = 0
    """Words of scores of sampled tokens in the outbox"""
    load: LoadKey | None = None

    def programs(self) -> tuple[ProgramKey, ...]:
        """Return the step's programs, in order."""
        load = () if self.load is None else (self.load,)
        return (*load, self.forward, *self.before, self.sample, *self.after)
