"""Phi-3, 3.5, 4 and 4-mini: fused projections, rope of part of a head, and longrope."""

from __future__ import annotations

from gapless.model.family import Family, TensorNames
from gapless.model.fields import Fields
from gapless.model.reading import CommonSizes, read_rope, window_size, windowed, windows
from gapless.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec

_NAMES = TensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def _phi3(fields: Fields) -> ModelSpec:
    sizes, rope = CommonSizes.of(fields), read_rope(fields, partial=True)
    if rope.type not in ("default", "longrope"):
        raise fields.foreign("rope_scaling", "must be of type longrope", rope.type)
    if fields.get("original_max_position_embeddings") is None and rope.type == "longrope":
        raise fields.foreign("original_max_position_embeddings", "must be there beside longrope")
    window = 0 if fields.get("sliding_window") is None else window_size(fields)
    if any(size != window for size in windows(fields, sizes.layers, window, lambda layer: True)):
        raise fields.foreign("layer_types", "must be sliding_attention in every layer, beside sliding_window")
    attention = windowed(AttentionSpec(*sizes.heads, scale=sizes.head_dim**-0.5), window)
    layer = LayerSpec(attention, MlpSpec(sizes.middle, sizes.activation(fields)))
    norm = NormSpec(fields.real("rms_norm_eps", 1e-5, above=0.0))
    return sizes.model(fields, [layer] * sizes.layers, norm, ropes=(rope,))


PHI3 = Family(("phi3",), _phi3, _NAMES, code=True)
