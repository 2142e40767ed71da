"""Tiny random models of each family, made by transformers: the reference of the tests."""

from __future__ import annotations

import torch
from paging_driver import VOCAB
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "llama-biased": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-mha": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 16, "num_key_value_heads": 4, "attention_bias": True}),
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


def reference(family: str = "llama", **changes: object) -> PreTrainedModel:
    """A model of transformers with random weights, large enough that every term matters."""
    config_class, model_class, flags = FAMILIES[family]
    torch.manual_seed(7)
    model = model_class(config_class(**{**SIZES, **flags, **changes})).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return model


def reference_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].float()
