"""The model config that tests share: a Qwen3 of two layers, small enough to run on a CPU in milliseconds."""

from __future__ import annotations

from typing import Any


def tiny_config(**changes: Any) -> dict[str, Any]:
    """The contents of its config.json, with these fields changed or added."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 97, "hidden_size": 32,
        "intermediate_size": 56, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "max_position_embeddings": 2048,
        "dtype": "float32", "tie_word_embeddings": True,
    } | changes  # fmt: skip
