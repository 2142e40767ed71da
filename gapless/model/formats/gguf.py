"""GGUF: llama.cpp's files. Q8_0 and Q4_0 are kept, other blocks are multiplied out by the package gguf."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gapless.kernels.kinds import BLOCK, DENSE, WeightKind, WeightLayout
from gapless.model.formats.seam import FLOATS, Stored, StoredWeight
from gapless.model.quantization import Quantization

if TYPE_CHECKING:
    from torch import Tensor

_LAYOUTS = {"Q8_0": WeightLayout(WeightKind.INT8, BLOCK), "Q4_0": WeightLayout(WeightKind.INT4, BLOCK)}


class GgufFormat:
    """Implements `WeightFormat`."""

    def __init__(self, asked: Quantization) -> None:
        types = asked.values.get("types")
        if not isinstance(types, dict) or any(not isinstance(kind, str) for kind in types.values()):
            raise asked.error("types", "must be the table that opening a .gguf file writes: name that file", types)
        self.types: Mapping[str, str] = types
        heads = asked.values.get("turned") or {}
        if not isinstance(heads, dict) or any(type(many) is not int or many < 1 for many in heads.values()):
            raise asked.error("turned", "must be numbers of heads by names of modules")
        self.heads: Mapping[str, int] = heads
        """Heads of the modules whose rows the converter turns, since llama's rope has its pairs side by side there"""

    def weight(self, module: str, outputs: int, inputs: int) -> StoredWeight | None:
        kind = self.types.get(module, "F32")
        heads = self.heads.get(module.rpartition(".layers.")[2].partition(".")[2], 0)
        if kind in FLOATS and not heads:
            return None

        def read(found: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
            from gapless.model.gguf_tensors import read_weight  # imports torch

            return read_weight(found, kind, heads)

        why = "" if kind in _LAYOUTS or kind in FLOATS else f"no kernel has {kind}"
        stored = {"weight": Stored((outputs, inputs), (kind,))}
        return StoredWeight(_LAYOUTS.get(kind, DENSE), stored, read, why, by_rows=not heads)
