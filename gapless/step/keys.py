"""Keys of a step's programs: the host integers that fix their shapes. A graph is captured for one of them.

Keys of different programs have different lengths or fields of different types, so that no two are equal.
"""

from __future__ import annotations

from typing import NamedTuple

from gapless.kernels.views import Filters
from gapless.model.seam import BatchShape
from gapless.step.packet import PacketShape


class CutKey(NamedTuple):
    """Finds where the filters of rows end."""

    rows: int
    """Of the list, filled up."""
    filters: Filters
    """Of some listed row."""


class ScoreKey(NamedTuple):
    """Scores sampled tokens."""

    rows: int
    """Of the list, filled up."""
    width: int
    """Most likely tokens beside each."""


class SampleKey(NamedTuple):
    """Samples and ends the step."""

    rows: int
    """Of the batch."""
    samples: int
    """The first so many of them sample."""
    sized: bool
    """Whether the packet says how many query tokens each row has."""


class ForwardKey(NamedTuple):
    """From the packet to logits."""

    batch: BatchShape
    packet: PacketShape
    samples: int
    """The first so many rows have logits."""
    width: int = 0
    """Most likely tokens beside each scored prompt token."""


ProgramKey = CutKey | ScoreKey | SampleKey | ForwardKey


class StepKey(NamedTuple):
    """The programs of a step, in their order."""

    forward: ForwardKey
    cut: CutKey | None
    sample: SampleKey
    score: ScoreKey | None
    outbox: int = 0
    """Lines of the outbox that are brought home, the header not counted."""

    def programs(self) -> tuple[ProgramKey, ...]:
        """Those that it has."""
        return tuple(key for key in self[:4] if key is not None)


class Order(NamedTuple):
    """A step for every executor: what runs, and the packet's words from `span(key)`.

    Without words the step runs from the packet that the one before left.
    """

    key: StepKey
    words: bytes | None


class CaptureOrder(NamedTuple):
    """Graphs to capture, and graphs to drop before. Nothing is in flight on the leader's device."""

    capture: tuple[ProgramKey, ...]
    drop: tuple[ProgramKey, ...]
