"""Step records: what each step held and when each thing happened to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from gapless.base.records import Int64s

KEPT = 4096
"""Steps that a loop remembers."""


class ChunkRecord(NamedTuple):
    """`size` known tokens of a request, from position `start`, ran in a step."""

    key: int
    start: int
    size: int


class StepRecord(NamedTuple):
    """One step. Times are ns of the device's clock, on which host and device agree.

    Of the steps of a chain, the first bears what the visit did once: planning all of them and packing. The others
    begin, plan, and are packed at the moment at which the one before was enqueued, so that the host's times add up.
    Where the host waited for the end of a chain, the wait is the first step's; the others were observed without one.
    """

    step: int
    decode_rows: int
    chunk_tokens: int
    in_flight: int
    """Steps in flight when it was launched, itself included."""
    work_at: int
    """When the loop, with nothing left to run, was given work again, after the launch before this one; 0 otherwise."""
    held_by: int
    """The step whose end the depth limit made this one wait for; 0 when it did not wait."""
    held_until: int
    """When the tokens of that step were home; 0 likewise."""
    planning_at: int
    """The host began to plan it."""
    planned_at: int
    packed_at: int
    """Its packet was complete in pinned memory."""
    launched_at: int
    """The host had enqueued all of it."""
    device_start: int
    device_end: int
    home_at: int
    """Its tokens were in host memory; `device_end` where the device writes there itself."""
    observing_at: int
    """The host turned to it; it may have waited from here."""
    observed_at: int
    committed_at: int
    waited: bool
    """Whether the host waited for this step, in observe."""
    missed: bool
    """Whether it ran eagerly for want of a captured graph."""
    decode: Int64s
    """Requests that took part with one token each: one array for all steps in which they are the same."""
    chunks: tuple[ChunkRecord, ...]
    """Known tokens that ran, a prompt's or those of a request that was preempted."""

    @property
    def host_ns(self) -> int:
        """Host time spent on the step, waiting excluded."""
        return self.launched_at - self.planning_at + self.committed_at - self.observed_at

    @property
    def device_ns(self) -> int:
        return self.device_end - self.device_start


INTEGERS = StepRecord._fields.index("decode")
"""The first so many fields of a record are integers."""


class StepRing:
    """The latest KEPT records, oldest first.

    They are kept as plain tuples, in the order of StepRecord, and made into records for those who look: a named tuple
    of so many fields takes a microsecond, once a step.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[Any, ...]] = deque(maxlen=KEPT)
        self.put = self._kept.append
        self.clear = self._kept.clear

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> StepRecord:
        return StepRecord._make(self._kept[index])

    def __iter__(self) -> Iterator[StepRecord]:
        return map(StepRecord._make, self._kept)

    def __reversed__(self) -> Iterator[StepRecord]:
        return map(StepRecord._make, reversed(self._kept))
