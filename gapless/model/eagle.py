"""EAGLE-3 heads, in the checkpoints of the field: a layer that reads hidden states of three of the model's layers."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gapless.base.errors import CheckpointError
from gapless.kernels import native
from gapless.kernels.attention import decode_attention
from gapless.kernels.views import KV, Rotation, RowBatch, TokenBatch
from gapless.model.config import ModelConfig, read_model_config
from gapless.model.dense import DenseModel
from gapless.model.drafting import PlaceTokens
from gapless.model.fields import Fields
from gapless.model.params import WeightSlot
from gapless.model.rope import Rope
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


class EagleLayer:
    """The layer of an EAGLE-3 head. Implements `heads.HeadLayer`."""

    def __init__(self, config: HeadConfig, params: HeadParams, model: DenseModel) -> None:
        kernels, device, layer = model.kernels, params.norm.device, config.layer
        linear = native.draft_linear if kernels.name == "native" else kernels.linear  # oneDNN takes 10 us a call
        self.model, self.kernels, self.taps = model, kernels, config.taps
        self.heads, self.head_dim, self.eps = layer.heads, layer.head_dim, layer.norm_eps
        self.normed_residual = config.normed_residual
        self.norms = params.embedding_norm, params.hidden_norm, params.mlp_norm, params.norm
        weights = params.fuse, params.qkv, params.output, params.gate_up, params.down, params.head
        self.fuse, self.qkv, self.output, self.gate_up, self.down, self.head = (
            linear(weight, None) for weight in weights
        )
        self.tokens: Tensor | None = params.offsets + torch.arange(len(params.offsets), device=device)
        if len(params.offsets) == layer.vocab_size and not params.offsets.any():  # san: ok(at load)
            self.tokens = None
        self.rotation = Rotation(None, layer.norm_eps, Rope(layer, model.max_model_len, device).table)
        self.attend = kernels.decode_attention or decode_attention

    def draft(self, tokens: PlaceTokens, x: Tensor, kv: KV) -> Tensor:
        """See `HeadLayer.draft`."""
        kernels, eps, (_, _, mlp_norm, norm) = self.kernels, self.eps, self.norms
        qkv, normed = self._project(tokens, x, kv)
        y = self.attend(qkv[:, : self.heads], kv, RowBatch(tokens.rows, tokens.kv_lens), self.head_dim**-0.5)
        if self.normed_residual:
            x.copy_(normed)
        y = kernels.add_rms_norm(x, self.output(y), mlp_norm, eps)
        y = self.down(kernels.silu_mul(self.gate_up(y)))
        return self.head(kernels.add_rms_norm(x, y, norm, eps))

    def write(self, tokens: PlaceTokens, x: Tensor, kv: KV) -> None:
        """See `HeadLayer.write`."""
        self._project(tokens, x, kv)

    def _project(self, tokens: PlaceTokens, x: Tensor, kv: KV) -> tuple[Tensor, Tensor]:
        """Write the KV of tokens; return their rotated queries, keys and values [T, heads, head_dim], and x normed."""
        kernels, eps, (embedding_norm, hidden_norm, _, _) = self.kernels, self.eps, self.norms
        normed = kernels.rms_norm(x, hidden_norm, eps)
        embedded = kernels.rms_norm(self.model.embed(tokens.ids), embedding_norm, eps)
        qkv = self.qkv(torch.cat((embedded, normed), dim=1)).view(len(x), -1, self.head_dim)
        kernels.rope_and_write(qkv, self.rotation, kv, TokenBatch(tokens.positions, tokens.slots))
        return qkv, normed
