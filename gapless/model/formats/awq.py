"""AWQ: whole numbers of 4 bits, packed by outputs in an order of its own, with a scale and a zero point for each group
of inputs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from gapless.kernels.kinds import WeightLayout
from gapless.model.formats.gptq import refuse_bias
from gapless.model.formats.seam import FLOATS, Stored, StoredWeight, has_module, int4_layout
from gapless.model.quantization import Quantization

if TYPE_CHECKING:
    from torch import Tensor

_AWQ_READS_TEXT = """
    bits checkpoint_format desc_act format group_size lm_head method modules_to_not_convert pack_dtype
    q_group_size sym version w_bit zero_point
"""
AWQ_READS = frozenset(_AWQ_READS_TEXT.split())
ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of its 8 outputs; places have the outputs 0 2 4 6 1 3 5 7"""


class AwqFormat:
    """Implements `WeightFormat`."""

    def __init__(self, asked: Quantization) -> None:
        fields, self.where = asked.fields(AWQ_READS), asked.where
        bits = "bits" if "bits" in fields else "w_bit"
        if fields.whole(bits, 4) != 4:
            raise asked.error(bits, "must be 4")
        for name in ("version", "format", "checkpoint_format"):
            if fields.text(name, "gemm").lower() not in ("gemm", "awq"):
                raise asked.error(name, "must be gemm: save it as that")
        for name, wanted in (("zero_point", True), ("sym", False), ("desc_act", False)):
            if fields.flag(name, wanted) is not wanted:
                raise asked.error(name, f"must be {str(wanted).lower()}")
        if fields.text("pack_dtype", "int32") != "int32":
            raise asked.error("pack_dtype", "must be int32")
        size = fields.whole("q_group_size", 128, low=-1) if "q_group_size" in fields else 128
        self.group = fields.whole("group_size", size, low=-1)
        if not self.group:
            raise asked.error("group_size", "must be a whole number above 0, or -1")
        self.plain = asked.names("modules_to_not_convert")

    def weight(self, module: str, outputs: int, inputs: int) -> StoredWeight | None:
        if has_module(self.plain, module):
            return None
        group = 0 if self.group == -1 else self.group
        many, words = -(-inputs // (group or inputs)), -(-outputs // 8)
        tensors = {
            "qweight": Stored((inputs, words), ("I32",)),
            "qzeros": Stored((many, words), ("I32",)),
            "scales": Stored((many, outputs)),
            "bias": Stored((outputs,), FLOATS, optional=True),
        }
        layout, why = int4_layout(group, inputs)
        return StoredWeight(layout, tensors, partial(self._read, module, layout, group), why)

    def _read(self, module: str, layout: WeightLayout, group: int, found: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        import torch

        from gapless.model.formats.numbers import weight_of

        numbers, zero = (
            _outputs(found[name])[:, : found["scales"].shape[1]].mT.contiguous() for name in ("qweight", "qzeros")
        )
        refuse_bias(f"{self.where}: {module}", found.get("bias"))
        groups = torch.arange(numbers.shape[1]) // (group or numbers.shape[1])
        return weight_of(layout, numbers, found["scales"].mT.contiguous(), zero, groups)


def _outputs(words: Tensor) -> Tensor:
    """Return the numbers of words int32 [R, N / 8]: uint8 [R, N]."""
    from gapless.model.formats.numbers import unpacked

    return unpacked(words, 4).view(len(words), -1, 8)[:, :, list(ORDER)].view(len(words), -1)
