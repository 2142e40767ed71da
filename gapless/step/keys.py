"""Keys of a step's programs: the host integers that fix their shapes. A graph is captured for one of them.

Keys of different programs have different lengths or fields of different types, so that no two are equal. `rows` of a
lane's program is the length of its padded list, and `filters` are those that any row there has.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from gapless.kernels.views import Filters
from gapless.model.seam import BatchShape
from gapless.step.packet import PacketShape


class Load(NamedTuple):
    """What one slot is filled with."""

    row: int
    slot: int
    wishes: int
    """Words of what the row asks for; none without a slot"""
    past: int
    """Tokens of its history that its chunks do not bring"""


class LoadKey(NamedTuple):
    """Fills slots of new rows, their histories and page tables. It has no graph: such rows are few, and come with
    chunks."""

    loads: tuple[Load, ...]
    words: int
    """Words of all in the packet"""
    pages: int = 0
    """Page table entries, which come last: those that the packet of a captured step has no room for, since a row may
    find any number of pages"""


class AdjustKey(NamedTuple):
    """Adjusts logits of rows, and finds where their filters end."""

    rows: int
    filters: Filters | None
    """The filters that any listed row has; None where none has"""
    batch: int = 0
    """Rows of the batch, if they have drafts"""
    places: int = 1
    """Logits of each row"""
    processors: tuple[int, ...] = ()
    """The logits processors that some listed row asks for, ascending"""


class MaskKey(NamedTuple):
    """Fetches the masks of rows."""

    rows: int
    drafted: tuple[int, int] = (0, 1)
    """Rows of the batch, if they have drafts, and logits of each row"""


class ReplyKey(NamedTuple):
    """Tells those who make masks what was sampled."""

    rows: int
    """Length of the padded list, which is that of the masked rows."""
    drafts: int | None = None
    """Drafts that a reply holds, at most; None where no row gets drafts"""


class CutKey(NamedTuple):
    """Finds where the filters of rows end."""

    rows: int
    filters: Filters
    batch: int = 0
    """Rows of the batch, if they have drafts: the list has each place of a row then."""


class ScoreKey(NamedTuple):
    """Scores sampled tokens."""

    rows: int
    width: int
    """Number of most likely tokens beside each."""
    batch: int = 0


class SampleKey(NamedTuple):
    """Samples and ends the step."""

    rows: int
    """Rows of the batch."""
    samples: int
    """Number of leading rows that sample."""
    sized: bool
    """Whether the packet says how many query tokens each row has."""
    places: int = 1
    """Tokens of each row that sample: its last one, and its drafts."""
    drafts: bool = False
    """Whether rows get drafts for the next step"""


class ForwardKey(NamedTuple):
    """Computes logits from the packet."""

    batch: BatchShape
    packet: PacketShape
    samples: int
    """Number of leading rows that get logits."""
    width: int = 0
    """Number of most likely tokens beside each scored prompt token."""
    adapters: bool = False
    """Whether some row has an adapter"""

    @property
    def adapted(self) -> ForwardKey:
        """The key of the same batch where some row has an adapter."""
        return _adapted(self)


@cache
def _adapted(key: ForwardKey) -> ForwardKey:
    return key._replace(adapters=True)  # one object: steps compare keys by identity


ProgramKey = LoadKey | MaskKey | AdjustKey | ReplyKey | CutKey | ScoreKey | SampleKey | ForwardKey


class StepKey(NamedTuple):
    """The programs of a step."""

    forward: ForwardKey
    cut: CutKey | None
    sample: SampleKey
    score: ScoreKey | None
    adjust: AdjustKey | None = None
    mask: MaskKey | None = None
    load: LoadKey | None = None

    @property
    def reply(self) -> ReplyKey | None:
        if self.mask is None:
            return None
        # Drafts after a step without are seldom verified, and their masks cost more than one.
        return ReplyKey(self.mask.rows, self.sample.places - 1 if self.sample.drafts else None)

    def programs(self) -> tuple[ProgramKey, ...]:
        """Return the programs that the step has, in their order."""
        keys = self.load, self.forward, self.mask, self.adjust, self.cut, self.sample, self.reply, self.score
        return tuple(key for key in keys if key is not None)


class Order(NamedTuple):
    """A step for every executor: what runs, and the words of the packet that travel.

    Without words the step runs from the packet that the step before left.
    """

    key: StepKey
    words: bytes | None


class CaptureOrder(NamedTuple):
    """Graphs to capture, and graphs to drop before. Nothing is in flight on the leader's device."""

    capture: tuple[ProgramKey, ...]
    drop: tuple[ProgramKey, ...]
