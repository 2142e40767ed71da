"""Keys of a step's programs: the host integers that fix their shapes. A graph is captured for one of them.

Keys of different programs have different lengths or field types, so that no two are equal. `rows` of a lane's program
is its padded list length, and `filters` are the ones used by any row in it.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from gapless.kernels.views import Filters
from gapless.model.seam import BatchShape
from gapless.step.packet import PacketShape


class Load(NamedTuple):
    """Fill of one slot."""

    row: int
    slot: int
    wishes: int
    """Words of the row's wishes; none without a slot"""
    past: int
    """Tokens of its history outside its chunks"""


class LoadKey(NamedTuple):
    """Fills slots, histories and page tables of new rows. It has no graph: such rows are few, and come with chunks."""

    loads: tuple[Load, ...]
    words: int
    """Words in the packet"""
    pages: int = 0
    """Page table entries beyond the room of a captured step's packet, last: a row may find any number of pages"""


class AdjustKey(NamedTuple):
    """Adjusts logits of rows, and finds the cuts of their filters."""

    rows: int
    filters: Filters | None
    """Filters used by any listed row; None for none"""
    batch: int = 0
    """Rows of the batch, if they have drafts"""
    places: int = 1
    """Logits of each row"""
    processors: tuple[int, ...] = ()
    """Logits processors used by any listed row, ascending"""


class MaskKey(NamedTuple):
    """Fetches the masks of rows."""

    rows: int
    drafted: tuple[int, int] = (0, 1)
    """Rows of the batch, if they have drafts, and logits of each row"""


class ReplyKey(NamedTuple):
    """Sends the sampled tokens to the mask makers."""

    rows: int
    """Length of the padded list of masked rows."""
    drafts: int | None = None
    """Most drafts in a reply; None if no row gets drafts"""


class CutKey(NamedTuple):
    """Finds the cuts of rows' filters."""

    rows: int
    filters: Filters
    batch: int = 0
    """Rows of the batch, if they have drafts: the list then has each place of a row."""


class ScoreKey(NamedTuple):
    """Scores sampled tokens."""

    rows: int
    width: int
    """Number of most likely tokens for each."""
    batch: int = 0


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
    def adapted(self) -> ForwardKey:
        """Key of the same batch with an adapter on some row."""
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
        # Drafts after a step without any are seldom verified, and their masks cost more than one.
        return ReplyKey(self.mask.rows, self.sample.places - 1 if self.sample.drafts else None)

    def programs(self) -> tuple[ProgramKey, ...]:
        """Return the step's programs, in order."""
        keys = self.load, self.forward, self.mask, self.adjust, self.cut, self.sample, self.reply, self.score
        return tuple(key for key in keys if key is not None)


class Order(NamedTuple):
    """A step for every executor: its key, and the sent words of the packet.

    Without words the step runs from the packet that the last step left.
    """

    key: StepKey
    words: bytes | None


class CaptureOrder(NamedTuple):
    """Graphs to capture, and graphs to drop first. Nothing is in flight on the leader's device."""

    capture: tuple[ProgramKey, ...]
    drop: tuple[ProgramKey, ...]
