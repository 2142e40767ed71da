"""FP8 (e4m3) with a scale for each block of a weight, as DeepSeek's and Qwen3's checkpoints have it, or for the whole.

A block's scale is repeated for each of its rows: exact for rows in any order and of any number. Scales of activations
are read and not needed, since products here take activations as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from gapless.base.errors import CheckpointError
from gapless.kernels.kinds import WeightKind, WeightLayout
from gapless.model.formats.seam import Stored, StoredWeight, has_module
from gapless.model.quantization import Quantization

if TYPE_CHECKING:
    from torch import Tensor

READS = frozenset(
    ("activation_scheme", "fmt", "ignored_layers", "kv_cache_scheme", "modules_to_not_convert", "scale_fmt")
) | {"weight_block_size"}
SCALES = ("weight_scale_inv", "weight_scale")
"""Names of a weight's scales. Both are factors."""
_INPUT_SCALES = ("input_scale", "activation_scale")


class Fp8Format:
    """Implements `WeightFormat`."""

    def __init__(self, asked: Quantization) -> None:
        fields, self.where = asked.fields(READS), asked.where
        if fields.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise asked.error("fmt", "must be e4m3")
        if fields.text("activation_scheme", "dynamic") not in ("dynamic", "static"):
            raise asked.error("activation_scheme", "must be dynamic or static")
        self.block = fields.get("weight_block_size")
        if self.block is not None and not is_block(self.block):
            raise asked.error("weight_block_size", "must be two whole numbers above 0")
        self.plain = asked.names("modules_to_not_convert") + asked.names("ignored_layers")

    def weight(self, module: str, outputs: int, inputs: int) -> StoredWeight | None:
        if has_module(self.plain, module):
            return None
        tensors = {"weight": Stored((outputs, inputs), ("F8_E4M3",))}
        tensors |= {name: Stored((), optional=True, others=((1,),)) for name in _INPUT_SCALES}
        if self.block is None:
            tensors |= {name: Stored((), optional=True, others=((1,), (outputs, 1))) for name in SCALES}
            return StoredWeight(WeightLayout(WeightKind.FP8), tensors, partial(self._read, module, outputs, 0))
        rows, columns = self.block
        tensors[SCALES[0]] = Stored((-(-outputs // rows), -(-inputs // columns)))
        read = partial(self._read, module, outputs, rows)
        return StoredWeight(WeightLayout(WeightKind.FP8, columns), tensors, read)

    def _read(self, module: str, outputs: int, rows: int, found: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        from gapless.model.formats.numbers import rows_of

        scales = [found[name] for name in SCALES if name in found]
        if len(scales) != 1:
            many = "both" if scales else "neither"
            raise CheckpointError(f"{self.where}: {module} has {many} of the tensors {' and '.join(SCALES)}")
        for name in _INPUT_SCALES:
            check_scale(f"{self.where}: {module}.{name}", found.get(name))
        return found["weight"], rows_of(scales[0], outputs, rows)


def is_block(value: object) -> bool:
    """Return whether a value of config.json is the rows and columns of a block."""
    return isinstance(value, list) and len(value) == 2 and all(type(size) is int and size > 0 for size in value)


def check_scale(where: str, scale: Tensor | None) -> None:
    """Raise CheckpointError unless a scale of activations is one that some program can have used."""
    if scale is not None and not (0 < float(scale) < float("inf")):
        raise CheckpointError(f"{where} must be a number above 0, got {float(scale)}")
