"""Gemma: scaled embeddings, norms whose weights lack one, and a gated MLP with GELU."""

from __future__ import annotations

from gapless.model.family import Family, Names
from gapless.model.fields import Fields
from gapless.model.reading import Sizes
from gapless.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec


def read(fields: Fields) -> ModelSpec:
    sizes, bias = Sizes.of(fields), fields.flag("attention_bias", False)
    attention = AttentionSpec(*sizes.heads, scale=sizes.head_dim**-0.5, bias=bias, output_bias=bias)
    layer = LayerSpec(
        attention, MlpSpec(sizes.middle, sizes.activation(fields, "hidden_activation", "gelu_pytorch_tanh"))
    )
    norm = NormSpec(fields.real("rms_norm_eps", 1e-6, above=0.0))
    factor = sizes.hidden**0.5
    return sizes.model(fields, [layer] * sizes.layers, norm, tied=True, embedding_factor=factor)


FAMILY = Family(("gemma",), read, Names(norms_lack_one=True), reads=frozenset({"hidden_activation"}))
