"""EAGLE-3 heads: one decoder layer that drafts tokens from a model's hidden states, in the checkpoints of the field.

A pass of the head takes a token, and the hidden state before it: of the model, or the head's own where the token is a
draft. Its keys and values are one more layer of the model's KV memory, at the token's own slot, so they depend on
nothing after the token: prefix hits, preemption and moved pages need no further rule. Checkpoints elsewhere count the
same pass one position lower, which changes no product of a rotated query and key.

At position 0, and at the first position after a cached prefix, no hidden state is at hand, and zeros stand for it. What
a head drafts decides how many tokens a step gives, and never which.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gapless.base.errors import CheckpointError
from gapless.kernels import native
from gapless.kernels.attention import decode_attention
from gapless.kernels.layout import DRAFTED, DRAFTS, GENERATION, LENGTH, MAX_LEN
from gapless.kernels.tables import Tables
from gapless.kernels.views import KV, Rotation, RowBatch, TokenBatch
from gapless.model.attention import AttentionPlan
from gapless.model.config import ModelConfig, read_model_config
from gapless.model.dense import DenseModel, Taps
from gapless.model.fields import Fields
from gapless.model.params import WeightSlot
from gapless.model.rope import Rope
from gapless.model.seam import KVCache, StepInputs
from gapless.model.weights import load_weights, tensor_names

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
UNUSED = ("t2d", "embed_tokens.weight")
"""Tensors of a checkpoint that are not read: what `d2t` says too, and the model's own embedding"""


class HeadConfig(NamedTuple):
    """What the config.json of a head says."""

    layer: ModelConfig
    drafted: int
    """Number of tokens that it can draft"""
    taps: tuple[int, ...]
    """After how many layers the model's hidden states are read"""
    normed_residual: bool
    """Whether the layer adds to the normed hidden state"""

    @classmethod
    def read(cls, directory: Path, model: ModelConfig) -> HeadConfig:
        """Read a head for `model`. Raises CheckpointError naming the file and the field."""
        layer, fields = read_model_config(directory, ARCHITECTURES), Fields.of_file(directory / "config.json")
        for name, found, wanted in (
            ("vocab_size", layer.vocab_size, model.vocab_size),
            ("hidden_size", layer.hidden_size, model.hidden_size),
            ("num_key_value_heads", layer.kv_heads, model.kv_heads),
            ("head_dim", layer.head_dim, model.head_dim),
            ("num_hidden_layers", layer.layers, 1),
        ):
            if found != wanted:
                raise fields.error(name, f"must be {wanted}, for this model", found)
        for name in ("attention_bias", "mlp_bias", "norm_before_fc", "fc_norm"):
            if fields.flag(name, False):
                raise fields.error(name, "must be false: such heads are not supported")
        return cls(
            layer, fields.whole("draft_vocab_size", model.vocab_size), _taps(fields, model.layers),
            fields.flag("norm_before_residual", False),
        )  # fmt: skip


