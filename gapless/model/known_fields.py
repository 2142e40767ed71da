"""Fields of checkpoints and adapters that nothing here reads, and their neutral values.

The start warns of every other one by file, field and value.
"""

from __future__ import annotations

from typing import Any

Values = dict[str, tuple[Any, ...]]

_GENERATION_ANY = """
    _commit_hash _from_model_config assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight
    assistant_lookbehind bos_token_id cache_config cache_implementation compile_config continuous_batching_config
    decoder_start_token_id disable_compile early_stopping is_assistant low_memory max_cache_len max_matching_ngram_size
    num_assistant_tokens num_assistant_tokens_schedule output_attentions output_hidden_states output_logits
    output_scores pad_token_id prefill_chunk_size prompt_lookup_num_tokens remove_invalid_values
    return_dict_in_generate speculation_type target_lookbehind transformers_version use_cache use_mtp
"""
_NEUTRAL: Values = {
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences", "top_h", "typical_p"), (1,)),
    **dict.fromkeys(("encoder_repetition_penalty", "guidance_scale", "length_penalty"), (1,)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("diversity_penalty", "min_length", "min_new_tokens", "penalty_alpha"), (0,)),
}
GENERATION_FIELDS: Values = dict.fromkeys(_GENERATION_ANY.split(), ()) | _NEUTRAL
"""Fields of generation_config.json"""

_CONFIG_ANY = """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _experts_implementation
    _experts_implementation_internal _flash_attn_2_enabled _name_or_path attention_dropout attn_implementation
    attn_pdrop chunk_size_feed_forward cls_token_id cross_attention_hidden_size embd_pdrop experts_implementation
    finetuning_task gradient_checkpointing hidden_dropout id2label initializer_range is_decoder is_llama_config
    label2id mask_token_id name_or_path n_ctx num_labels num_nextn_predict_layers prefix pretraining_tp problem_type
    resid_pdrop return_dict rope_parameters.finetuned rope_scaling.finetuned sep_token_id
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj task_specific_params
    tf_legacy_loss tie_encoder_decoder tie_last_hidden_states tokenizer_class torchscript transformers.js_config
    unk_token_id unsloth_fixed unsloth_version use_bfloat16 use_return_dict
"""
_SAMPLING_OF_OLD_CONFIGS: Values = {
    **dict.fromkeys(("repetition_penalty", "temperature", "top_p"), (1,)),
    **{"max_length": (20,), "top_k": (50,)},
}
_OF_COHERE: Values = {
    **dict.fromkeys(("use_embedding_sharing", "use_gated_activation", "use_parallel_block"), (True,)),
    **{"layer_switch": (4,), "order_of_interleaved_layers": ("local_attn_first",)},
    **{"position_embedding_type": ("rope_gptj",), "use_parallel_embedding": (True,)},
}
CONFIG_FIELDS: Values = (
    GENERATION_FIELDS | _SAMPLING_OF_OLD_CONFIGS | _OF_COHERE | dict.fromkeys(_CONFIG_ANY.split(), ())
)
"""Fields of config.json, which held what generation_config.json does in old checkpoints"""

_OTHER_FORWARD = """
    add_cross_attention alibi attention_chunk_size attention_multiplier attention_sink attn_logit_softcapping
    attn_temperature_tuning compression_config dim_model_base final_logit_softcapping first_k_dense_replace
    is_encoder_decoder kv_lora_rank moe_intermediate_size n_routed_experts no_rope_layer_interval
    no_rope_layers num_experts num_local_experts parallel_attn per_layer_config pruned_heads q_lora_rank qk_layernorm
    qk_norm quantization query_pre_attn_scalar rope_interleave rope_interleaved scale_depth
    use_alibi use_bidirectional_attention use_parallel_residual use_qk_norm
"""
OTHER_FORWARD: Values = {
    **dict.fromkeys(_OTHER_FORWARD.split(), (0,)),
    **dict.fromkeys(
        ("embedding_multiplier", "logit_scale", "logits_scaling", "residual_multiplier", "scale_emb"), (1,)
    ),
    **{"hidden_activation": ("silu",), "rotary_pct": (1,)},
}
"""Fields that change a model's computation, and their neutral values"""
MUST_BE_TRUE = ("causal", "is_causal", "scale_attn_weights")

_ADAPTER_ANY = """
    auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config fan_in_fan_out inference_mode
    loftq_config lora_dropout lora_ga_config megatron_core peft_version qalora_group_size revision runtime_config
    task_type
"""
ADAPTER: Values = dict.fromkeys(_ADAPTER_ANY.split(), ())
"""Fields of adapter_config.json: labels, what concerns training alone, and the settings of variants that are off"""
