"""MXFP4, the format of gpt-oss's experts: 4-bit floats with a power of two for each 32, multiplied out at load.

Its attention, router, embedding and head are plain.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from gapless.model.formats.seam import StoredWeight
from gapless.model.quantization import Quantization

if TYPE_CHECKING:
    from torch import Tensor

MXFP4_READS = frozenset(("modules_to_not_convert",))


class Mxfp4Format:
    """Implements `WeightFormat`: the modules of a linear layer are plain."""

    parts = ("_blocks", "_scales")
    """Ends of the names of the two tensors of all experts"""

    def __init__(self, asked: Quantization) -> None:
        asked.fields(MXFP4_READS)

    def weight(self, module: str, outputs: int, inputs: int) -> StoredWeight | None:
        return None

    def experts(self, found: Mapping[str, Tensor]) -> Tensor:
        """Return the weights of all experts, float32 [E, K, N]; found: `parts`, uint8 [E, N, K / 32, 16] and [E, N,
        K / 32]."""
        from gapless.model.formats.numbers import fp4_values

        blocks, scales = (found[part] for part in self.parts)
        return fp4_values(blocks.flatten(2), scales).mT.contiguous()
