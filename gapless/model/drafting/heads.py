"""Heads: one decoder layer that drafts tokens from a model's hidden states, and from its own.

A pass of a head takes a token, and the hidden state before it: of the model, or the head's own where the token is a
draft. Its keys and values are one more layer of the model's KV memory, at the token's own slot, so they depend on
nothing after the token: prefix hits, preemption and moved pages need no further rule. Checkpoints elsewhere count the
same pass one position lower, which changes no product of a rotated query and key.

At position 0, and at the first position after a cached prefix, no hidden state is at hand, and zeros stand for it. What
a head drafts decides how many tokens a step gives, and never which.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import copy
from typing import Self

import torch
from torch import Tensor

from gapless.kernels.layers import SeparateOps
from gapless.kernels.layout import GENERATION
from gapless.kernels.matrix import Linear, Matrix
from gapless.kernels.tables import Tables
from gapless.kernels.views import KV, Attend, LayerRows, RowBatch
from gapless.model.attention import AttentionPlan
from gapless.model.config import ModelConfig
from gapless.model.decoder import NO_TAPS, Block, Decoder, LayerTaps
from gapless.model.drafting.draws import Draws, PlaceTokens
from gapless.model.params import Layer
from gapless.model.seam import KVCache, StepInputs


class HeadLayer:
    """The decoder layer of a head. Kinds of heads differ in its input. H is the model's width."""

    taps: tuple[int, ...] = ()
    """Numbers of layers before each read of the model's hidden states; none for a read after its last norm"""
    tokens: Tensor | None = None
    """int64 [drafted] the token of each of its logits; None where they are for the whole vocabulary"""

    def __init__(
        self, model: Decoder, config: ModelConfig, layer: Layer, norm: Tensor, table: Tensor,
        linear: Callable[[Matrix], Linear],
    ) -> None:  # fmt: skip
        """`config` is that of the layer, and `table` the rope's."""
        self.model, self.kernels, self.eps = model, model.kernels, config.spec.norm.eps
        self.rope, self.norm = table, norm
        self.block = Block.of(config.spec.layer.shared(model.group.share), layer, self.eps, linear)

    def fuse(self, states: Tensor) -> Tensor:
        """Return what passes take, [T, H], of the model's hidden states as they were read."""
        return states

    def draft(self, tokens: PlaceTokens, x: Tensor, kv: KV) -> Tensor:
        """Run over a token of each row: logits [B, drafted], [B, 0] on ranks that follow. x [B, H], the hidden states
        before, becomes its own."""
        raise NotImplementedError

    def enter(self, tokens: PlaceTokens, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the layer adds to, and its input, both [T, H]. x [T, H] are the hidden states before tokens."""
        raise NotImplementedError

    def embed(self, tokens: PlaceTokens, norm: Tensor) -> Tensor:
        """Return the normed embeddings of tokens, [T, H]."""
        return self.kernels.rms_norm(self.model.embed(tokens.ids), norm, self.eps)

    def write(self, tokens: PlaceTokens, x: Tensor, kv: KV) -> None:
        """Write the KV of tokens; x [T, H] are the hidden states before them."""
        added, y = self.enter(tokens, x)
        ops = self._ops(added, tokens, kv)
        ops.write(ops.product(y, self.block.qkv), self.block.rotation(self._angles(tokens)), kv.layer)

    def run(self, x: Tensor, y: Tensor, tokens: PlaceTokens, kv: KV) -> Tensor:
        """Add to x [B, H] what the layer computes of its input y, one token a row; return its norm."""
        hidden: Tensor = self.block.run(self._ops(x, tokens, kv), y, kv.layer, self._angles(tokens), self.norm)
        return hidden

    def _angles(self, tokens: PlaceTokens) -> Tensor:
        return self.kernels.angles(tokens.positions, self.rope)

    def _ops(self, x: Tensor, tokens: PlaceTokens, kv: KV) -> SeparateOps:
        batch = RowBatch(tokens.rows, tokens.kv_lens)
        rows = LayerRows(tokens.slots, batch, kv.cache, kv.page_table, scales=kv.scales)

        def attention(q: Tensor, layer: int, attend: Attend) -> Tensor:
            return self.kernels.decode_attention(q, kv, batch, attend)

        return self.model.layer_ops(x, rows, self.eps, attention)


class RecurrentHead:
    """A head beside its model. Implements `model.drafting.seam.Head`.

    The fused hidden states of a row's last positions are kept, each at its position modulo their number, which is more
    than a step has positions of a row: the next step begins after any of them, or with the same one again.
    """

    def __init__(self, layer: HeadLayer, model: Decoder, rows: int, drafts: int) -> None:
        """`rows` may run at once, the null row not counted, and have up to `drafts` drafts in a step."""
        device, width = model.device, model.spec.hidden_size
        self.layer, self.model = layer, model
        self.kv_layer = model.cache_layers - 1
        self.kept_places = drafts + 2
        self.kept = torch.zeros((rows + 1) * self.kept_places, width, dtype=model.dtype, device=device)
        self.prefilled = torch.full((rows + 1,), -1, dtype=torch.int64, device=device)
        """[rows + 1] end position of the row's last chunk, and its generation"""

    def beside(self, model: Decoder) -> Self:
        """See `model.drafting.seam.Head`. The weights are the same."""
        head = copy(self)
        head.model = model
        return head

    def ask(self, rows: Tensor, tables: Tables, drafts: int) -> None:
        """See `model.drafting.seam.Head`."""
        self.model.kernels.ask(rows, tables, drafts)

    def forward(self, inputs: StepInputs, plan: AttentionPlan, tables: Tables, cache: KVCache) -> Tensor:
        """Draft where rows have several places, then run the model: hidden states [T, H] after its last norm."""
        decode = plan.decode
        if inputs.places > 1:
            self._draft(inputs, decode, tables, cache)
        taps = self.layer.taps
        states = (
            LayerTaps(taps, self.kept.new_empty(len(inputs.ids), len(taps) * self.kept.shape[1])) if taps else NO_TAPS
        )
        hidden = self.model.forward(inputs, plan, cache, states)
        fused = self.layer.fuse(states.states if taps else hidden)
        kv = KV(cache.data, self.kv_layer, inputs.page_table, cache.scales)
        if inputs.starts is None:
            self._follow(inputs, fused, kv)
        else:
            self._follow_chunks(inputs, decode, fused, kv, tables)
        return hidden

    def _draft(self, inputs: StepInputs, count: int, tables: Tables, cache: KVCache) -> None:
        """Write drafts to the inputs of places after the first, of `count` tokens in all, and to the rows' history."""
        tokens, kv = PlaceTokens.of(inputs).up_to(count), KV(cache.data, self.kv_layer, inputs.page_table, cache.scales)
        places = tokens.split(inputs.places)
        kernels = self.model.kernels
        draws = Draws(kernels, places[0].rows, tables, self.model.vocab_size, self.layer.tokens, self.model.group)
        x = self._before(places[0].rows, places[0].positions)
        for place, following in itertools.pairwise(places):
            following.ids.copy_(draws.next(self.layer.draft(place, x, kv)))
        tokens.beyond(len(x)).keep(kernels, tables)

    # After the model.

    def _follow(self, inputs: StepInputs, fused: Tensor, kv: KV) -> None:
        """Write the KV of a step's tokens, one a row and place, from the model's own hidden states, and keep these."""
        if inputs.places == 1:
            self.layer.write(PlaceTokens.of(inputs), self._before(inputs.rows, inputs.positions), kv)
        else:  # the first place had them when it was drafted from
            count = len(fused) // inputs.places
            self.layer.write(PlaceTokens.of(inputs).beyond(count), fused[:-count], kv)
        self.kept.index_copy_(0, self._places(inputs.rows, inputs.positions), fused)

    def _follow_chunks(self, inputs: StepInputs, decode: int, fused: Tensor, kv: KV, tables: Tables) -> None:
        """Write the KV of a step with chunks after its first `decode` tokens; keep what each row's next one needs."""
        assert inputs.starts is not None
        rows, starts, ends = inputs.rows, inputs.starts[:-1], inputs.starts[1:].contiguous()
        first = inputs.kv_lens - (ends - starts)
        generations = tables.state[:, GENERATION].index_select(0, rows).long() << 32
        known = self.prefilled.index_select(0, rows) == generations + first
        known[:decode] = True  # a row that decodes ran the position before
        kept = torch.where(known[:, None], self._before(rows, first), 0)
        token = torch.arange(len(fused), device=fused.device)
        owner = torch.searchsorted(ends, token, right=True).clamp(max=len(rows) - 1)
        begins = (token == starts.index_select(0, owner))[:, None]
        before = torch.where(begins, kept.index_select(0, owner), fused.roll(1, dims=0))
        if inputs.places > 1:
            count = decode // inputs.places
            before[count:decode] = fused[: decode - count]  # the hidden states at the place before
        self.layer.write(PlaceTokens.of(inputs), before, kv)
        last = (ends - 1).clamp(min=0)
        positions = inputs.positions.index_select(0, last)
        self.kept.index_copy_(0, self._places(rows, positions), fused.index_select(0, last))
        self.prefilled.index_copy_(0, rows[decode:], (generations + inputs.kv_lens)[decode:])

    def _before(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the fused hidden states before these positions of these rows, [B, H]."""
        return self.kept.index_select(0, self._places(rows, positions - 1))

    def _places(self, rows: Tensor, positions: Tensor) -> Tensor:
        return torch.add(positions % self.kept_places, rows, alpha=self.kept_places)
