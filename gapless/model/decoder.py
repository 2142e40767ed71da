"""The decoder: one forward over the layers of a `ModelSpec`. Layers that fast ways compute have a loop of their own.

Nothing here reads the device, and every shape follows from the batch's host integers, so that a forward can be
captured as one graph.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import embedding

from gapless.comm.alone import ONE_RANK
from gapless.comm.seam import Group
from gapless.kernels import plain
from gapless.kernels.kinds import WeightKind, WeightLayout
from gapless.kernels.kv import KVFormat, KVLayout
from gapless.kernels.layers import SeparateOps, SharedOps
from gapless.kernels.matrix import Linear, Matrix, dense
from gapless.kernels.seam import Kernels, LayerOps, LayerProduct
from gapless.kernels.views import Attend, LayerRows, NormWeights, Rotation
from gapless.memory.groups import PageGroup
from gapless.model.adapters import AdapterLayer, AdapterTables
from gapless.model.attention import AttentionPlan, PagedAttention, plan_attention
from gapless.model.config import ModelConfig
from gapless.model.kv_memory import PagedModel
from gapless.model.params import PRODUCTS, Layer, Params
from gapless.model.rope import rope_tables
from gapless.model.seam import BatchShape, KVCache, StepInputs
from gapless.model.spec import LayerSpec, NormOrder, QKNorm


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

    spec: LayerSpec
    attend: Attend
    eps: float
    input_norm: NormWeights | None
    qkv: LayerProduct
    qk_norm: Tensor | None
    output: LayerProduct
    attention_norm: NormWeights | None
    mlp_norm: NormWeights | None
    gate_up: LayerProduct
    down: LayerProduct
    output_norm: NormWeights | None

    @classmethod
    def of(
        cls, spec: LayerSpec, layer: Layer, eps: float, linear: Callable[[Matrix], Linear],
        parts: AdapterLayer | None = None,
    ) -> Self:  # fmt: skip
        """Make the products of a layer, with the tables of their adapters."""
        products = {name: LayerProduct(linear(getattr(layer, name)), getattr(parts, name, None)) for name in PRODUCTS}
        at = spec.attention
        attend = Attend(at.scale, at.reach, at.size, at.softcap)
        return cls(spec=spec, attend=attend, eps=eps, **(layer._asdict() | products))

    @property
    def products(self) -> tuple[LayerProduct, ...]:
        return self.qkv, self.output, self.gate_up, self.down

    @property
    def first_norm(self) -> Tensor:
        """The weight of the norm before a layer of `ModelSpec.plain`."""
        assert self.input_norm is not None
        return self.input_norm.weight

    def rotation(self, angles: Tensor) -> Rotation:
        """Return the rotation of a step with these angles, [T, D]."""
        return Rotation(self.qk_norm, self.eps, angles)

    def run(self, ops: LayerOps, y: Any, layer: int, angles: Tensor, next_norm: Tensor) -> Any:
        """Compute a layer of `ModelSpec.plain` from normed rows `y`; return its sum, normed by `next_norm`."""
        assert self.mlp_norm is not None
        y = ops.attend(ops.product(y, self.qkv), self.rotation(angles), layer, self.attend)
        y = ops.add(y, self.output, self.mlp_norm.weight)
        return ops.add(ops.gated(y, self.gate_up), self.down, next_norm)

    def run_any(self, ops: SeparateOps, layer: int, angles: Tensor) -> None:
        """Add to the rows what a layer of any kind computes."""
        spec = self.spec
        y = ops.normed(ops.x, self.input_norm)
        mixed = ops.summed(self._attention(ops, y, layer, angles), self.output)
        ops.x.add_(ops.normed(mixed, self.attention_norm), alpha=spec.residual)
        if spec.order is not NormOrder.PARALLEL:
            y = ops.normed(ops.x, self.mlp_norm)
        y = ops.activated(ops.product(y, self.gate_up), spec.mlp.activation, spec.mlp.gated)
        ops.x.add_(ops.normed(ops.summed(y, self.down), self.output_norm), alpha=spec.residual)

    def _attention(self, ops: SeparateOps, y: Tensor, layer: int, angles: Tensor) -> Tensor:
        qkv, rotation, at = ops.product(y, self.qkv), self.rotation(angles), self.spec.attention
        if at.qk_norm is QKNorm.ALL:
            assert rotation.qk_norm is not None
            queries = at.heads * at.head_dim
            for part, weight in (
                (qkv[:, :queries], rotation.qk_norm[: at.heads]),
                (qkv[:, queries : queries + at.kv_heads * at.head_dim], rotation.qk_norm[at.heads :]),
            ):
                part.copy_(ops.whole_norm(part.contiguous(), weight.flatten()))
            rotation = rotation._replace(qk_norm=None)
        return ops.attend(qkv, rotation, layer, self.attend)


class KVPlace(NamedTuple):
    """The layers of a KV memory that a model has."""

    spare: int = 0
    """Layers that it leaves to others"""
    first: int = 0
    """The first of its own"""


WHOLE_KV = KVPlace()


class Decoder(PagedModel):
    """Implements the `Model` protocol over `params`, which are on one device in one dtype, and a rank's share of it.

    `config` is the whole model's, `spec` a rank's.

    It takes `params` over and empties its list of layers, so that a layer's loaded matrices can be let go while the
    next is put into the layout of the device.
    """

    def __init__(
        self, config: ModelConfig, params: Params, max_model_len: int, kernels: Kernels = plain.KERNELS,
        adapters: AdapterTables | None = None, place: KVPlace = WHOLE_KV, group: Group = ONE_RANK,
    ) -> None:  # fmt: skip
        assert params.share == group.share, "a rank has the weights of its share"
        self.config, self.spec, self.group = config, config.spec.shared(group.share), group
        self.spare_layers, self.first_layer = place
        self.kernels, self.eps, device = kernels, self.spec.norm.eps, params.embedding.device
        self.device, self.dtype = device, params.embedding.dtype
        at, self.cache_layers = self.spec.layer.attention, len(self.spec.layers) + place.spare
        self.kv = KVLayout(KVFormat.AUTO, at.kv_heads, at.head_dim, self.dtype)
        self.ropes = rope_tables(config, max_model_len, device)
        self.blocks: list[Block] = []
        layouts: set[tuple[WeightLayout, WeightKind]] = set()
        parts = iter(() if adapters is None else adapters.layers)
        for spec in self.spec.layers:
            layer = params.layers.pop(0)
            block = Block.of(spec.within(max_model_len), layer, self.eps, kernels.linear, next(parts, None))
            layouts |= {(getattr(layer, name).layout, getattr(block, name).linear.kind) for name in PRODUCTS}
            self.blocks.append(block)
        self.layouts = frozenset(layouts)
        """Layouts of the weights of layers as read, each with the kind that is computed with"""
        self.last_norm = params.norm
        products = [product for block in self.blocks for product in block.products]
        ways = kernels.ways if self.spec.plain else ()
        if not self.alone:
            ways = tuple([way._replace(make=partial(way.shared, group)) for way in ways if way.shared is not None])
        self.ways = [(most, way) for way in ways if (most := way.most(products))]
        """The faster ways of these products, each with its most rows"""
        self.head = kernels.linear(dense(params.head))
        # A tied embedding whose head can give its rows needs no memory of its own.
        shared = params.head is params.embedding and hasattr(self.head, "rows")
        self.embedding = None if shared else params.embedding
        self.positions = params.positions
        factor = self.spec.embedding_factor
        self.embedding_factor = float(torch.tensor(factor, dtype=self.dtype)) if self.spec.factor_rounded else factor
        self.bounded = kernels.bounded
        self.vocab_size, self.max_model_len = self.spec.vocab_size, max_model_len
        self.adapters = adapters

    @property
    def alone(self) -> bool:
        """Whether one rank has the whole model."""
        return self.group.share.world == 1

    def groups(self) -> tuple[PageGroup, ...]:
        """One page group: entries outside of windows are masked, and kept."""
        return (PageGroup(),)

    def first_layers(self) -> Self:
        """See `seam.Model.first_layers`. The weights are the same."""
        model, seen = copy(self), set[LayerSpec]()
        blocks, model.blocks = self.blocks, self.blocks[:2]  # the first one's input is normed, that of others is not
        seen |= {block.spec for block in model.blocks}
        for block in blocks:
            if block.spec not in seen:
                seen.add(block.spec)
                model.blocks = [*model.blocks, block]
        return model

    def plan(self, shape: BatchShape) -> AttentionPlan:
        """Host decisions for this batch, from bounds alone."""
        return plan_attention(shape)

    def forward(self, inputs: StepInputs, plan: AttentionPlan, cache: KVCache, taps: LayerTaps = NO_TAPS) -> Tensor:
        """Hidden states [T, hidden] after the last norm; writes the KV of all T tokens. `taps` copy some."""
        # Before the embedding, a launch that waits for it whole: attention may read angles ahead of the launch before.
        angles = self.angles(inputs.positions)
        x = self.embed(inputs.ids)
        if not self.spec.plain:
            return self._any_forward(x, angles, self.separate_ops(x, inputs, plan, cache), inputs.positions, taps)
        ops = self.ops(x, inputs, plan, cache)
        y, norms = ops.norm(self.blocks[0].first_norm), [block.first_norm for block in self.blocks[1:]]
        for i, (block, norm) in enumerate(zip(self.blocks, [*norms, self.last_norm.weight], strict=True)):
            y = block.run(ops, y, self.first_layer + i, angles[block.spec.attention.rope], norm)
            if i + 1 in taps.layers:
                taps.copy(i + 1, ops.x)
        return ops.end(y)

    def _any_forward(
        self, x: Tensor, angles: Mapping[int | None, Tensor], ops: SeparateOps, positions: Tensor, taps: LayerTaps
    ) -> Tensor:
        """Compute layers of any kind."""
        if self.embedding_factor != 1:
            x.mul_(self.embedding_factor)
        if self.positions is not None:
            x.add_(embedding(positions.clamp(max=len(self.positions) - 1), self.positions))
        for i, block in enumerate(self.blocks):
            block.run_any(ops, self.first_layer + i, angles[block.spec.attention.rope])
            if i + 1 in taps.layers:
                taps.copy(i + 1, ops.x)
        return ops.normed(ops.x, self.last_norm)

    def angles(self, positions: Tensor) -> Mapping[int | None, Tensor]:
        """Return the angles of each rope for a step, [T, head_dim]; by None the ones of layers without."""
        return {rope: self.kernels.angles(positions, table) for rope, table in self.ropes.items()}

    def ops(self, x: Tensor, inputs: StepInputs, plan: AttentionPlan, cache: KVCache) -> LayerOps:
        """Return the operations of a forward that begins with x [T, hidden], by the fastest way for its rows."""
        if inputs.starts is None:
            for most, way in self.ways:
                if len(x) <= most and way.adapts == (inputs.adapters is not None):
                    return way.make(x, inputs.layer_rows(cache), self.eps)
        return self.separate_ops(x, inputs, plan, cache)

    def separate_ops(self, x: Tensor, inputs: StepInputs, plan: AttentionPlan, cache: KVCache) -> SeparateOps:
        """Return them one by one: the general way."""
        attention = PagedAttention(self.kernels, inputs, plan, cache)
        return self.layer_ops(x, inputs.layer_rows(cache), self.eps, attention.forward)

    def layer_ops(
        self, x: Tensor, rows: LayerRows, eps: float, attention: Callable[[Tensor, int, Attend], Tensor]
    ) -> SeparateOps:
        """Return the operations of the general way around this attention, with sums over ranks."""
        make = SeparateOps if self.alone else partial(SharedOps, self.group)
        return make(x, rows, eps, self.kernels, attention, self.spec.norm.centered)

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocab], in the model's dtype; [N, 0] on ranks that follow."""
        if self.alone:
            return self._scaled(self.head(hidden))
        out = hidden.new_empty(len(hidden), self.vocab_size if self.group.share.leads else 0)
        self.write_logits(hidden, out)
        return out

    def write_logits(self, hidden: Tensor, out: Tensor) -> None:
        """Write `logits(hidden)` to `out`, without a copy where the product can."""
        self._scaled(self.head(hidden, out) if self.alone else self.group.gather(self.head(hidden), out))

    def _scaled(self, logits: Tensor) -> Tensor:
        """Scale and cap logits in place."""
        factor, cap = self.spec.logits_factor, self.spec.logits_cap
        if factor != 1:
            logits.mul_(factor)
        return logits.div_(cap).tanh_().mul_(cap) if cap else logits

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids int64 [T] -> [T, hidden]."""
        if self.alone:
            return self._embedded(ids)
        first, last = self.spec.own_tokens(self.group.share)
        others = (ids < first) | (ids >= last)
        x = self._embedded((ids - first).clamp(0, last - first - 1))
        return self.group.add(x.masked_fill_(others[:, None], 0.0))

    def _embedded(self, ids: Tensor) -> Tensor:
        """Return rows of the embedding that is here."""
        if self.embedding is not None:
            return embedding(ids, self.embedding)
        rows: Tensor = self.head.rows(ids)  # type: ignore[attr-defined]
        return rows
