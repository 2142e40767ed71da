"""Gemma 1, 2 and 3 (text): scaled embeddings, and norms whose weights lack one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from gapless.kernels.kinds import Activation
from gapless.model.family import Family, TensorNames
from gapless.model.fields import Fields
from gapless.model.reading import CommonSizes, read_ropes, window_size, windowed, windows
from gapless.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormOrder, NormSpec, QKNorm

_TANH = "gelu_pytorch_tanh"
_NAMES = TensorNames(norms_lack_one=True)
_SANDWICH = replace(_NAMES, mlp_norm="pre_feedforward_layernorm")


def _gemma(fields: Fields) -> ModelSpec:
    sizes = CommonSizes.of(fields, head_dim=256, kv_heads=16)
    activation = CommonSizes.activation(fields, "hidden_act", _TANH)
    # Checkpoints of Google's name the exact function, and were trained with the approximate one.
    activation = Activation.GELU_TANH if activation is Activation.GELU else activation
    if CommonSizes.activation(fields, "hidden_activation", _TANH) is not Activation.GELU_TANH:
        raise fields.foreign("hidden_activation", f"must be {_TANH}: hidden_act counts")
    layer = LayerSpec(_attention(fields, sizes, sizes.head_dim**-0.5), MlpSpec(sizes.middle, activation))
    return _model(fields, sizes, [layer] * sizes.layers)


def _gemma2(fields: Fields) -> ModelSpec:
    sizes = CommonSizes.of(fields, head_dim=256, kv_heads=4)
    attention = replace(_scaled(fields, sizes), softcap=_cap(fields, "attn_logit_softcapping", 50.0))
    layers = [
        LayerSpec(windowed(attention, size), _mlp(fields, sizes), NormOrder.SANDWICH)
        for size in windows(fields, sizes.layers, window_size(fields), lambda layer: layer % 2 == 0)
    ]
    return _model(fields, sizes, layers, logits_cap=_cap(fields, "final_logit_softcapping", 30.0))


def _gemma3(fields: Fields) -> ModelSpec:
    sizes = CommonSizes.of(fields, head_dim=256, kv_heads=4)
    attention = replace(_scaled(fields, sizes), qk_norm=QKNorm.HEAD)
    pattern = fields.whole("sliding_window_pattern", 6)
    fields.get("_sliding_window_pattern")  # of transformers, beside layer_types
    layers = [
        LayerSpec(replace(windowed(attention, size), rope=1 if size else 0), _mlp(fields, sizes), NormOrder.SANDWICH)
        for size in windows(fields, sizes.layers, window_size(fields), lambda layer: (layer + 1) % pattern != 0)
    ]
    cap, ropes = _cap(fields, "final_logit_softcapping", 0.0), read_ropes(fields, 1_000_000.0, 10_000.0)
    return _model(fields, sizes, layers, logits_cap=cap, ropes=ropes)


def _attention(fields: Fields, sizes: CommonSizes, scale: float) -> AttentionSpec:
    bias = fields.flag("attention_bias", False)
    return AttentionSpec(*sizes.heads, scale=scale, bias=bias, output_bias=bias)


def _scaled(fields: Fields, sizes: CommonSizes) -> AttentionSpec:
    return _attention(fields, sizes, fields.real("query_pre_attn_scalar", 256.0, above=0.0) ** -0.5)


def _mlp(fields: Fields, sizes: CommonSizes) -> MlpSpec:
    activation = CommonSizes.activation(fields, "hidden_activation", _TANH)
    if "hidden_act" in fields and CommonSizes.activation(fields) is not activation:
        fields.unused("hidden_act", "hidden_activation counts")
    return MlpSpec(sizes.middle, activation)


def _cap(fields: Fields, name: str, default: float) -> float:
    """Read the bound of softcapping: 0 for none, which null is too."""
    return 0.0 if fields.null(name) or (not default and name not in fields) else fields.real(name, default, above=0.0)


def _model(fields: Fields, sizes: CommonSizes, layers: Iterable[LayerSpec], **more: Any) -> ModelSpec:
    norm = NormSpec(fields.real("rms_norm_eps", 1e-6, above=0.0))
    return sizes.model(fields, layers, norm, tied=True, embedding_factor=sizes.hidden**0.5, factor_rounded=True, **more)


_READS = frozenset({"hidden_activation", "query_pre_attn_scalar", "final_logit_softcapping"})
GEMMA = Family(("gemma",), _gemma, _NAMES, reads=frozenset({"hidden_activation"}))
GEMMA2 = Family(("gemma2",), _gemma2, _SANDWICH, reads=_READS | {"attn_logit_softcapping"})
GEMMA3 = Family(("gemma3_text",), _gemma3, _SANDWICH, reads=_READS)
