"""Tiny random models of families that transformers computes, by name: the rows of tables of tests."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers

VOCAB = 97
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_HEADS = _SIZES | {"head_dim": 16}
_ALL_HEADS = _SIZES | {"num_key_value_heads": 4}
_GPT = {"vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256}
_FALCON = {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    "moe_intermediate_size": 32, "n_routed_experts": 8, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}  # fmt: skip
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
_DEEPSEEK = _ALL_HEADS | _ROUTED | _LATENT | {"n_group": 2, "topk_group": 1}
_WINDOW = {"sliding_window": 6}
_OTHER = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_HALF = {"partial_rotary_factor": 0.5}


class Row(NamedTuple):
    """A family: the names of its classes in transformers, and the fields of its config."""

    kind: str
    """Of its config and model, without their ends; both names apart by a colon where they differ"""
    fields: dict[str, Any]


SERVED = {
    "afmoe": Row("Afmoe", _HEADS | _WINDOW | _OTHER | {"num_experts": 4, "num_dense_layers": 1}),
    "apertus": Row("Apertus", _SIZES),
    "arcee": Row("Arcee", _HEADS),
    "bitnet": Row("BitNet", _SIZES),
    "cohere": Row("Cohere", _SIZES | {"use_qk_norm": True, "logit_scale": 0.25}),
    "cohere2": Row("Cohere2", _HEADS | _WINDOW | {"num_hidden_layers": 4}),
    "cwm": Row("Cwm", _HEADS | _WINDOW),
    "deepseek-v2": Row("DeepseekV2", _DEEPSEEK | {"v_head_dim": 16, "topk_method": "greedy"}),
    "deepseek-v3": Row("DeepseekV3", _DEEPSEEK | {"v_head_dim": 12}),
    "dots1": Row("Dots1", _HEADS | _ROUTED | {"n_group": 1, "topk_group": 1, "sliding_window": None}),
    "ernie4.5": Row("Ernie4_5", _HEADS),
    "ernie4.5-moe": Row(
        "Ernie4_5_Moe",
        _SIZES | {"moe_intermediate_size": 32, "moe_num_experts": 8, "moe_k": 2, "moe_num_shared_experts": 1,
                  "moe_layer_start_index": 1},
    ),
    "exaone4": Row("Exaone4", _HEADS | _WINDOW | {"num_hidden_layers": 4, "sliding_window_pattern": 4}),
    "flex-olmo": Row("FlexOlmo", _SIZES | {"num_experts": 4, "num_experts_per_tok": 2}),
    "gemma": Row("Gemma", _HEADS),
    "gemma2": Row(
        "Gemma2",
        _HEADS | _WINDOW | {"query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0,
                            "attn_logit_softcapping": 2.0},
    ),
    "gemma3": Row(
        "Gemma3TextConfig:Gemma3ForCausalLM",
        _HEADS | _WINDOW | {"query_pre_attn_scalar": 16, "num_hidden_layers": 3,
                            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "glm": Row("Glm", _HEADS | _HALF),
    "glm4": Row("Glm4", _HEADS | _HALF),
    "glm4-moe": Row("Glm4Moe", _HEADS | _ROUTED | _HALF | {"n_group": 1, "topk_group": 1}),
    "gpt-bigcode": Row("GPTBigCode", _GPT),
    "gpt-neox": Row("GPTNeoX", _SIZES),
    "gpt-oss": Row(
        "GptOss", _HEADS | _WINDOW | _EXPERTS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    ),
    "gpt2": Row("GPT2Config:GPT2LMHeadModel", _GPT),
    "granite": Row(
        "Granite",
        _SIZES | {"logits_scaling": 4.0, "residual_multiplier": 0.5, "embedding_multiplier": 3.0,
                  "attention_multiplier": 0.1},
    ),
    "granitemoe": Row("GraniteMoe", _SIZES | _EXPERTS | {"logits_scaling": 4.0}),
    "granitemoe-shared": Row("GraniteMoeShared", _SIZES | _EXPERTS | {"shared_intermediate_size": 32}),
    "helium": Row("Helium", _HEADS),
    "hunyuan-dense": Row("HunYuanDenseV1", _HEADS),
    "hunyuan-moe": Row("HunYuanMoEV1", _HEADS | {"num_experts": 4, "moe_topk": 2}),
    "llama-dynamic": Row(
        "Llama", _HEADS | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}
    ),
    "llama4": Row(
        "Llama4TextConfig:Llama4ForCausalLM",
        _HEADS | {"num_hidden_layers": 4, "intermediate_size_mlp": 96, "num_local_experts": 4,
                  "num_experts_per_tok": 1, "attention_chunk_size": 6},
    ),
    "minimax-m2": Row("MiniMaxM2", _HEADS | _EXPERTS),
    "ministral": Row("Ministral", _HEADS | _WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}),
    "ministral3": Row("Ministral3", _HEADS),
    "mistral": Row("Mistral", _HEADS | _WINDOW),
    "mixtral": Row("Mixtral", _HEADS | _EXPERTS),
    "modernbert-decoder": Row("ModernBertDecoder", _SIZES | {"local_attention": 12}),
    "nanochat": Row("NanoChat", _SIZES),
    "nemotron": Row("Nemotron", _HEADS),
    "olmo": Row("Olmo", _SIZES),
    "olmo2": Row("Olmo2", _SIZES),
    "olmo3": Row("Olmo3", _SIZES | _WINDOW | {"num_hidden_layers": 4}),
    "olmoe": Row("Olmoe", _SIZES | {"num_experts": 8, "num_experts_per_tok": 2}),
    "opt": Row("OPT", _FALCON | {"ffn_dim": 96, "max_position_embeddings": 256, "word_embed_proj_dim": 64}),
    "persimmon": Row("Persimmon", _SIZES | _HALF),
    "phi": Row("Phi", _SIZES | _HALF),
    "phi3": Row("Phi3", _SIZES),
    "phi3-longrope": Row(
        "Phi3",
        _SIZES | {"original_max_position_embeddings": 256, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 256}},
    ),
    "qwen2-moe": Row("Qwen2Moe", _SIZES | _OTHER | {"shared_expert_intermediate_size": 48}),
    "qwen3-moe": Row("Qwen3Moe", _HEADS | _OTHER | {"decoder_sparse_step": 1, "norm_topk_prob": True}),
    "seed-oss": Row("SeedOss", _HEADS),
    "smollm3": Row("SmolLM3", _SIZES | {"num_hidden_layers": 4}),
    "solar-open": Row("SolarOpen", _HEADS | _ROUTED | {"first_k_dense_replace": 0}),
    "starcoder2": Row("Starcoder2", _SIZES | _WINDOW),
    "vaultgemma": Row("VaultGemma", _HEADS | _WINDOW | {"query_pre_attn_scalar": 16}),
    "youtu": Row("Youtu", _ALL_HEADS | _LATENT | {"v_head_dim": 16}),
}  # fmt: skip
"""Families with the tokens of their own eager run"""

_NO_SEAM = "has no exchangeable attention"
REFUSED = {
    "biogpt": (Row("BioGpt", _SIZES), _NO_SEAM),
    "bloom": (Row("Bloom", {"vocab_size": VOCAB, "hidden_size": 64, "n_layer": 2, "n_head": 4}), _NO_SEAM),
    "codegen": (Row("CodeGen", _GPT | {"rotary_dim": 8}), _NO_SEAM),
    "phimoe": (Row("Phimoe", _SIZES | _EXPERTS), "copies frequencies from the host"),
    "diffllama": (Row("DiffLlama", _SIZES), "a layer attends twice"),
    "doge": (Row("Doge", _SIZES), "a mask of its own"),
    "falcon": (Row("Falcon", _FALCON | {"alibi": False}), _NO_SEAM),
    "falcon-alibi": (Row("Falcon", _FALCON | {"alibi": True}), "alibi"),
    "gptj": (Row("GPTJ", _GPT | {"rotary_dim": 8}), _NO_SEAM),
    "jetmoe": (Row("JetMoe", _SIZES), "JetMoeTopKGating.forward"),
    "lfm2": (Row("Lfm2", _SIZES | {"layer_types": ["conv", "full_attention"]}), "layer_types has 'conv'"),
    "mamba": (Row("Mamba", {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2}), "keeps a state"),
    "mimo-v2": (Row("MiMoV2Flash", _HEADS), "numbers of heads"),
    "mpt": (Row("Mpt", {"vocab_size": VOCAB, "d_model": 64, "n_layers": 2, "n_heads": 4}), _NO_SEAM),
    "rwkv": (Row("Rwkv", {"vocab_size": VOCAB, "hidden_size": 64, "num_hidden_layers": 2}), "keeps a state"),
    "stablelm": (Row("StableLm", _SIZES), _NO_SEAM),
    "t5": (
        Row("T5Config:T5ForConditionalGeneration", {"vocab_size": VOCAB, "d_model": 64, "num_layers": 2}),
        "has no decoder",
    ),
    "xglm": (Row("XGLM", {"vocab_size": VOCAB, "d_model": 64, "ffn_dim": 96, "num_layers": 2}), _NO_SEAM),
}  # fmt: skip
"""Families that are refused, each with a part of the reason"""


def class_name(row: Row) -> str:
    """The name of its class, as config.json has it."""
    return row.kind.split(":")[1] if ":" in row.kind else f"{row.kind}ForCausalLM"


def make(row: Row) -> transformers.PreTrainedModel:
    """A model with random weights, large enough that every term matters."""
    names = row.kind.split(":") if ":" in row.kind else (f"{row.kind}Config", f"{row.kind}ForCausalLM")
    config, model = (getattr(transformers, name) for name in names)
    torch.manual_seed(7)
    made = model(config(**row.fields)).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            is_norm = parameter.ndim == 1 and "norm" in name and not name.endswith("bias")
            parameter.normal_(1.0 if is_norm else 0.0, 0.2)
    return made
