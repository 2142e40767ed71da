"""How the weights of a checkpoint are quantised, as its config.json has it or `--quantization` asks. Imports no
torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gapless.base.errors import CheckpointError, ConfigError
from gapless.base.plug_ins import plug_ins
from gapless.model.fields import Fields

FORMAT_PLUG_INS = "gapless.formats"
"""Entry points of this group are further formats: a `quant_method`, and what makes its `formats.seam.WeightFormat` of a
`Quantization`."""
QUANT_METHODS: tuple[str, ...] = ()
"""Values of quant_method that `formats.WEIGHT_FORMATS` reads"""
ROUNDED = {"fp8": 0, "int8": 0, "int4": 128}
"""Kinds that `--quantization` rounds a dense checkpoint to, with the most inputs of a group; 0: a whole row"""
AS_IT_IS = ("auto", "none")


@dataclass(frozen=True)
class Quantization:
    """The quantisation of a model."""

    method: str
    """The checkpoint's quant_method, or a kind of ROUNDED"""
    values: Mapping[str, Any]
    """The checkpoint's quantization_config"""
    where: str
    """The file and field, for errors"""
    at_load: bool = False
    """Whether a dense checkpoint is rounded at load"""

    def error(self, name: str, rule: str, value: object = None) -> CheckpointError:
        """Return the error of a field of quantization_config."""
        found = self.values.get(name) if value is None else value
        return CheckpointError(f"{self.where}.{name} {rule}, got {found!r}")


def read_quantization(fields: Fields) -> Quantization | None:
    """Read a config.json. Raises CheckpointError for a method that neither we nor a plug-in reads."""
    asked, where = fields.get("quantization_config"), f"{fields.path}: quantization_config"
    if asked is None:
        return None
    method = asked.get("quant_method") if isinstance(asked, dict) else None
    known = [*QUANT_METHODS, *plug_ins(FORMAT_PLUG_INS)]
    if method not in known:
        raise CheckpointError(
            f"{where}.quant_method must be one of {', '.join(known) or 'the installed ones, which are none'}, got "
            f"{method!r}: use a checkpoint of another format, or the bfloat16 one with --quantization"
        )
    return Quantization(method, asked, where)


def asked_quantization(asked: str, found: Quantization | None) -> Quantization | None:
    """Return the quantisation by `--quantization` of a checkpoint with this one. Raises ConfigError."""
    if asked == "auto" or (found is None and asked == "none") or (found is not None and asked == found.method):
        return found
    if found is not None:
        raise ConfigError(f"quantization is {asked!r}, and the checkpoint's weights are {found.method}: leave it out")
    if asked not in ROUNDED:
        raise ConfigError(
            f"quantization must be one of {', '.join((*AS_IT_IS, *ROUNDED))} for a checkpoint that is not quantised, "
            f"got {asked!r}"
        )
    return Quantization(asked, {}, "quantization", at_load=True)
