"""OLMo 2 and 3: norms after attention and MLP, and over all queries and all keys. OLMo 3 has windows, and a rope of
their own."""

from __future__ import annotations

from dataclasses import replace

from gapless.model.family import Family
from gapless.model.fields import Fields
from gapless.model.reading import CommonSizes, read_ropes, window_size, windowed, windows
from gapless.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormOrder, NormSpec, QKNorm


def _layer(fields: Fields, sizes: CommonSizes) -> LayerSpec:
    bias = fields.flag("attention_bias", False)
    attention = AttentionSpec(
        *sizes.heads, scale=sizes.head_dim**-0.5, qk_norm=QKNorm.ALL, bias=bias, output_bias=bias
    )  # fmt: skip
    return LayerSpec(attention, MlpSpec(sizes.middle, sizes.activation(fields)), NormOrder.POST)


def _norm(fields: Fields) -> NormSpec:
    return NormSpec(fields.real("rms_norm_eps", 1e-5, above=0.0))


def _olmo2(fields: Fields) -> ModelSpec:
    sizes = CommonSizes.of(fields)
    layer = _layer(fields, sizes)
    return sizes.model(fields, [layer for _ in windows(fields, sizes.layers)], _norm(fields))


def _olmo3(fields: Fields) -> ModelSpec:
    sizes = CommonSizes.of(fields)
    layer = _layer(fields, sizes)
    attention = layer.attention
    layers = [
        replace(layer, attention=replace(windowed(attention, size), rope=1 if size else 0))
        for size in windows(fields, sizes.layers, window_size(fields), lambda number: (number + 1) % 4 != 0)
    ]
    return sizes.model(fields, layers, _norm(fields), ropes=read_ropes(fields, 500_000.0, 500_000.0, local=""))


OLMO2 = Family(("olmo2",), _olmo2)
OLMO3 = Family(("olmo3",), _olmo3)
