"""Answers two prompts by the continuous batching of transformers, whose loop runs on a thread of its own."""

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_key_value_heads=2)
config = LlamaConfig(**sizes, num_hidden_layers=2, max_position_embeddings=256, eos_token_id=63, pad_token_id=0)
model = LlamaForCausalLM(config).eval().to("cuda")
model.set_attn_implementation("sdpa")
settings = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=63, pad_token_id=0)
small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)  # or it fills the memory that it finds with masks
prompts = [[1, 5, 7, 9], [1, 6, 8]]
outputs = model.generate_batch(prompts, settings, continuous_batching_config=small, progress_bar=False)
print(len(outputs), "done")
