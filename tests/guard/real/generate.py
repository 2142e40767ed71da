"""Answers two prompts by transformers' generate, in four ways. Comments say what `gapless san` finds in each line."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def tiny(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(layers)
    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_key_value_heads=2)
    config = LlamaConfig(
        **sizes, num_hidden_layers=layers, max_position_embeddings=128, eos_token_id=63, pad_token_id=0
    )
    return LlamaForCausalLM(config).eval().to("cuda")  # once: upload


model, draft = tiny(2), tiny(1)
ids = torch.tensor([[1, 5, 7, 9], [1, 6, 8, 3]], device="cuda")  # once: list-to-device
often = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 6, "min_new_tokens": 6}
greedy = {**often, "do_sample": False}
sampled = {**often, "do_sample": True, "top_k": 10, "top_p": 0.9}
static = {**greedy, "cache_implementation": "static", "disable_compile": True}
assisted = {**greedy, "attention_mask": torch.ones_like(ids[:1]), "assistant_model": draft}
with torch.no_grad():
    model.generate(ids, **greedy)  # loop: host-read; once: host-read list-to-device
    model.generate(ids, **sampled)  # loop: host-read; once: host-read list-to-device
    model.generate(ids, **static)  # loop: host-read; once: host-read list-to-device upload
    model.generate(ids[:1], **assisted)  # loop: data-size host-index host-read; once: list-to-device
print("done")
