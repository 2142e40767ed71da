"""Tiny random models of each family, made by transformers: the reference of the tests."""

from __future__ import annotations

import pytest
import torch
import transformers
from model.paging_driver import VOCAB
from torch import Tensor

# By name: transformers imports a model when it is first asked for, which takes seconds in every worker that collects.
# fmt: off
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "gpt2": ("GPT2", {}),
    "gpt2-wide": ("GPT2", {"n_inner": 72, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3}),
    "olmo2": ("Olmo2", {}),
    "olmo2-biased": ("Olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "olmo3": ("Olmo3", {
        "num_hidden_layers": 5, "sliding_window": 6, "rope_parameters": {
            "full_attention": {"rope_type": "yarn", "factor": 8.0, "rope_theta": 1e4,
                               "original_max_position_embeddings": 256},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    }),
    "cohere2": ("Cohere2", {"sliding_window": 7, "num_hidden_layers": 4}),
    "cohere2-listed": ("Cohere2", {
        "sliding_window": 40, "layer_types": ["full_attention", "sliding_attention"], "attention_bias": True,
    }),
    "cohere": ("Cohere", {}),
    "cohere-biased": ("Cohere", {"attention_bias": True, "head_dim": 24, "layer_norm_eps": 1e-3, "logit_scale": 0.5}),
    "qwen3-mha": ("Qwen3", {"head_dim": 16, "num_key_value_heads": 4, "attention_bias": True}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "gemma": ("Gemma", {"head_dim": 24}),
    "gemma2": ("Gemma2", {
        "head_dim": 24, "num_hidden_layers": 3, "sliding_window": 7, "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0,
    }),
    "gemma2-biased": ("Gemma2", {
        "head_dim": 16, "attention_bias": True, "sliding_window": 20, "tie_word_embeddings": False,
        "attn_logit_softcapping": None, "final_logit_softcapping": None,
    }),
    "gemma3": ("Gemma3", {
        "head_dim": 16, "num_hidden_layers": 4, "sliding_window": 6, "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 20, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 100_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    }),
    "granite": ("Granite", {
        "embedding_multiplier": 3.0, "attention_multiplier": 0.3, "residual_multiplier": 0.6, "logits_scaling": 4.0,
    }),
    "granite-biased": ("Granite", {"attention_bias": True, "mlp_bias": True, "embedding_multiplier": 3.0}),
    "ministral": ("Ministral", {
        "head_dim": 12, "sliding_window": 16, "layer_types": ["full_attention", "sliding_attention"],
    }),
    "mistral": ("Mistral", {"head_dim": 12, "sliding_window": 5}),
    "mistral-full": ("Mistral", {"sliding_window": None}),
    "phi3": ("Phi3", {"sliding_window": 17, "pad_token_id": 0}),
    "phi3-part": ("Phi3", {"hidden_size": 64, "pad_token_id": 0, "tie_word_embeddings": True, "rope_parameters": {
        "rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.75,
    }}),
}
# fmt: on
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
QUICK = ("llama-biased", "qwen3", "gpt2", "cohere2", "olmo3", "gemma2", "gemma3", "granite", "phi3-part")
EVERY = [pytest.param(name, marks=() if name in QUICK else pytest.mark.seeds) for name in FAMILIES]
"""The families for parametrize: `make prove` runs those that differ less from others"""
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


GPT2_NAMES = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}  # fmt: skip


def gpt2_sizes(settings: dict[str, object]) -> dict[str, object]:
    """These sizes by the names of GPT-2."""
    renamed = {GPT2_NAMES.get(name, name): value for name, value in settings.items()}
    return {name: value for name, value in renamed.items() if name not in ("intermediate_size", "num_key_value_heads")}


def reference(family: str = "llama", **changes: object) -> transformers.PreTrainedModel:
    """A model of transformers with random weights, large enough that every term matters."""
    kind, flags = FAMILIES[family]
    settings = {**SIZES, **flags, **changes}
    named = getattr(transformers, CONFIGS.get(kind, f"{kind}Config"))
    # The sdpa of transformers 5.17 leaves the soft cap out, silently.
    eager = {"attn_implementation": "eager"} if settings.get("attn_logit_softcapping") else {}
    config = named(**(gpt2_sizes(settings) if kind == "GPT2" else settings), **eager)
    torch.manual_seed(7)
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{kind}{head}")(config).eval()
    return random_weights(model)


def random_weights(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return model


def reference_logits(model: transformers.PreTrainedModel, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()