def _taps(fields: Fields, layers: int) -> tuple[int, ...]:
    name = "eagle_aux_hidden_state_layer_ids"
    owner = fields.sub("eagle_config") if name in fields.sub("eagle_config") else fields
    taps = owner.values.get(name) or [2, layers // 2, layers - 3]
    whole = isinstance(taps, list) and all(type(tap) is int for tap in taps)
    if whole and taps[0] == 1:  # such heads count layers from 0 and mean what comes out of each
        taps = [tap + 1 for tap in taps]
    if not whole or not all(0 < tap <= layers for tap in taps) or len(set(taps)) < len(taps):
        raise owner.error(name, f"must be different layers of the model, which has {layers}", taps)
    return tuple(taps)


class HeadParams(NamedTuple):
    """Parameters of a head, as loaded; H is the model's width."""

    fuse: Tensor
    """[H, taps * H]"""
    embedding_norm: Tensor
    hidden_norm: Tensor
    qkv: Tensor
    """[(heads + 2 * kv_heads) * head_dim, 2 H]"""
    output: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    """[2 * intermediate, H]"""
    down: Tensor
    norm: Tensor
    head: Tensor
    """[drafted, H]"""
    offsets: Tensor
    """int64 [drafted], what is added to a draft's index for its token id"""


def allocate(config: HeadConfig, dtype: torch.dtype, device: torch.device) -> HeadParams:
    """Return parameters that are not initialised; offsets are zeros."""
    layer = config.layer
    hidden, middle, heads = layer.hidden_size, layer.intermediate_size, layer.heads * layer.head_dim

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return HeadParams(
        fuse=new(hidden, len(config.taps) * hidden),
        embedding_norm=new(hidden),
        hidden_norm=new(hidden),
        qkv=new(heads + 2 * layer.kv_heads * layer.head_dim, 2 * hidden),
        output=new(hidden, heads),
        mlp_norm=new(hidden),
        gate_up=new(2 * middle, hidden),
        down=new(hidden, middle),
        norm=new(hidden),
        head=new(config.drafted, hidden),
        offsets=torch.zeros(config.drafted, dtype=torch.int64, device=device),
    )


def load_params(directory: Path, config: HeadConfig, dtype: torch.dtype, device: torch.device) -> HeadParams:
    """Read the parameters of a head.

    Raises:
        CheckpointError: naming the file and the tensor.
    """
    params, names = allocate(config, dtype, device), tensor_names(directory)
    layer = "midlayer" if any(name.startswith("midlayer.") for name in names) else "layers.0"
    kv = config.layer.kv_heads * config.layer.head_dim
    q, k, v = torch.split(params.qkv, [params.qkv.shape[0] - 2 * kv, kv, kv])
    gate, up = params.gate_up.chunk(2)
    targets = {
        "fc": params.fuse,
        f"{layer}.input_layernorm": params.embedding_norm,
        f"{layer}.hidden_norm": params.hidden_norm,
        f"{layer}.self_attn.q_proj": q,
        f"{layer}.self_attn.k_proj": k,
        f"{layer}.self_attn.v_proj": v,
        f"{layer}.self_attn.o_proj": params.output,
        f"{layer}.post_attention_layernorm": params.mlp_norm,
        f"{layer}.mlp.gate_proj": gate,
        f"{layer}.mlp.up_proj": up,
        f"{layer}.mlp.down_proj": params.down,
        "norm": params.norm,
        "lm_head": params.head,
    }
    slots = {f"{name}.weight": WeightSlot(target, tuple(target.shape)) for name, target in targets.items()}
    if config.drafted < config.layer.vocab_size or "d2t" in names:
        slots["d2t"] = WeightSlot(params.offsets, (config.drafted,))
    load_weights(directory, slots, tied=False, unused=UNUSED)
    tokens = params.offsets + torch.arange(config.drafted, device=device)
    if not ((tokens >= 0) & (tokens < config.layer.vocab_size)).all():  # san: ok(at load)
        raise CheckpointError(f"{directory}: tensor 'd2t' gives tokens outside of the model's vocabulary")
    return params


class PlaceTokens(NamedTuple):
    """The tokens of some places of a step; tensors as in `StepInputs`."""

    ids: Tensor
    positions: Tensor
    slots: Tensor
    rows: Tensor
    kv_lens: Tensor

    @classmethod
    def of(cls, inputs: StepInputs) -> PlaceTokens:
        """Return those of all places."""
        return cls(inputs.ids, inputs.positions, inputs.slots, inputs.rows, inputs.kv_lens)

    def split(self, places: int) -> list[PlaceTokens]:
        """Return the tokens of each place."""
        return list(map(PlaceTokens, *(column.chunk(places) for column in self)))

    def beyond(self, count: int) -> PlaceTokens:
        """Return all but the first `count` tokens."""
        return PlaceTokens(*(column[count:] for column in self))


class Eagle:
    """An EAGLE-3 head beside its model. Implements `step.speculation.Head`.

    The fused hidden states of a row's last positions are kept, each at its position modulo their number, which is more
    than a step has positions of a row: the next step begins after any of them, or with the same one again.
    """

    def __init__(self, config: HeadConfig, params: HeadParams, model: DenseModel, rows: int, drafts: int) -> None:
        """`rows` may run at once, the null row not counted, and have up to `drafts` drafts in a step."""
        kernels, device, layer = model.kernels, params.norm.device, config.layer
        linear = native.invariant_linear if kernels.name == "native" else kernels.linear  # oneDNN takes 10 us a call
        self.model, self.kernels, self.taps = model, kernels, config.taps
        self.layer = model.cache_layers - 1
        self.heads, self.head_dim, self.eps = layer.heads, layer.head_dim, layer.norm_eps
        self.normed_residual = config.normed_residual
        self.norms = params.embedding_norm, params.hidden_norm, params.mlp_norm, params.norm
        weights = params.fuse, params.qkv, params.output, params.gate_up, params.down, params.head
        self.fuse, self.qkv, self.output, self.gate_up, self.down, self.head = (
            linear(weight, None) for weight in weights
        )
        self.tokens = params.offsets + torch.arange(len(params.offsets), device=device)
        """int64 [drafted] the token of each index"""
        self.rotation = Rotation(None, layer.norm_eps, Rope(layer, model.max_model_len, device).table)
        self.attend = kernels.decode_attention or decode_attention
        self.kept_places = drafts + 2
        self.kept = torch.zeros((rows + 1) * self.kept_places, layer.hidden_size, dtype=model.dtype, device=device)
        self.prefilled = torch.full((rows + 1,), -1, dtype=torch.int64, device=device)
        """[rows + 1] up to which position a chunk of the row came, and its generation"""

    def ask(self, rows: Tensor, tables: Tables, drafts: int) -> None:
        """Set how many drafts each of these rows gets in the step that begins, of `drafts` at most."""
        rows = rows.long()
        length = tables.state[:, LENGTH].index_select(0, rows)
        params = tables.params.index_select(0, rows)
        room = torch.minimum(params[:, DRAFTS], params[:, MAX_LEN] - 1 - length).clamp(0, drafts)
        tables.state[:, DRAFTED].index_copy_(0, rows, length + room)

    def forward(self, inputs: StepInputs, plan: AttentionPlan, tables: Tables, cache: KVCache) -> Tensor:
        """Draft where rows have several places, then run the model: hidden states [T, H] after its last norm."""
        if inputs.places > 1:
            self._draft(inputs, tables, cache)
        taps = Taps(self.taps, self.kept.new_empty(len(inputs.ids), len(self.taps) * self.kept.shape[1]))
        hidden = self.model.forward(inputs, plan, cache, taps)
        fused, kv = self.fuse(taps.states), KV(cache.data, self.layer, inputs.page_table)
        if inputs.starts is None:
            self._follow(inputs, fused, kv)
        else:
            self._follow_chunks(inputs, sum(high - low for low, high in plan.groups), fused, kv, tables)
        return hidden

    # Drafting.

    def _draft(self, inputs: StepInputs, tables: Tables, cache: KVCache) -> None:
        """Write the drafts of every row: to the inputs of the places after the first, and to its history."""
        tokens, kv = PlaceTokens.of(inputs), KV(cache.data, self.layer, inputs.page_table)
        places = tokens.split(inputs.places)
        x = self._before(places[0].rows, places[0].positions)
        for place, following in itertools.pairwise(places):
            y = self._pass(place, x, kv)
            following.ids.copy_(self.tokens.index_select(0, self.head(y).argmax(1)))
        drafted = tokens.beyond(len(x))
        at = torch.add(drafted.positions, drafted.rows, alpha=tables.history.shape[1])
        at = torch.where(drafted.slots > 0, at, 0)  # drafts of no row go to the null row's first token
        tables.history.view(-1).index_copy_(0, at, drafted.ids.int())

    def _pass(self, tokens: PlaceTokens, x: Tensor, kv: KV) -> Tensor:
        """Run the head over a token of each row; x [B, H], the hidden states before, becomes its own."""
        kernels, eps, (_, _, mlp_norm, norm) = self.kernels, self.eps, self.norms
        qkv, normed = self._project(tokens, x, kv)
        y = self.attend(qkv[:, : self.heads], kv, RowBatch(tokens.rows, tokens.kv_lens), self.head_dim**-0.5)
        if self.normed_residual:
            x.copy_(normed)
        y = kernels.add_rms_norm(x, self.output(y), mlp_norm, eps)
        y = self.down(kernels.silu_mul(self.gate_up(y)))
        return kernels.add_rms_norm(x, y, norm, eps)

    def _project(self, tokens: PlaceTokens, x: Tensor, kv: KV) -> tuple[Tensor, Tensor]:
        """Write the KV of tokens; return their rotated queries, keys and values [T, heads, head_dim], and x normed."""
        kernels, eps, (embedding_norm, hidden_norm, _, _) = self.kernels, self.eps, self.norms
        normed = kernels.rms_norm(x, hidden_norm, eps)
        embedded = kernels.rms_norm(self.model.embed(tokens.ids), embedding_norm, eps)
        qkv = self.qkv(torch.cat((embedded, normed), dim=1)).view(len(x), -1, self.head_dim)
        kernels.rope_and_write(qkv, self.rotation, kv, TokenBatch(tokens.positions, tokens.slots))
        return qkv, normed

    # After the model.

    def _follow(self, inputs: StepInputs, fused: Tensor, kv: KV) -> None:
        """Write the KV of a step's tokens, one a row and place, from the model's own hidden states, and keep these."""
        if inputs.places == 1:
            self._project(PlaceTokens.of(inputs), self._before(inputs.rows, inputs.positions), kv)
        else:  # the first place had them when it was drafted from
            count = len(fused) // inputs.places
            self._project(PlaceTokens.of(inputs).beyond(count), fused[:-count], kv)
        self.kept.index_copy_(0, self._places(inputs.rows, inputs.positions), fused)

    def _follow_chunks(self, inputs: StepInputs, decode: int, fused: Tensor, kv: KV, tables: Tables) -> None:
        """Write the KV of a step with chunks after its first `decode` rows; keep what each row's next token needs."""
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
        self._project(PlaceTokens.of(inputs), before, kv)
        self.kept.index_copy_(0, self._places(rows, inputs.kv_lens - 1), fused.index_select(0, (ends - 1).clamp(min=0)))
        self.prefilled.index_copy_(0, rows, generations + inputs.kv_lens)

    def _before(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return the fused hidden states before these positions of these rows, [B, H]."""
        return self.kept.index_select(0, self._places(rows, positions - 1))

    def _places(self, rows: Tensor, positions: Tensor) -> Tensor:
        return torch.add(positions % self.kept_places, rows, alpha=self.kept_places)
