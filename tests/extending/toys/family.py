"""Arcee: a Llama whose MLP has no gate, and squares what ReLU leaves."""

from __future__ import annotations

from gapless.model.family import Family, TensorNames
from gapless.model.fields import Fields
from gapless.model.reading import CommonSizes
from gapless.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec


def read(fields: Fields) -> ModelSpec:
    sizes, bias = CommonSizes.of(fields), fields.flag("attention_bias", False)
    attention = AttentionSpec(*sizes.heads, scale=sizes.head_dim**-0.5, bias=bias, output_bias=bias)
    activation = sizes.activation(fields, default="relu2")
    layer = LayerSpec(attention, MlpSpec(sizes.middle, activation, gated=False, bias=fields.flag("mlp_bias", False)))
    norm = NormSpec(fields.real("rms_norm_eps", 1e-5, above=0.0))
    return sizes.model(fields, [layer] * sizes.layers, norm)


FAMILY = Family(("arcee",), read, TensorNames(gate_up=("mlp.up_proj",)))
