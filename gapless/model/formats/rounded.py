"""Dense checkpoints whose layers are rounded to nearest at load: `--quantization`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from gapless.base.errors import ConfigError
from gapless.kernels.kinds import BLOCK, WeightKind, WeightLayout
from gapless.model.formats.seam import Stored, StoredWeight
from gapless.model.quantization import ROUNDED, Quantization

if TYPE_CHECKING:
    from torch import Tensor


class RoundedFormat:
    """Implements `WeightFormat`: all modules but the embedding and the head, which are in no layer."""

    def __init__(self, asked: Quantization, layers: str) -> None:
        self.kind, self.layers = WeightKind(asked.method), layers

    def weight(self, module: str, outputs: int, inputs: int) -> StoredWeight | None:
        if not module.startswith(self.layers):
            return None
        layout = rounded_layout(self.kind, inputs)
        if layout is None:
            rule = f"int4 stores blocks of {BLOCK} inputs, and {module} has {inputs}: use int8"
            raise ConfigError(f"quantization: {rule}")
        return StoredWeight(layout, {"weight": Stored((outputs, inputs))}, partial(_read, layout), by_rows=True)


def _read(layout: WeightLayout, found: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    from gapless.kernels.matrix import round_to

    return round_to(layout, found["weight"])


def rounded_layout(kind: WeightKind, inputs: int) -> WeightLayout | None:
    """Return the layout of a rounded weight: INT4 by the largest group up to 128 that divides; None if there is
    none."""
    if not (most := ROUNDED[kind]):
        return WeightLayout(kind)
    return next((WeightLayout(kind, size) for size in (most, most // 2, BLOCK) if not inputs % size), None)
