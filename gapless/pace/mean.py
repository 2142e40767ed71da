"""Moving means of measured values."""

from __future__ import annotations


class Mean:
    """A moving mean; the latest value has the weight `weight`."""

    __slots__ = ("value", "weight")

    def __init__(self, weight: float, value: float = 0.0) -> None:
        self.weight, self.value = weight, value

    def add(self, value: float) -> None:
        self.value += (value - self.value) * self.weight


class SpreadMean(Mean):
    """A moving mean and the mean deviation from it, as in TCP's timeouts (Jacobson, "Congestion Avoidance and
    Control", SIGCOMM 88)."""

    __slots__ = ("spread",)

    def __init__(self, weight: float) -> None:
        super().__init__(weight)
        self.spread = 0.0

    def add(self, value: float) -> None:
        self.spread += (abs(value - self.value) - self.spread) * self.weight
        self.value += (value - self.value) * self.weight


class CappedMean(Mean):
    """A moving mean. An outlier, as on a busy machine, counts at most as twice the mean, which starts at the first
    value, or at the second if it `skips` the first."""

    __slots__ = ("_skips",)

    def __init__(self, weight: float, skips: bool = False) -> None:
        super().__init__(weight)
        self._skips = skips

    def add(self, value: float) -> None:
        if self._skips:
            self._skips = False
        elif self.value:
            self.value += min(value - self.value, self.value) * self.weight
        else:
            self.value = value
