"""Qwen 2, 2.5 and 3, and MiMo, which is a Qwen 2 with MTP layers."""

from __future__ import annotations

from dataclasses import replace

from gapless.model.family import Family
from gapless.model.fields import Fields
from gapless.model.reading import CommonSizes, windowed, windows
from gapless.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, QKNorm


def _model(fields: Fields, sizes: CommonSizes, attention: AttentionSpec) -> ModelSpec:
    first = fields.whole("max_window_layers", 28, low=0)
    none = fields.null("sliding_window") or not fields.flag("use_sliding_window", False)
    window = 0 if none else fields.whole("sliding_window", 4096)
    mlp = MlpSpec(sizes.middle, sizes.activation(fields))
    layers = [
        LayerSpec(windowed(attention, size), mlp)
        for size in windows(fields, sizes.layers, window, lambda layer: layer >= first)
    ]
    return sizes.model(fields, layers, NormSpec(fields.real("rms_norm_eps", 1e-6, above=0.0)))


def _qwen2(fields: Fields) -> ModelSpec:
    sizes = CommonSizes.of(fields)
    return _model(fields, sizes, AttentionSpec(*sizes.heads, scale=sizes.head_dim**-0.5, bias=True))


def _qwen3(fields: Fields) -> ModelSpec:
    sizes, bias = CommonSizes.of(fields, head_dim=128), fields.flag("attention_bias", False)
    scale = sizes.head_dim**-0.5
    attention = AttentionSpec(*sizes.heads, scale=scale, bias=bias, output_bias=bias, qk_norm=QKNorm.HEAD)
    return _model(fields, sizes, attention)


QWEN2 = Family(("qwen2",), _qwen2)
QWEN3 = Family(("qwen3",), _qwen3)
MIMO = replace(QWEN2, model_types=("mimo", "qwen2"), code=True)
