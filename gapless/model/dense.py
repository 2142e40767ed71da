"""The dense decoder of Llama 3.x, Qwen2 / Qwen2.5, Qwen3 and MiMo: one forward; parts that a family lacks are None.

Nothing here reads the device, and every shape follows from the batch's host integers, so that a forward can be
captured as one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import embedding

from gapless.kernels import plain
from gapless.kernels.seam import FusedRows, JoinedRows, Kernels, Linear
from gapless.kernels.views import KV, Rotation, RowBatch, TokenBatch
from gapless.memory.groups import PageGroup
from gapless.model.adapters import AdapterTables
from gapless.model.attention import AttentionPlan, FusedAttention, PagedAttention, plan_attention
from gapless.model.config import ModelConfig
from gapless.model.params import Layer, Matrix, Params
from gapless.model.rope import rope_table
from gapless.model.seam import BatchShape, KVCache, StepInputs


class LayerTaps(NamedTuple):
    """Copies hidden states inside a model's forward."""

    layers: tuple[int, ...]
    """After how many layers they are copied"""
    states: Tensor
    """[T, len(layers) * hidden]"""

    def pass_by(self, layers: int, x: Tensor) -> None:
        """Copy x [T, hidden], the sum of all before the next norm after this many layers, if it is asked for."""
        if layers in self.layers:
            self.states.view(len(x), len(self.layers), -1)[:, self.layers.index(layers)].copy_(x)


NO_TAPS = LayerTaps((), torch.empty(0))


class Block(NamedTuple):
    """A decoder layer, ready to run; shapes as in `params.Layer`."""

    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    next_norm: Tensor
    """The norm after the block: the next one's first, or the model's last"""


