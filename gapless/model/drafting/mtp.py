"""MTP layers: a checkpoint's layers that predict further tokens, by the names that families give them.

A layer takes the model's hidden state after its last norm, and the embedding of the token after it. A product joins
them, a decoder layer of the model's kind follows, and a norm, and the model's own matrix makes logits. The first
of a checkpoint's layers drafts every token, from its own hidden state where the one before is of a draft.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gapless.base.errors import CheckpointError
from gapless.kernels.matrix import dense
from gapless.kernels.views import KV
from gapless.model.decoder import Decoder
from gapless.model.drafting.draws import PlaceTokens
from gapless.model.drafting.heads import HeadLayer
from gapless.model.formats.of_model import format_of
from gapless.model.params import Layer, allocate_layer, allocate_norm
from gapless.model.slots import Slot, layer_slots, plain_slots
from gapless.model.weights import load_weights, tensor_names


class MtpNames(NamedTuple):
    """The names of an MTP layer's parts in a checkpoint."""

    layer: str
    join: str
    """The product that joins embedding and hidden state"""
    embedding_norm: str
    hidden_norm: str
    norm: str
    hidden_first: bool = False
    """Whether the hidden state comes before the embedding there"""
    normed: bool = True
    """Whether the norm's output is the hidden state for the next token, and not its input"""


def families(layers: int) -> tuple[MtpNames, ...]:
    """Return the names that Qwen, MiMo and DeepSeek give to the first MTP layer of a model of `layers` layers."""
    mimo, deepseek = "model.mtp_layers.0", f"model.layers.{layers}"
    return (
        MtpNames("mtp.layers.0", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"),
        MtpNames(
            mimo, f"{mimo}.input_proj", f"{mimo}.token_layernorm", f"{mimo}.hidden_layernorm",
            f"{mimo}.final_layernorm", hidden_first=True,
        ),
        MtpNames(
            deepseek, f"{deepseek}.eh_proj", f"{deepseek}.enorm", f"{deepseek}.hnorm", f"{deepseek}.shared_head.norm",
            normed=False,
        ),
    )  # fmt: skip


def of_mtp_layers(names: Collection[str]) -> frozenset[str]:
    """Return the tensors of MTP layers in a checkpoint."""
    joins = (name.partition(".eh_proj.")[0] for name in names if ".eh_proj." in name)
    prefixes = ("mtp.", "model.mtp_layers.", *(f"{prefix}." for prefix in joins))
    return frozenset(name for name in names if name.startswith(prefixes))


class MtpParams(NamedTuple):
    """Parameters of an MTP layer, as loaded; H is the model's width."""

    join: Tensor
    """[H, 2 H], for the embedding before the hidden state"""
    embedding_norm: Tensor
    hidden_norm: Tensor
    norm: Tensor
    layer: Layer
    normed: bool


def load_mtp(directory: Path, model: Decoder) -> MtpParams:
    """Read the first MTP layer of a model's checkpoint. Raises CheckpointError naming the directory if it has none, or
    the file and the tensor."""
    config, names, device, share = model.config, tensor_names(directory), model.device, model.group.share
    if not model.spec.plain or 0 not in model.ropes:
        raise CheckpointError(
            f"{directory}: MTP layers are computed for decoders with an RMSNorm before each half of a layer, and a "
            "gated SiLU: set speculative_config.method to another one"
        )
    known = families(len(model.spec.layers))
    family = next((one for one in known if any(name.startswith(f"{one.join}.") for name in names)), None)
    if family is None:
        raise CheckpointError(
            f"{directory}: has no MTP layer of a known kind, none of the tensors "
            f"{', '.join(f'{family.join}.weight' for family in known)}: set speculative_config.method to another one"
        )
    hidden, layer = model.spec.hidden_size, allocate_layer(config, model.dtype, device, family.layer, share)
    first, second, last = (allocate_norm(hidden, device=device) for _ in range(3))
    join = torch.empty(hidden, 2 * hidden, dtype=model.dtype, device=device)
    params = MtpParams(join, first, second, last, layer, family.normed)
    own = zip((family.join, family.embedding_norm, family.hidden_norm, family.norm), params[:4], strict=True)
    slots = layer_slots(config, layer, family.layer, share)
    for name, target in own:
        slots |= (
            plain_slots(format_of(config), name, target, (*target.shape,))
            if target is join
            else {f"{name}.weight": Slot.of(target)}
        )
    load_weights(directory, slots, unused=names - slots.keys())
    if family.hidden_first:
        params = params._replace(join=torch.cat(params.join.chunk(2, dim=1)[::-1], dim=1))
    return params


class MtpLayer(HeadLayer):
    """An MTP layer beside its model."""

    def __init__(self, params: MtpParams, model: Decoder) -> None:
        linear = model.kernels.linear
        super().__init__(model, model.config, params.layer, params.norm, model.ropes[0], linear)
        self.embedding_norm, self.hidden_norm, self.normed = params.embedding_norm, params.hidden_norm, params.normed
        self.join = linear(dense(params.join))

    def draft(self, tokens: PlaceTokens, x: Tensor, kv: KV) -> Tensor:
        joined, y = self.enter(tokens, x)
        y = self.run(joined, y, tokens, kv)
        x.copy_(y if self.normed else joined)
        return self.model.logits(y)

    def enter(self, tokens: PlaceTokens, x: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.kernels.rms_norm(x, self.hidden_norm, self.eps)
        joined = self.join(torch.cat((self.embed(tokens, self.embedding_norm), normed), dim=1))
        return joined, self.kernels.rms_norm(joined, self.block.first_norm, self.eps)
