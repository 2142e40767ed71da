"""The format of a model's weights. Imports no torch."""

from __future__ import annotations

from collections import Counter

from gapless.base.plug_ins import load
from gapless.kernels.kinds import DENSE, WeightLayout
from gapless.model.config import ModelConfig
from gapless.model.formats import WEIGHT_FORMATS
from gapless.model.formats.rounded import RoundedFormat
from gapless.model.formats.seam import WeightFormat
from gapless.model.quantization import FORMAT_PLUG_INS
from gapless.model.spec import LayerSpec


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


def product_layout(
    form: WeightFormat | None, config: ModelConfig, name: str, layer: LayerSpec, prefix: str
) -> WeightLayout:
    """Return the layout that the modules of a layer's product share; the plain one if they differ. Their names follow
    `prefix`."""
    if form is None:
        return DENSE
    hidden, names = config.spec.hidden_size, config.names
    modules = zip(names.modules(name), names.outputs(name, layer, hidden), strict=True)
    inputs = layer.products(hidden)[name].inputs
    stored = [form.weight(f"{prefix}.{module}", size, inputs) for module, size in modules]
    found = {DENSE if one is None else one.layout for one in stored}
    return found.pop() if len(found) == 1 else DENSE


def layouts_of(config: ModelConfig) -> Counter[tuple[str, str]]:
    """Count the products of a native model's layers by their layouts, each with why it is dense if a format stores it.
    Raises as `format_of`."""
    form, names, hidden, found = format_of(config), config.names, config.spec.hidden_size, Counter[tuple[str, str]]()
    if form is None:
        return found
    for number, layer in enumerate(config.spec.layers):
        prefix = names.layer.format(number)
        for name, product in layer.products(hidden).items():
            modules = zip(names.modules(name), names.outputs(name, layer, hidden), strict=True)
            stored = [form.weight(f"{prefix}.{module}", size, product.inputs) for module, size in modules]
            kinds = {("plain", "") if one is None else (str(one.layout), one.why_dense) for one in stored}
            found[kinds.pop() if len(kinds) == 1 else ("dense", "the modules of a product are stored in two ways")] += 1
    return found