def block_of(layer: Layer, next_norm: Tensor, linear: Callable[[Tensor, Tensor | None], Linear]) -> Block:
    """Put the matrices of a layer into the layout that `linear` likes."""
    parts: dict[str, Any] = {
        name: linear(*part) if isinstance(part, Matrix) else part for name, part in layer._asdict().items()
    }
    return Block(**parts, next_norm=next_norm)


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
        self.blocks: list[Block] = []
        while params.layers:
            layer = params.layers.pop(0)
            next_norm = params.layers[0].input_norm if params.layers else params.norm
            self.blocks.append(block_of(layer, next_norm, kernels.linear))
        few = kernels.few_rows
        # One row is always faster so: its matrices are read as fast, in fewer launches.
        self.few_most = 0 if few is None else few.most if all(map(few.serves, self._linears())) else 1
        self.head = kernels.linear(params.head, None)
        # A tied embedding whose head can give its rows needs no memory of its own.
        shared = params.head is params.embedding and hasattr(self.head, "rows")
        self.embedding = None if shared else params.embedding
        self.dtype = params.embedding.dtype
        self.bounded = kernels.decode_attention is None
        self.vocab_size = config.vocab_size
        self.max_model_len = max_model_len
        self.adapters = adapters
        self.joined = kernels.joined_rows if adapters is not None and adapters.below else None
        self.rope = rope_table(config, max_model_len, params.embedding.device)

    def _linears(self) -> Iterator[Linear]:
        for block in self.blocks:
            yield from (block.qkv, block.output, block.gate_up, block.down)

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
        return plan_attention(shape, self.config.kv_heads * self.config.head_dim)

    def forward(self, inputs: StepInputs, plan: AttentionPlan, cache: KVCache, taps: LayerTaps = NO_TAPS) -> Tensor:
        """Hidden states [T, hidden] after the last norm; writes the KV of all T tokens. `taps` copy some."""
        kernels, eps = self.kernels, self.config.norm_eps
        x = self.embed(inputs.ids)
        if inputs.starts is None:
            adapted, few, joined = inputs.adapters is not None, kernels.few_rows, self.joined
            way = self._adapted_rows if adapted else self._fused_rows
            if few is not None and len(x) <= self.few_most:
                return way(few, x, inputs, cache, taps)
            if adapted and joined is not None and len(x) <= joined.most:
                return self._joined_rows(joined, x, inputs, cache, taps)
        attention = self._attention(inputs, plan, cache)
        y = kernels.rms_norm(x, self.blocks[0].input_norm, eps)
        for i, block in enumerate(self.blocks):
            q, k, v = self._qkv(block, y, inputs, cache, i)
            y = self._product(inputs, i, "output", attention.forward(q, k, v, self.first_layer + i))
            y = kernels.add_rms_norm(x, y, block.mlp_norm, eps)
            y = kernels.silu_mul(self._product(inputs, i, "gate_up", y))
            y = kernels.add_rms_norm(x, self._product(inputs, i, "down", y), block.next_norm, eps)
            taps.pass_by(i + 1, x)
        return y

    def _fused_rows(self, fused: FusedRows, x: Tensor, inputs: StepInputs, cache: KVCache, taps: LayerTaps) -> Tensor:
        """Run the forward in fewer launches, for rows of one token each: a product finishes the norm before it."""
        config, eps, batch, tokens = self.config, self.config.norm_eps, inputs.batch, inputs.tokens
        decode = fused.decode if inputs.places == 1 else self._decode
        norm = self.blocks[0].input_norm
        for i, block in enumerate(self.blocks):
            qkv = fused.linear(x, norm, eps, block.qkv).view(len(x), -1, config.head_dim)
            kv = KV(cache.data, self.first_layer + i, inputs.page_table)
            found = decode(qkv, self._rotation(block), kv, tokens, batch, config.head_dim**-0.5)
            fused.linear_add(x, found, block.output)
            fused.linear_add(x, fused.silu_mul(x, block.mlp_norm, eps, block.gate_up), block.down)
            norm = block.next_norm
            taps.pass_by(i + 1, x)
        return self.kernels.rms_norm(x, self.blocks[-1].next_norm, eps)

    def _adapted_rows(self, fused: FusedRows, x: Tensor, inputs: StepInputs, cache: KVCache, taps: LayerTaps) -> Tensor:
        """Do `_fused_rows` where rows have adapters: what these add to the residual comes with the norm after it."""
        config, eps, batch, tokens = self.config, self.config.norm_eps, inputs.batch, inputs.tokens
        assert inputs.adapters is not None and self.adapters is not None
        slots, ways, added = inputs.adapters, fused.adapted, None
        decode = fused.decode if inputs.places == 1 else self._decode
        for i, (block, parts) in enumerate(zip(self.blocks, self.adapters.layers, strict=False)):
            x, y, own = ways.norm(x, added, block.input_norm, eps, slots, parts.qkv)
            taps.pass_by(i, x)
            assert own is not None
            qkv = ways.linear(y, own, block.qkv).view(len(x), -1, config.head_dim)
            kv = KV(cache.data, self.first_layer + i, inputs.page_table)
            y = decode(qkv, self._rotation(block), kv, tokens, batch, config.head_dim**-0.5)
            added = ways.linear_add(x, y, block.output, slots, parts.output)
            x, y, own = ways.norm(x, added, block.mlp_norm, eps, slots, parts.gate_up)
            assert own is not None
            added = ways.linear_add(x, ways.silu_mul(y, own, block.gate_up), block.down, slots, parts.down)
        x, y, _ = ways.norm(x, added, self.blocks[-1].next_norm, eps, slots, None)
        taps.pass_by(len(self.blocks), x)
        return y

    def _joined_rows(self, ways: JoinedRows, x: Tensor, inputs: StepInputs, cache: KVCache, taps: LayerTaps) -> Tensor:
        """Do `_adapted_rows` where matrices are large."""
        config, eps, slots = self.config, self.config.norm_eps, inputs.adapters
        assert slots is not None and self.adapters is not None
        y = self.kernels.rms_norm(x, self.blocks[0].input_norm, eps)
        for i, (block, parts) in enumerate(zip(self.blocks, self.adapters.layers, strict=False)):
            kv = KV(cache.data, self.first_layer + i, inputs.page_table)
            qkv = ways.linear(y, block.qkv, slots, parts.qkv)
            y = ways.decode(qkv, self._rotation(block), kv, inputs.tokens, inputs.batch, config.head_dim**-0.5)
            y = ways.add_rms_norm(x, ways.linear(y, block.output, slots, parts.output), block.mlp_norm, eps)
            y = ways.silu_mul(ways.linear(y, block.gate_up, slots, parts.gate_up))
            y = ways.add_rms_norm(x, ways.linear(y, block.down, slots, parts.down), block.next_norm, eps)
            taps.pass_by(i + 1, x)
        return y

    def _decode(
        self, qkv: Tensor, rotation: Rotation, kv: KV, tokens: TokenBatch, batch: RowBatch, scale: float
    ) -> Tensor:
        """`FusedRows.decode` in two launches, for rows that read what other rows write."""
        self.kernels.rope_and_write(qkv, rotation, kv, tokens)
        assert self.kernels.decode_attention is not None
        return self.kernels.decode_attention(qkv[:, : self.config.heads], kv, batch, scale)

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

    def _product(self, inputs: StepInputs, layer: int, name: str, x: Tensor) -> Tensor:
        """Return a layer's product of this name, with what the adapters of the rows add to it."""
        linear: Linear = getattr(self.blocks[layer], name)
        y = linear(x)
        if inputs.adapters is not None and self.adapters is not None:
            self.kernels.adapt(x, y, inputs.adapters, getattr(self.adapters.layers[layer], name))
        return y

    def _attention(self, inputs: StepInputs, plan: AttentionPlan, cache: KVCache) -> FusedAttention | PagedAttention:
        if self.kernels.decode_attention is None:
            return PagedAttention(inputs, plan, cache, self.config.heads)
        return FusedAttention(self.kernels, inputs, plan, cache)

    def _qkv(
        self, block: Block, x: Tensor, inputs: StepInputs, cache: KVCache, layer: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [T, heads, head_dim] and keys, and values [T, kv_heads, head_dim]; KV goes to the cache."""
        config = self.config
        qkv = self._product(inputs, layer, "qkv", x).view(x.shape[0], -1, config.head_dim)
        kv = KV(cache.data, self.first_layer + layer, inputs.page_table)
        self.kernels.rope_and_write(qkv, self._rotation(block), kv, inputs.tokens)
        q, k, v = torch.split(qkv, [config.heads, config.kv_heads, config.kv_heads], dim=1)
        return q, k, v

    def _rotation(self, block: Block) -> Rotation:
        return Rotation(block.qk_norm, self.config.norm_eps, self.rope)
