"""The interface of a format: how a checkpoint stores the weight of a module, and how it becomes one of our layouts.
Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from gapless.kernels.kinds import BLOCK, DENSE, WeightKind, WeightLayout

if TYPE_CHECKING:
    from torch import Tensor

FLOATS = ("F32", "F16", "BF16")


class Stored(NamedTuple):
    """A tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATS
    """Names that safetensors has for dtypes it may have"""
    optional: bool = False
    others: tuple[tuple[int, ...], ...] = ()
    """Other shapes that it may have"""


class StoredWeight(NamedTuple):
    """The weight [N, K] of a module, as a format stores it."""

    layout: WeightLayout
    """The layout that it becomes. Modules of one product are joined; if their layouts differ, multiplied out."""
    tensors: Mapping[str, Stored]
    """Tensors by the last part of their names"""
    read: Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]]
    """Makes the tensors of a `Matrix` of the layout, on the host; a dense one may be float32. Raises CheckpointError.
    """
    why_dense: str = ""
    """Why the layout is the dense one"""
    by_rows: bool = False
    """Whether `read` serves some rows of all tensors: a rank then reads its own outputs alone, and of other formats
    whole modules one after the other"""


class WeightFormat(Protocol):
    """A format of a checkpoint's weights."""

    def weight(self, module: str, outputs: int, inputs: int) -> StoredWeight | None:
        """Return how the weight of a module is stored, by its whole name such as model.layers.0.mlp.down_proj; None for
        a plain one. Raises CheckpointError."""
        ...


def has_module(names: Collection[str], module: str) -> bool:
    """Return whether a list has a module: its whole name, or parts of it one after the other, such as `mlp.gate`."""
    return any(name and f".{name}." in f".{module}." for name in names)


def int4_layout(group: int, inputs: int) -> tuple[WeightLayout, str]:
    """Return the layout of 4-bit numbers by groups of inputs, 0 for whole rows; and why it is dense if it is."""
    if inputs % BLOCK or group % BLOCK or (group and inputs % group):
        return DENSE, f"{inputs} inputs by {group or inputs} are no groups of whole blocks of {BLOCK}"
    return WeightLayout(WeightKind.INT4, group), ""


def int8_layout(group: int, symmetric: bool) -> tuple[WeightLayout, str]:
    """Return the layout of 8-bit numbers, as `int4_layout` does."""
    return (WeightLayout(WeightKind.INT8, group), "") if symmetric else (DENSE, "its 8-bit numbers have zero points")
