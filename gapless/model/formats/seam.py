"""The interface of a format: how a checkpoint stores the weight of a module, and how it becomes one of our layouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from torch import Tensor

from gapless.kernels.kinds import WeightLayout

FLOATS = ("F32", "F16", "BF16")


class Stored(NamedTuple):
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    """Names that safetensors has for dtypes it may have"""
    optional: bool = False


class StoredWeight(NamedTuple):
    """The weight [N, K] of a module, as a format stores it."""

    layout: WeightLayout
    """The layout that it becomes. Modules of one product are joined; if their layouts differ, multiplied out."""
    tensors: Mapping[str, Stored]
    """Tensors by the last part of their names"""
    read: Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]]
    """Makes the tensors of a `Matrix` of the layout, on the host. Raises CheckpointError."""


class WeightFormat(Protocol):
    """A format of a checkpoint's weights."""

    def weight(self, module: str, outputs: int, inputs: int) -> StoredWeight | None:
        """Return how the weight of a module is stored, by its whole name such as model.layers.0.mlp.down_proj; None for
        a plain one. Raises CheckpointError."""
        ...
