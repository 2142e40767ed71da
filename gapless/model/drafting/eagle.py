"""EAGLE-3 heads, in the checkpoints of the field: a layer that reads hidden states of three of the model's layers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gapless.base.errors import CheckpointError
from gapless.base.share import WHOLE_SHARE, Share
from gapless.kernels import native
from gapless.kernels.matrix import dense
from gapless.kernels.views import KV
from gapless.model.config import ModelConfig, read_model_config
from gapless.model.decoder import Decoder
from gapless.model.drafting.draws import PlaceTokens
from gapless.model.drafting.heads import HeadLayer
from gapless.model.families import EAGLE_FAMILIES
from gapless.model.fields import Fields, warn_of
from gapless.model.params import Layer, allocate_layer, allocate_norm
from gapless.model.rope import rope_tables
from gapless.model.slots import Slot, layer_slots
from gapless.model.weights import load_weights, tensor_names

UNREAD_TENSORS = ("t2d", "embed_tokens.weight")
"""Tensors of a checkpoint that are not read: the inverse of `d2t`, and the model's own embedding"""


class HeadConfig(NamedTuple):
    """The config.json of a head."""

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
        layer = read_model_config(directory, EAGLE_FAMILIES)
        fields, own, at = layer.files[0], layer.spec.layer.attention, model.spec.layer.attention
        for name, found, wanted in (
            ("vocab_size", layer.spec.vocab_size, model.spec.vocab_size),
            ("hidden_size", layer.spec.hidden_size, model.spec.hidden_size),
            ("num_key_value_heads", own.kv_heads, at.kv_heads),
            ("head_dim", own.head_dim, at.head_dim),
            ("num_hidden_layers", len(layer.spec.layers), 1),
        ):
            if found != wanted:
                raise fields.error(name, f"must be {wanted}, for this model", found)
        if layer.quantization is not None:
            raise fields.error("quantization_config", "must not be there: weights of heads are plain")
        if not layer.spec.plain:
            raise fields.error("hidden_act", "must be silu: other heads are not supported")
        for name in ("attention_bias", "mlp_bias", "norm_before_fc", "fc_norm"):
            if fields.flag(name, False):
                raise fields.error(name, "must be false: such heads are not supported")
        eagle = fields.sub("eagle_config")
        if not eagle.flag("use_aux_hidden_state", True):
            raise eagle.error("use_aux_hidden_state", "must be true: other heads are not supported")
        head = cls(
            layer, fields.whole("draft_vocab_size", model.spec.vocab_size), _taps(fields, len(model.spec.layers)),
            fields.flag("norm_before_residual", False),
        )  # fmt: skip
        warn_of(fields.heard())
        return head


def _taps(fields: Fields, layers: int) -> tuple[int, ...]:
    name = "eagle_aux_hidden_state_layer_ids"
    owner = fields.sub("eagle_config") if name in fields.sub("eagle_config") else fields
    taps = owner.get(name) or [2, layers // 2, layers - 3]
    whole = isinstance(taps, list) and all(type(tap) is int for tap in taps)
    if whole and taps[0] == 1:  # such heads count layers from 0 and mean the output of each
        taps = [tap + 1 for tap in taps]
    if not whole or not all(0 < tap <= layers for tap in taps) or len(set(taps)) < len(taps):
        raise owner.error(name, f"must be different layers of the model, which has {layers}", taps)
    return tuple(taps)


class HeadParams(NamedTuple):
    """Parameters of a head, as loaded; H is the model's width."""

    fuse: Tensor
    """[H, taps * H]"""
    hidden_norm: Tensor
    layer: Layer
    """A layer whose input norm is for embeddings; hidden states are concatenated to them: `qkv` is [.., 2 H]."""
    norm: Tensor
    head: Tensor
    """[drafted, H]"""
    offsets: Tensor
    """int64 [drafted], the difference of a draft's token id from its index"""


def load_params(
    directory: Path, config: HeadConfig, dtype: torch.dtype, device: torch.device, share: Share = WHOLE_SHARE
) -> HeadParams:
    """Read a rank's share of the parameters of a head: its layer is divided, and its logits are the leader's. Raises
    CheckpointError naming the file and the tensor."""
    new = partial(torch.empty, dtype=dtype, device=device)
    names, hidden, drafted = tensor_names(directory), config.layer.spec.hidden_size, config.drafted
    prefix = "midlayer" if any(name.startswith("midlayer.") for name in names) else "layers.0"
    layer = allocate_layer(config.layer, dtype, device, prefix, share)
    layer = layer._replace(qkv=layer.qkv._replace(tensors=(new(len(layer.qkv.tensors[0]), 2 * hidden),)))
    offsets = torch.zeros(drafted, dtype=torch.int64, device=device)
    norms = [allocate_norm(hidden, device=device) for _ in range(2)]
    params = HeadParams(
        new(hidden, len(config.taps) * hidden), norms[0], layer, norms[1],
        new(drafted if share.leads else 0, hidden), offsets,
    )  # fmt: skip
    own = {"fc": params.fuse, f"{prefix}.hidden_norm": params.hidden_norm, "norm": params.norm}
    own |= {"lm_head": params.head} if share.leads else {}
    slots = layer_slots(config.layer, layer, prefix, share)
    slots |= {f"{name}.weight": Slot.of(target) for name, target in own.items()}
    if drafted < config.layer.spec.vocab_size or "d2t" in names:
        slots["d2t"] = Slot.of(offsets)
    load_weights(directory, slots, unused=UNREAD_TENSORS if share.leads else (*UNREAD_TENSORS, "lm_head.weight"))
    tokens = offsets + torch.arange(drafted, device=device)
    if not ((tokens >= 0) & (tokens < config.layer.spec.vocab_size)).all():  # san: ok(at load)
        raise CheckpointError(f"{directory}: tensor 'd2t' gives tokens outside of the model's vocabulary")
    return params


class EagleLayer(HeadLayer):
    """The layer of an EAGLE-3 head."""

    def __init__(self, config: HeadConfig, params: HeadParams, model: Decoder) -> None:
        kernels, device = model.kernels, params.norm.device
        linear = native.draft_linear if kernels.name == "native" else kernels.linear  # oneDNN takes 10 us a call
        table = rope_tables(config.layer, model.max_model_len, device)[0]
        super().__init__(model, config.layer, params.layer, params.norm, table, linear)
        self.taps, self.hidden_norm, self.normed_residual = config.taps, params.hidden_norm, config.normed_residual
        self._fuse = linear(dense(params.fuse))
        self.head = linear(dense(params.head)) if model.group.share.leads else None
        if len(params.offsets) < config.layer.spec.vocab_size or params.offsets.any():  # san: ok(at load)
            self.tokens = params.offsets + torch.arange(len(params.offsets), device=device)

    def fuse(self, states: Tensor) -> Tensor:
        return self._fuse(states)

    def draft(self, tokens: PlaceTokens, x: Tensor, kv: KV) -> Tensor:
        normed, y = self.enter(tokens, x)
        if self.normed_residual:
            x.copy_(normed)
        hidden = self.run(x, y, tokens, kv)
        return hidden[:, :0] if self.head is None else self.head(hidden)

    def enter(self, tokens: PlaceTokens, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.kernels.rms_norm(x, self.hidden_norm, self.eps)
        return normed, torch.cat((self.embed(tokens, self.block.first_norm), normed), dim=1)
