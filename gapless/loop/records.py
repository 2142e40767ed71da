"""Step records: what each step held and when each thing happened to it."""

from __future__ import annotations

from typing import NamedTuple


class StepRecord(NamedTuple):
    """One step. Times are ns of the device's clock, on which host and device agree."""

    step: int
    decode_rows: int
    chunk_tokens: int
    in_flight: int
    """Steps in flight when it was launched, itself included."""
    planning_at: int
    """The host began to plan it."""
    packed_at: int
    """Its packet was complete in pinned memory."""
    launched_at: int
    """The host had enqueued all of it."""
    device_start: int
    device_end: int
    observing_at: int
    """The host turned to it; it may have waited from here."""
    observed_at: int
    committed_at: int
    waited: bool
    """Whether the host waited for this step, in observe."""

    @property
    def host_ns(self) -> int:
        """Host time spent on the step, waiting excluded."""
        return self.launched_at - self.planning_at + self.committed_at - self.observed_at

    @property
    def device_ns(self) -> int:
        return self.device_end - self.device_start
