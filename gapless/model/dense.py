"""The dense decoder of Llama 3.x, Qwen2 / Qwen2.5 and Qwen3: one forward, families differ by what is None.

Nothing here reads the device, and every shape follows from the batch's host integers, so that a forward can be
captured as one graph.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import embedding, silu

from gapless.model.attention import AttentionPlan, PagedAttention, plan_attention
from gapless.model.config import ModelConfig
from gapless.model.linear import Linear
from gapless.model.params import Layer, Params
from gapless.model.rope import Rope, rotate
from gapless.model.seam import BatchShape, KVCache, StepInputs


class Block(NamedTuple):
    """One decoder layer, ready to run; shapes as in `params.Layer`."""

    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


def _block(layer: Layer) -> Block:
    return Block(
        layer.input_norm,
        Linear(layer.qkv, layer.qkv_bias),
        layer.qk_norm,
        Linear(layer.output, layer.output_bias),
        layer.mlp_norm,
        Linear(layer.gate_up, layer.gate_up_bias),
        Linear(layer.down, layer.down_bias),
    )


class DenseModel:
    """Implements the `Model` protocol over `params`, which lie on one device in one dtype.

    It takes `params` over and empties its list of layers, so that a layer's loaded matrices can be let go while the
    next is put into the layout of the device.
    """

    def __init__(self, config: ModelConfig, params: Params, max_model_len: int) -> None:
        self.config = config
        self.embedding, self.norm = params.embedding, params.norm
        self.blocks: list[Block] = []
        while params.layers:
            self.blocks.append(_block(params.layers.pop(0)))
        self.head = Linear(params.head)
        self.dtype = params.embedding.dtype
        self.vocab_size = config.vocab_size
        self.max_model_len = max_model_len
        self.rope = Rope(config, max_model_len, params.embedding.device)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one KV page of all layers."""
        config = self.config
        return config.layers * 2 * page_size * config.kv_heads * config.head_dim * self.dtype.itemsize

    def new_cache(self, pages: int, page_size: int, device: torch.device) -> KVCache:
        """A zeroed cache of `pages` pages, the null page included."""
        config = self.config
        return KVCache.zeros(
            pages, config.layers, page_size, config.kv_heads, config.head_dim, dtype=self.dtype, device=device
        )

    def plan(self, shape: BatchShape) -> AttentionPlan:
        """Host decisions for this batch, from bounds alone."""
        return plan_attention(shape, self.config.kv_heads * self.config.head_dim)

    def forward(self, inputs: StepInputs, plan: AttentionPlan, cache: KVCache) -> Tensor:
        """Hidden states [T, hidden] after the last norm; writes the KV of all T tokens."""
        x = embedding(inputs.ids, self.embedding)
        cos, sin = self.rope.at(inputs.positions, self.dtype)
        attention = PagedAttention(inputs, plan, cache, self.config.heads)
        for i, block in enumerate(self.blocks):
            q, k, v = self._qkv(block, self._norm(x, block.input_norm), cos, sin)
            x = x + block.output(attention.forward(q, k, v, i))
            gate, up = block.gate_up(self._norm(x, block.mlp_norm)).chunk(2, dim=-1)
            x = x + block.down(silu(gate) * up)
        return self._norm(x, self.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, vocab]."""
        return self.head(hidden).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        # computed in float32 whatever the dtype of x
        return torch.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)

    def _qkv(self, block: Block, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [T, heads, head_dim] and keys, and values [T, kv_heads, head_dim]."""
        config = self.config
        qkv = block.qkv(x).view(x.shape[0], -1, config.head_dim)
        qk, v = torch.split(qkv, [config.heads + config.kv_heads, config.kv_heads], dim=1)
        if block.qk_norm is not None:
            # queries and keys are normed and rotated together: the weight has a row for each head
            qk = torch.rms_norm(qk, (config.head_dim,), None, config.norm_eps) * block.qk_norm
        q, k = torch.split(rotate(qk, cos, sin), [config.heads, config.kv_heads], dim=1)
        return q, k, v
