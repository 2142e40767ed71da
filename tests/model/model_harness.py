"""Tiny random models of each family, made by transformers: the reference of the tests."""

from __future__ import annotations

import torch
import transformers
from paging_driver import VOCAB
from torch import Tensor

# By name: transformers imports a model when it is first asked for, which takes seconds in every worker that collects.
FAMILIES = {
    "llama": ("Llama", {}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "gpt2": ("GPT2", {}),
    "gpt2-wide": ("GPT2", {"n_inner": 72, "tie_word_embeddings": False, "layer_norm_epsilon": 1e-3}),
    "olmo2": ("Olmo2", {}),
    "olmo2-biased": ("Olmo2", {"attention_bias": True, "tie_word_embeddings": True}),
    "cohere": ("Cohere", {}),
    "cohere-biased": ("Cohere", {"attention_bias": True, "head_dim": 24, "layer_norm_eps": 1e-3, "logit_scale": 0.5}),
    "qwen3-mha": ("Qwen3", {"head_dim": 16, "num_key_value_heads": 4, "attention_bias": True}),
}
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
    config = getattr(transformers, f"{kind}Config")(**(gpt2_sizes(settings) if kind == "GPT2" else settings))
    torch.manual_seed(7)
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{kind}{head}")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return model


def reference_logits(model: transformers.PreTrainedModel, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()
