"""Kinds that kernels compute. Imports no torch."""

from __future__ import annotations

from enum import IntEnum


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
