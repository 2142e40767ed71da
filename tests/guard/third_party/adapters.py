"""peft's LoRA on a small Llama of transformers, trained for a few steps."""

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_attention_heads=2, num_hidden_layers=2, pad_token_id=0
)
model = get_peft_model(LlamaForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj", "v_proj"])).cuda()
optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])
ids = torch.randint(0, 64, (2, 12), device="cuda")
for _ in range(3):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("done")
