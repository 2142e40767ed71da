"""Model families by the architecture that a config.json names: ours, and plug-ins'. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gapless.base.plug_ins import load, plug_ins
from gapless.model.fields import Fields

MODEL_PLUG_INS = "gapless.models"
"""Group of entry points: an architecture, and its `Family`"""


@dataclass(frozen=True)
class Family:
    """How the models of an architecture differ from Llama's."""

    model_types: tuple[str, ...]
    """Values of a config's model_type"""
    flags: Callable[[Fields], dict[str, Any]]
    """Returns fields of `ModelConfig` from a config.json, beside the sizes"""
    activations: tuple[str, ...] = ("silu", "swish")
    """Values of hidden_act that the forward computes: two names of one function by default"""
    reads: frozenset[str] = frozenset()
    """Fields of `known_fields.OTHER_FORWARD` that the forward computes or `flags` checks"""
    model: Callable[..., Any] | None = None
    """Makes the model from the arguments of `DenseModel`, a subclass of that; None for itself"""
    loaded: Callable[[Any], None] | None = None
    """Changes `Params` in place after they were read from a checkpoint"""


def _llama(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": fields.flag("mlp_bias", False)}


def _qwen2(fields: Fields) -> dict[str, Any]:
    return {"qkv_bias": True}


def _qwen3(fields: Fields) -> dict[str, Any]:
    bias = fields.flag("attention_bias", False)
    return {"qkv_bias": bias, "output_bias": bias, "qk_norm": True}


MODEL_FAMILIES = {
    "LlamaForCausalLM": Family(("llama",), _llama),
    "Qwen2ForCausalLM": Family(("qwen2",), _qwen2),
    "Qwen3ForCausalLM": Family(("qwen3",), _qwen3),
    "MiMoForCausalLM": Family(("mimo", "qwen2"), _qwen2),
}
EAGLE_FAMILIES = {name: Family((), _llama) for name in ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")}
"""Architectures of EAGLE-3 heads"""


def architectures() -> list[str]:
    """Return the architectures of models that can be served."""
    return [*MODEL_FAMILIES, *plug_ins(MODEL_PLUG_INS)]


def family_of(architecture: str) -> Family:
    """Return the family of an architecture that exists. Raises ConfigError if a plug-in cannot be imported."""
    family: Family = (MODEL_FAMILIES | EAGLE_FAMILIES).get(architecture) or load(
        MODEL_PLUG_INS, architecture, "architectures"
    )
    return family
