"""Mistral, whose layers have one window or none, and Ministral, whose layers have windows by kind."""

from __future__ import annotations

from gapless.model.family import Family
from gapless.model.fields import Fields
from gapless.model.reading import Sizes, window_size, windowed, windows
from gapless.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec


def _ministral(fields: Fields) -> ModelSpec:
    sizes = Sizes.of(fields, kv_heads=8)
    window = 0 if fields.null("sliding_window") else window_size(fields)
    attention, mlp = (
        AttentionSpec(*sizes.heads, scale=sizes.head_dim**-0.5),
        MlpSpec(sizes.middle, sizes.activation(fields)),
    )
    sizes_of = windows(fields, sizes.layers, window, lambda layer: True)
    layers = [LayerSpec(windowed(attention, size), mlp) for size in sizes_of]
    return sizes.model(fields, layers, NormSpec(fields.real("rms_norm_eps", 1e-6, above=0.0)))


def _mistral(fields: Fields) -> ModelSpec:
    spec = _ministral(fields)
    if len({layer.attention.reach for layer in spec.layers}) > 1:
        raise fields.foreign("layer_types", "must be of one kind: a Mistral has windows in all layers, or in none")
    if not fields.null("sliding_window") and not spec.layer.attention.size:
        raise fields.foreign("layer_types", "must be sliding_attention, or sliding_window null")
    return spec


MISTRAL = Family(("mistral",), _mistral)
MINISTRAL = Family(("ministral",), _ministral)
