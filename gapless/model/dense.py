"""The dense decoder of Llama 3.x, Qwen2 / Qwen2.5, Qwen3 and MiMo: one forward; parts that a family lacks are None.

Nothing here reads the device, and every shape follows from the batch's host integers, so that a forward can be
captured as one graph.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import embedding

from gapless.kernels import plain
from gapless.kernels.layers import SeparateOps
from gapless.kernels.matrix import Linear, Matrix, dense
from gapless.kernels.seam import Kernels, LayerOps, LayerProduct
from gapless.kernels.views import Attend, Rotation
from gapless.memory.groups import PageGroup
from gapless.model.adapters import AdapterLayer, AdapterTables
from gapless.model.attention import AttentionPlan, PagedAttention, plan_attention
from gapless.model.config import ModelConfig
from gapless.model.params import MODULES, Layer, Params
from gapless.model.rope import rope_table
from gapless.model.seam import BatchShape, KVCache, StepInputs


class LayerTaps(NamedTuple):
    """Copies hidden states inside a model's forward."""

    layers: tuple[int, ...]
    """After how many layers they are copied"""
    states: Tensor
    """[T, len(layers) * hidden]"""

    def copy(self, layers: int, x: Tensor) -> None:
        """Copy x [T, hidden], the residual stream after this many layers."""
        self.states.view(len(x), len(self.layers), -1)[:, self.layers.index(layers)].copy_(x)


NO_TAPS = LayerTaps((), torch.empty(0))


class Block(NamedTuple):
    """A decoder layer, ready to run; shapes as in `params.Layer`."""

    input_norm: Tensor
    qkv: LayerProduct
    rotation: Rotation
    attend: Attend
    output: LayerProduct
    mlp_norm: Tensor
    gate_up: LayerProduct
    down: LayerProduct
    next_norm: Tensor
    """The norm after the block: the next one's first, or the model's last"""

    @classmethod
    def of(
        cls, layer: Layer, next_norm: Tensor, table: Tensor, eps: float, linear: Callable[[Matrix], Linear],
        parts: AdapterLayer | None = None,
    ) -> Self:  # fmt: skip
        """Make the products of a layer, with the tables of their adapters. `table`: see `Rotation`."""
        products = {name: LayerProduct(linear(getattr(layer, name)), getattr(parts, name, None)) for name in MODULES}
        rotation, attend = Rotation(layer.qk_norm, eps, table), Attend(table.shape[1] ** -0.5)
        return cls(
            layer.input_norm, rotation=rotation, attend=attend, mlp_norm=layer.mlp_norm, next_norm=next_norm, **products
        )

    @property
    def products(self) -> tuple[LayerProduct, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    def run(self, ops: LayerOps, y: Any, layer: int) -> Any:
        """Compute the layer from normed rows `y`; return its sum, normed."""
        y = ops.attend(ops.product(y, self.qkv), self.rotation, layer, self.attend)
        y = ops.add(y, self.output, self.mlp_norm)
        return ops.add(ops.gated(y, self.gate_up), self.down, self.next_norm)


class DenseModel:
    """Implements the `Model` protocol over `params`, which are on one device in one dtype.

    It takes `params` over and empties its list of layers, so that a layer's loaded matrices can be let go while the
    next is put into the layout of the device.
    """

    def __init__(
        self, config: ModelConfig, params: Params, max_model_len: int, kernels: Kernels = plain.KERNELS,
        adapters: AdapterTables | None = None, spare_layers: int = 0, first_layer: int = 0,
    ) -> None:  # fmt: skip
        """`spare_layers` are layers of the KV memory that the model leaves to others, `first_layer` its own first."""
        self.config = config
        self.first_layer = first_layer
        self.cache_layers = config.layers + spare_layers
        self.kernels = kernels
        self.rope = rope_table(config, max_model_len, params.embedding.device)
        self.blocks: list[Block] = []
        parts = iter(() if adapters is None else adapters.layers)
        while params.layers:
            layer = params.layers.pop(0)
            next_norm = params.layers[0].input_norm if params.layers else params.norm
            block = Block.of(layer, next_norm, self.rope, config.norm_eps, kernels.linear, next(parts, None))
            self.blocks.append(block)
        products = [product for block in self.blocks for product in block.products]
        self.ways = [(most, way) for way in kernels.ways if (most := way.most(products))]
        """The faster ways of these products, each with its most rows"""
        self.head = kernels.linear(dense(params.head))
        # A tied embedding whose head can give its rows needs no memory of its own.
        shared = params.head is params.embedding and hasattr(self.head, "rows")
        self.embedding = None if shared else params.embedding
        self.dtype = params.embedding.dtype
        self.bounded = kernels.bounded
        self.vocab_size = config.vocab_size
        self.max_model_len = max_model_len
        self.adapters = adapters

    def groups(self) -> tuple[PageGroup, ...]:
        """One page group: every layer reads everything before a token."""
        return (PageGroup(),)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one KV page of all layers."""
        config = self.config
        return self.cache_layers * 2 * page_size * config.kv_heads * config.head_dim * self.dtype.itemsize

    def new_cache(self, pages: int, page_size: int, device: torch.device) -> KVCache:
        """A zeroed cache of `pages` pages, the null page included."""
        config = self.config
        return KVCache.zeros(
            pages, self.cache_layers, page_size, config.kv_heads, config.head_dim, dtype=self.dtype, device=device
        )

    def first_layers(self) -> Self:
        """See `seam.Model.first_layers`. The weights are the same."""
        model = copy(self)
        model.blocks = self.blocks[:2]  # the first one's input is normed, that of the others is not
        return model

    def plan(self, shape: BatchShape) -> AttentionPlan:
        """Host decisions for this batch, from bounds alone."""
        return plan_attention(shape)

    def forward(self, inputs: StepInputs, plan: AttentionPlan, cache: KVCache, taps: LayerTaps = NO_TAPS) -> Tensor:
        """Hidden states [T, hidden] after the last norm; writes the KV of all T tokens. `taps` copy some."""
        ops = self.ops(self.embed(inputs.ids), inputs, plan, cache)
        y = ops.norm(self.blocks[0].input_norm)
        for i, block in enumerate(self.blocks):
            y = block.run(ops, y, self.first_layer + i)
            if i + 1 in taps.layers:
                taps.copy(i + 1, ops.x)
        return ops.end(y)

    def ops(self, x: Tensor, inputs: StepInputs, plan: AttentionPlan, cache: KVCache) -> LayerOps:
        """Return the operations of a forward that begins with x [T, hidden], by the fastest way for its rows."""
        if inputs.starts is None:
            for most, way in self.ways:
                if len(x) <= most and way.adapts == (inputs.adapters is not None):
                    return way.make(x, inputs.layer_rows(cache), self.config.norm_eps)
        return self.separate_ops(x, inputs, plan, cache)

    def separate_ops(self, x: Tensor, inputs: StepInputs, plan: AttentionPlan, cache: KVCache) -> SeparateOps:
        """Return them one by one: the general way."""
        attention = PagedAttention(self.kernels, inputs, plan, cache)
        return SeparateOps(x, inputs.layer_rows(cache), self.config.norm_eps, self.kernels, attention.forward)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocab], in the model's dtype."""
        return self.head(hidden)

    def write_logits(self, hidden: Tensor, out: Tensor) -> None:
        """Write `logits(hidden)` to `out`, without a copy where the product can."""
        self.head(hidden, out)

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids int64 [T] -> [T, hidden]."""
        if self.embedding is not None:
            return embedding(ids, self.embedding)
        rows: Tensor = self.head.rows(ids)  # type: ignore[attr-defined]
        return rows
