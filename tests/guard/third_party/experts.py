"""A mixture of experts of transformers, which generates by each way that it has to run experts: the argument."""

import sys

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

config = Qwen3MoeConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, moe_intermediate_size=16, num_attention_heads=2,
    num_key_value_heads=2, head_dim=8, num_hidden_layers=2, num_experts=4, num_experts_per_tok=2, pad_token_id=0,
    eos_token_id=63,
)  # fmt: skip
torch.manual_seed(0)
model = Qwen3MoeForCausalLM(config).eval().cuda()
if sys.argv[1] != "default":
    model.set_experts_implementation(sys.argv[1])
ids = torch.randint(1, 62, (1, 4), device="cuda")
with torch.no_grad():
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, min_new_tokens=5, do_sample=False)
print("done")
