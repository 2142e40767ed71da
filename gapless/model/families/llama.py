"""Llama 3.x, and EAGLE-3 heads, whose layer is Llama's."""

from __future__ import annotations

from gapless.model.family import Family
from gapless.model.fields import Fields
from gapless.model.reading import CommonSizes, windows
from gapless.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec


def _read(fields: Fields) -> ModelSpec:
    sizes, bias = CommonSizes.of(fields), fields.flag("attention_bias", False)
    attention = AttentionSpec(*sizes.heads, scale=sizes.head_dim**-0.5, bias=bias, output_bias=bias)
    mlp = MlpSpec(sizes.middle, sizes.activation(fields), bias=fields.flag("mlp_bias", False))
    layers = [LayerSpec(attention, mlp) for _ in windows(fields, sizes.layers)]
    return sizes.model(fields, layers, NormSpec(fields.real("rms_norm_eps", 1e-6, above=0.0)))


LLAMA = Family(("llama",), _read)
EAGLE = Family((), _read)
