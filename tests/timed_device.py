"""A simulated GPU whose programs take the time that they would take there: no adversary, and no jitter."""

from __future__ import annotations

from typing import Any, NamedTuple

from gapless.step.keys import ForwardKey
from gapless.testing.sim import SimDevice, SimStream


class Times(NamedTuple):
    """What the device takes, ns. The defaults are those of a model of 0.6B on an H100 (docs/notes/2026-11-gpu.md)."""

    step: int = 700_000
    token: float = 5_300
    """A prompt token"""
    page: float = 12_800
    """A page of four tokens, of 115 KB each, at 36 GB/s"""
    copy: int = 18_000
    """A transfer of no pages"""
    begin: int = 60_000
    """The host begins a transfer."""


class TimedDevice(SimDevice):
    """Runs every program at once, and has the host wait until it would have ended."""

    def __init__(self, times: Times) -> None:
        super().__init__(0, "eager", maps_host=True)
        self.times = times

    def approach(self, at: int) -> bool:
        return at <= self.host_now

    def cost(self, stream: SimStream, args: tuple[Any, ...]) -> int:
        if stream in (self.bulk_in, self.bulk_out) and args:
            self.host_now += self.times.begin
            return self.times.copy + round(self.times.page * sum(places.shape[1] for *_, places in args[0]))
        if args and isinstance(args[0], ForwardKey):
            return self.times.step + round(self.times.token * args[0].packet.chunk_tokens)
        return 0
