"""Kinds that kernels compute. Imports no torch."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import NamedTuple


class Reach(IntEnum):
    """The first entry that a query at position p reads. Its own is the last."""

    CAUSAL = 0
    """0"""
    WINDOW = 1
    """max(0, p - size + 1)"""
    CHUNK = 2
    """p - p % size"""


class Activation(IntEnum):
    """The function of an MLP."""

    SILU = 0
    GELU = 1
    """Gaussian error linear unit, by the error function"""
    GELU_TANH = 2
    """GELU approximated by a hyperbolic tangent"""
    RELU = 3
    RELU2 = 4
    """relu(x) ** 2"""


BLOCK = 32
"""Columns of an INT4 weight that are stored together"""


class WeightKind(StrEnum):
    """The numbers of a weight."""

    DENSE = "dense"
    """The model's dtype"""
    FP8 = "fp8"
    """float8_e4m3fn, times a scale"""
    INT8 = "int8"
    """Whole numbers of 8 bits, times a scale"""
    INT4 = "int4"
    """Whole numbers of 4 bits less a zero, times a scale"""


class WeightLayout(NamedTuple):
    """The form of a weight in memory; see `matrix.Matrix`. All kinds have rows by outputs: weights are joined,
    permuted and cut by rows anywhere, and by columns between groups."""

    kind: WeightKind
    group: int = 0
    """Inputs that share a scale; 0: all of a row"""

    def groups(self, inputs: int) -> int:
        """Return the scales of a row."""
        return -(-inputs // self.group) if self.group else 1

    @property
    def step(self) -> int:
        """Columns are cut at multiples of this."""
        return self.group or (BLOCK if self.kind is WeightKind.INT4 else 1)

    def __str__(self) -> str:
        return f"{self.kind} by {self.group}" if self.group else str(self.kind)


DENSE = WeightLayout(WeightKind.DENSE)
