"""Formats of weights, by the `quant_method` of a checkpoint: ours, and plug-ins'. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable

from gapless.base.errors import CheckpointError
from gapless.base.plug_ins import plug_ins
from gapless.model.fields import Fields
from gapless.model.formats.awq import AwqFormat
from gapless.model.formats.compressed import CompressedFormat
from gapless.model.formats.fp8 import Fp8Format
from gapless.model.formats.gguf import GgufFormat
from gapless.model.formats.gptq import GptqFormat
from gapless.model.formats.mxfp4 import Mxfp4Format
from gapless.model.formats.seam import WeightFormat
from gapless.model.quantization import FORMAT_PLUG_INS, Quantization

WEIGHT_FORMATS: dict[str, Callable[[Quantization], WeightFormat]] = {
    "fp8": Fp8Format,
    "compressed-tensors": CompressedFormat,
    "gptq": GptqFormat,
    "gptq_marlin": GptqFormat,
    "awq": AwqFormat,
    "awq_marlin": AwqFormat,
    "mxfp4": Mxfp4Format,
    "gguf": GgufFormat,
}
"""Formats by quant_method; each refuses a quantization_config that it does not read whole"""
REFUSED = {
    "bitsandbytes": "its 4-bit numbers are looked up in a table, and no kernel has one",
    "modelopt": "NVIDIA's own forms are not read; llm-compressor writes the same numbers as compressed-tensors",
    "nvfp4": "4-bit floats with two scales are not read",
    "auto-round": "save it as gptq or awq, by auto_round's own format",
    "fbgemm_fp8": "activations are clamped by a bound of their own",
    "torchao": "its tensors are stored as objects of a program",
}
"""Methods that are well known and not read, and why"""


def read_quantization(fields: Fields) -> Quantization | None:
    """Read a config.json. Raises CheckpointError for a method that neither we nor a plug-in reads, or for a field that
    ours do not."""
    values, where = fields.get("quantization_config"), f"{fields.path}: quantization_config"
    if values is None:
        return None
    method = values.get("quant_method") if isinstance(values, dict) else None
    if method in WEIGHT_FORMATS:
        found = Quantization(method, values, str(fields.path))
        WEIGHT_FORMATS[method](found)
        return found
    known = [*WEIGHT_FORMATS, *plug_ins(FORMAT_PLUG_INS)]
    if not isinstance(method, str) or method not in known:
        why = f" ({REFUSED[method]})" if isinstance(method, str) and method in REFUSED else ""
        raise CheckpointError(
            f"{where}.quant_method must be one of {', '.join(known)}, got {method!r}{why}: use a checkpoint of another "
            "format, or the bfloat16 one with --quantization"
        )
    return Quantization(method, values, str(fields.path))
