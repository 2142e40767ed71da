"""torchtitan's Llama, sharded by its own FSDP and checkpointed, trained for a few steps with its loss and clipping."""

import torch
import torch.distributed as dist
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry

dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
parallelism = ParallelismConfig()
dims = ParallelDims.from_config(parallelism, 1)
spec = model_registry("debugmodel")
for layer in spec.model.layers:  # in place of FlexAttention, which is compiled by Triton
    layer.attention.inner_attention = ScaledDotProductAttention.Config()
with torch.device("meta"):
    model = spec.model.build()
spec.parallelize_fn(
    model, parallel_dims=dims, training=TrainingConfig(), parallelism=parallelism, compile_config=CompileConfig(),
    ac_config=FullAC.Config(), dump_folder="",
)  # fmt: skip
model.to_empty(device="cuda")
with torch.no_grad():
    model.init_states(buffer_device=torch.device("cuda"))
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
tokens = torch.randint(0, 2000, (2, 65), device="cuda")
for _ in range(3):
    logits = model(tokens[:, :-1])
    loss = cross_entropy_loss(logits, tokens[:, 1:])
    loss.backward()
    norm = clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(float(norm))
dist.destroy_process_group()
print("done")
