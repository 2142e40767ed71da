"""GPT-2: learned positions, LayerNorm, fused queries, keys and values, an MLP without a gate, weights transposed."""

from __future__ import annotations

from gapless.model.family import Family, TensorNames
from gapless.model.fields import Fields
from gapless.model.reading import CommonSizes
from gapless.model.spec import AttentionSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec

_NAMES = TensorNames(
    embedding="transformer.wte",
    norm="transformer.ln_f",
    positions="transformer.wpe",
    layer="transformer.h.{}",
    qkv=("attn.c_attn",),
    output=("attn.c_proj",),
    gate_up=("mlp.c_fc",),
    down=("mlp.c_proj",),
    input_norm="ln_1",
    mlp_norm="ln_2",
    base="transformer.",
    unread=(".attn.bias", ".attn.masked_bias"),
    transposed=True,
)
_OTHER = ("reorder_and_upcast_attn", "scale_attn_by_inverse_layer_idx")


def _size(fields: Fields, name: str, general: str, default: int) -> int:
    """Read a size by its own name, or by the one that other families give it."""
    size = fields.whole(name, fields.whole(general, default))
    if fields.whole(general, size) != size:
        raise fields.error(general, f"must be {name} ({size}), or be left out")
    return size


def _read(fields: Fields) -> ModelSpec:
    hidden, heads = _size(fields, "n_embd", "hidden_size", 768), _size(fields, "n_head", "num_attention_heads", 12)
    if hidden % heads:
        raise fields.error("n_head", f"must divide n_embd ({hidden})", heads)
    if hidden // heads % 2:
        raise fields.foreign("n_head", f"must give heads an even width of n_embd ({hidden})", heads)
    for name in _OTHER:
        if fields.flag(name, False):
            raise fields.foreign(name, "must be false: attention is scaled by the width of heads alone")
    scale = (hidden // heads) ** -0.5 if fields.flag("scale_attn_weights", True) else 1.0
    attention = AttentionSpec(heads, heads, hidden // heads, scale, rope=None, bias=True, output_bias=True)
    activation = CommonSizes.activation(fields, "activation_function", "gelu_new")
    mlp = MlpSpec(fields.whole("n_inner", 4 * hidden), activation, gated=False, bias=True)
    return ModelSpec(
        fields.whole("vocab_size", 50_257),
        hidden,
        (LayerSpec(attention, mlp),) * _size(fields, "n_layer", "num_hidden_layers", 12),
        NormSpec(fields.real("layer_norm_epsilon", 1e-5, above=0.0), centered=True, bias=True),
        ropes=(),
        tied=fields.flag("tie_word_embeddings", True),
        positions=_size(fields, "n_positions", "max_position_embeddings", 1024),
    )


GPT2 = Family(("gpt2",), _read, _NAMES, frozenset(("scale_attn_weights",)))
