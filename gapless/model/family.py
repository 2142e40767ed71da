"""A family of models: how its config.json is read, and the names of its tensors. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gapless.model.fields import Fields
from gapless.model.spec import LayerSpec, ModelSpec


@dataclass(frozen=True)
class TensorNames:
    """The modules of a checkpoint, each without `.weight` or `.bias`; names in a layer follow its prefix."""

    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    head: str = "lm_head"
    positions: str = ""
    layer: str = "model.layers.{}"
    """Prefix of a layer, with {} for its number"""
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Modules of a product: one for each of its projections, or one for all"""
    output: tuple[str, ...] = ("self_attn.o_proj",)
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: tuple[str, ...] = ("mlp.down_proj",)
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    input_norm: str = "input_layernorm"
    attention_norm: str = "post_attention_layernorm"
    """The norm of attention's result, in orders that have one"""
    mlp_norm: str = "post_attention_layernorm"
    output_norm: str = "post_feedforward_layernorm"
    """The norm of the MLP's result, in orders that have one"""
    base: str = "model."
    """Prefix of all but the head, which a checkpoint of the base model alone lacks"""
    unread: tuple[str, ...] = ("rotary_emb.inv_freq",)
    """Ends of the names of tensors that hold no parameters"""
    transposed: bool = False
    """The checkpoint stores products as [inputs, outputs]."""
    norms_lack_one: bool = False
    """A norm multiplies by 1 + its weight."""

    def modules(self, product: str) -> tuple[str, ...]:
        """Return the modules of a product of `LayerSpec.products`."""
        found: tuple[str, ...] = getattr(self, product)
        return found

    def outputs(self, product: str, layer: LayerSpec, hidden: int) -> tuple[int, ...]:
        """Return the outputs of each module of a product."""
        outputs = layer.products(hidden)[product].outputs
        return outputs if len(self.modules(product)) == len(outputs) else (sum(outputs),)


LLAMA_NAMES = TensorNames()


@dataclass(frozen=True)
class Family:
    """The models of an architecture."""

    model_types: tuple[str, ...]
    """Values of a config's model_type"""
    read: Callable[[Fields], ModelSpec]
    """Reads a config.json. Raises CheckpointError naming the file and the field; Foreign if the forward is another."""
    names: TensorNames = LLAMA_NAMES
    reads: frozenset[str] = frozenset()
    """Fields of `known_fields.OTHER_FORWARD` that `read` reads or checks"""
    code: bool = False
    """Checkpoints name code (auto_map), which the family replaces."""
    model: Callable[..., Any] | None = None
    """Makes the model from the arguments of `Decoder`, a subclass of that; None for itself"""
