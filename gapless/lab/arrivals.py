"""When requests are to leave, in seconds from the start of the run. All of it is drawn from one seed."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from gapless.base.errors import ConfigError

RAMPS = ("linear", "exponential")


class Ramp(NamedTuple):
    """The rate moves from `start` to `end` requests a second over the run, request by request."""

    strategy: str
    start: float
    end: float

    def rates(self, count: int) -> list[float]:
        """The rate at each request: the first has `start`, the last has `end`."""
        shares = [i / max(count - 1, 1) for i in range(count)]
        if self.strategy == "linear":
            return [self.start + (self.end - self.start) * share for share in shares]
        return [self.start * (self.end / self.start) ** share for share in shares]


class Burst(NamedTuple):
    """`size` requests leave at once every `interval` seconds."""

    size: int
    interval: float


@dataclass(frozen=True)
class Arrivals:
    """An arrival process.

    `rate` infinite: everything leaves at once, which with a limit on concurrency is a closed loop. Otherwise gaps are
    gamma-distributed with shape `burstiness`: 1 is a Poisson process, below 1 is bursty, infinite is constant.
    """

    rate: float = math.inf
    burstiness: float = 1.0
    ramp: Ramp | None = None
    burst: Burst | None = None

    def __post_init__(self) -> None:
        if not self.rate > 0:
            raise ConfigError(f"request-rate must be above 0, or inf for all at once, got {self.rate}")
        if not self.burstiness > 0:
            raise ConfigError(f"burstiness must be above 0 (1 is Poisson, inf is constant), got {self.burstiness}")
        if self.ramp and not (0 < self.ramp.start < math.inf and 0 < self.ramp.end < math.inf):
            raise ConfigError("request-rate: both ends of a ramp must be above 0")
        if self.burst and not (self.burst.size >= 1 and 0 <= self.burst.interval < math.inf):
            raise ConfigError("request-rate: a burst has at least 1 request, and an interval of at least 0 s")

    def times(self, count: int, seed: int = 0) -> tuple[float, ...]:
        """`count` times that never fall.

        A steady rate is scaled so that the last request leaves at count / rate: throughput at one rate then does not
        differ between seeds by the luck of the draw.
        """
        if self.burst:
            return tuple(i // self.burst.size * self.burst.interval for i in range(count))
        rates = self.ramp.rates(count) if self.ramp else [self.rate] * count
        rng = random.Random(f"arrivals {seed}")
        times = list(accumulate(self._gap(rng, rate) for rate in rates))
        if self.ramp or math.isinf(self.rate) or not times:
            return tuple(times)
        scale = count / self.rate / times[-1] if times[-1] else 1.0
        return tuple(at * scale for at in times)

    def _gap(self, rng: random.Random, rate: float) -> float:
        if math.isinf(rate):
            return 0.0
        if math.isinf(self.burstiness):
            return 1 / rate
        return rng.gammavariate(self.burstiness, 1 / (rate * self.burstiness))

    @property
    def name(self) -> str:
        if self.burst:
            return f"{self.burst.size} at once every {self.burst.interval:g} s"
        if self.ramp:
            return f"{self.ramp.strategy} ramp from {self.ramp.start:g} to {self.ramp.end:g} requests/s"
        if math.isinf(self.rate):
            return "all at once"
        kind = "constant" if math.isinf(self.burstiness) else "Poisson" if self.burstiness == 1 else "gamma"
        return f"{kind}, {self.rate:g} requests/s"

    @property
    def label(self) -> str:
        """The process as a part of a file's name."""
        if self.burst:
            return f"burst-{self.burst.size}-{self.burst.interval:g}s"
        if self.ramp:
            return f"ramp-up-{self.ramp.strategy}-{self.ramp.start}qps-{self.ramp.end}qps"
        return f"{self.rate}qps"


def parse_arrivals(rate: str | None, burstiness: float = 1.0) -> Arrivals:
    """Read `4`, `inf`, `linear:1:20`, `exponential:1:20` or `burst:16:2`; None is inf. Raises ConfigError."""
    kind, *numbers = ("inf" if rate is None else rate).split(":")
    try:
        if kind in RAMPS and len(numbers) == 2:
            return Arrivals(burstiness=burstiness, ramp=Ramp(kind, float(numbers[0]), float(numbers[1])))
        if kind == "burst" and len(numbers) == 2:
            return Arrivals(burstiness=burstiness, burst=Burst(int(numbers[0]), float(numbers[1])))
        if not numbers:
            return Arrivals(float(kind), burstiness)
    except ConfigError:
        raise
    except ValueError:
        pass
    forms = "a number, inf, linear:START:END, exponential:START:END or burst:SIZE:SECONDS"
    raise ConfigError(f"request-rate must be {forms}, got {rate!r}")


def burstiness_of(times: Sequence[float]) -> float:
    """Coefficient of variation of the gaps: 0 constant, 1 Poisson, above 1 bursty. 0.0 for fewer than three times."""
    gaps = [b - a for a, b in pairwise(times)]
    mean = statistics.fmean(gaps) if len(gaps) > 1 else 0.0
    return statistics.pstdev(gaps, mean) / mean if mean > 0 else 0.0
