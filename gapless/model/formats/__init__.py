"""Formats of weights, by the `quant_method` of a checkpoint: ours, and plug-ins'."""

from __future__ import annotations

from collections.abc import Callable

from gapless.base.plug_ins import load
from gapless.model.config import ModelConfig
from gapless.model.formats.rounded import RoundedFormat
from gapless.model.formats.seam import WeightFormat
from gapless.model.quantization import FORMAT_PLUG_INS, Quantization

WEIGHT_FORMATS: dict[str, Callable[[Quantization], WeightFormat]] = {}
"""A line for each of `quantization.QUANT_METHODS`"""


def format_of(config: ModelConfig) -> WeightFormat | None:
    """Return the format of a model's weights; None for plain ones. Raises CheckpointError for a field of
    quantization_config, ConfigError if a plug-in cannot be imported."""
    asked = config.quantization
    if asked is None:
        return None
    if asked.at_load:
        return RoundedFormat(asked, config.names.layer.partition("{")[0])
    made = WEIGHT_FORMATS.get(asked.method) or load(FORMAT_PLUG_INS, asked.method, "quantization_config")
    found: WeightFormat = made(asked)
    return found
