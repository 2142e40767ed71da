"""Cohere and Cohere 2: attention beside the MLP, LayerNorm without bias, interleaved ropes, scaled logits.

Layers of Cohere 2 have a window and a rope, or neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gapless.model.family import Family
from gapless.model.fields import Fields
from gapless.model.reading import CommonSizes, read_rope, window_size, windowed, windows
from gapless.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormOrder, NormSpec


def _attention(fields: Fields, sizes: CommonSizes) -> AttentionSpec:
    bias = fields.flag("attention_bias", False)
    return AttentionSpec(*sizes.heads, scale=sizes.head_dim**-0.5, bias=bias, output_bias=bias)


def _model(fields: Fields, sizes: CommonSizes, attentions: Iterable[AttentionSpec], theta: float) -> ModelSpec:
    mlp = MlpSpec(sizes.middle, sizes.activation(fields))
    return sizes.model(
        fields,
        [LayerSpec(attention, mlp, NormOrder.PARALLEL) for attention in attentions],
        NormSpec(fields.real("layer_norm_eps", 1e-5, above=0.0), centered=True),
        tied=True,
        ropes=(replace(read_rope(fields, theta=theta), interleaved=True),),
        logits_factor=fields.real("logit_scale", 0.0625),
    )


def _cohere(fields: Fields) -> ModelSpec:
    sizes = CommonSizes.of(fields)
    attention = _attention(fields, sizes)
    return _model(fields, sizes, [attention for _ in windows(fields, sizes.layers)], theta=500_000.0)


def _cohere2(fields: Fields) -> ModelSpec:
    sizes, every = CommonSizes.of(fields), fields.whole("sliding_window_pattern", 4)
    fields.get("_sliding_window_pattern")  # of transformers, beside layer_types
    sizes_of_windows = windows(fields, sizes.layers, window_size(fields), lambda layer: (layer + 1) % every != 0)
    attention = _attention(fields, sizes)
    attentions = [windowed(attention, size) if size else replace(attention, rope=None) for size in sizes_of_windows]
    return _model(fields, sizes, attentions, theta=10_000.0)


_READS = frozenset(("logit_scale",))
COHERE = Family(("cohere",), _cohere, reads=_READS)
COHERE2 = Family(("cohere2",), _cohere2, reads=_READS)
