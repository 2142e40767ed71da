"""Weights of 8-bit whole numbers with a scale for each output, which the package reads into a layout of its own."""

from __future__ import annotations

from gapless.kernels.kinds import WeightKind, WeightLayout
from gapless.model.formats.seam import Stored, StoredWeight
from gapless.model.quantization import Quantization


class ByteRows:
    """Implements `WeightFormat`."""

    def __init__(self, asked: Quantization) -> None:
        if asked.values.get("bits", 8) != 8:
            raise asked.error("bits", "must be 8")

    def weight(self, module: str, outputs: int, inputs: int) -> StoredWeight | None:
        if ".layers." not in module:
            return None
        tensors = {
            "weight": Stored((outputs, inputs), ("I8",)),
            "weight_scale": Stored((outputs, 1), ("F32",)),
        }
        return StoredWeight(
            WeightLayout(WeightKind.INT8), tensors, lambda found: (found["weight"], found["weight_scale"])
        )
