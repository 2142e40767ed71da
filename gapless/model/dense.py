"""The dense decoder of Llama 3.x, Qwen2 / Qwen2.5 and Qwen3: one forward, families differ by what is None.

Nothing here reads the device, and every shape follows from the batch's host integers, so that a forward can be
captured as one graph.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear, silu

from gapless.model.attention import AttentionPlan, PagedAttention, plan_attention
from gapless.model.config import ModelConfig
from gapless.model.params import Layer, Params
from gapless.model.rope import Rope, rotate
from gapless.model.seam import BatchShape, KVCache, StepInputs


class DenseModel:
    """Implements the `Model` protocol over `params`, which lie on one device in one dtype."""

    def __init__(self, config: ModelConfig, params: Params, max_model_len: int) -> None:
        self.config = config
        self.params = params
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
        x = embedding(inputs.ids, self.params.embedding)
        cos, sin = self.rope.at(inputs.positions, self.dtype)
        attention = PagedAttention(inputs, plan, cache, self.config.heads)
        for i, layer in enumerate(self.params.layers):
            q, k, v = self._qkv(layer, self._norm(x, layer.input_norm), cos, sin)
            x = x + linear(attention.forward(q, k, v, i), layer.output, layer.output_bias)
            x = x + self._mlp(layer, self._norm(x, layer.mlp_norm))
        return self._norm(x, self.params.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> float32 [N, vocab]."""
        return linear(hidden, self.params.head).float()

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        # computed in float32 whatever the dtype of x
        return torch.rms_norm(x, (x.shape[-1],), weight, self.config.norm_eps)

    def _qkv(self, layer: Layer, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [T, heads, head_dim] and keys, and values [T, kv_heads, head_dim]."""
        config = self.config
        qkv = linear(x, layer.qkv, layer.qkv_bias).view(x.shape[0], -1, config.head_dim)
        qk, v = torch.split(qkv, [config.heads + config.kv_heads, config.kv_heads], dim=1)
        if layer.qk_norm is not None:
            # queries and keys are normed and rotated together: the weight has a row for each head
            qk = torch.rms_norm(qk, (config.head_dim,), None, config.norm_eps) * layer.qk_norm
        q, k = torch.split(rotate(qk, cos, sin), [config.heads, config.kv_heads], dim=1)
        return q, k, v

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gate, up = linear(x, layer.gate_up, layer.gate_up_bias).chunk(2, dim=-1)
        return linear(silu(gate) * up, layer.down, layer.down_bias)
