"""Mistral and Ministral: a Llama with windows in the layers of `layer_types`, by default in all of them."""

from __future__ import annotations

from gapless.model.family import Family
from gapless.model.fields import Fields
from gapless.model.reading import CommonSizes, window_size, windowed, windows
from gapless.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec


def _mistral(fields: Fields) -> ModelSpec:
    sizes = CommonSizes.of(fields, kv_heads=8)
    attention = AttentionSpec(*sizes.heads, scale=sizes.head_dim**-0.5)
    mlp = MlpSpec(sizes.middle, sizes.activation(fields))
    window = 0 if fields.null("sliding_window") else window_size(fields)
    layers = [
        LayerSpec(windowed(attention, size), mlp) for size in windows(fields, sizes.layers, window, lambda layer: True)
    ]
    return sizes.model(fields, layers, NormSpec(fields.real("rms_norm_eps", 1e-6, above=0.0)))


MISTRAL = Family(("mistral", "ministral"), _mistral)
