"""The parameters of a decoder as loaded: plain tensors, and which part of them each checkpoint tensor fills."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gapless.base.share import WHOLE_SHARE, Share
from gapless.kernels.kinds import DENSE
from gapless.kernels.matrix import Matrix
from gapless.kernels.views import NormWeights
from gapless.model.config import ModelConfig
from gapless.model.formats.of_model import format_of, product_layout
from gapless.model.formats.seam import WeightFormat
from gapless.model.spec import LayerSpec, NormOrder, QKNorm

PRODUCTS = ("qkv", "output", "gate_up", "down")
"""The products of a layer"""
NORMS = ("input_norm", "attention_norm", "mlp_norm", "output_norm")
"""The norms of its hidden states"""


class Layer(NamedTuple):
    """Parameters of a decoder layer; its norms are None in orders without them."""

    input_norm: NormWeights | None
    qkv: Matrix
    qk_norm: Tensor | None
    """float32 [heads + kv_heads, head_dim]: the norm of each query head, then that of each key head, if there are
    any"""
    output: Matrix
    attention_norm: NormWeights | None
    """The norm of attention's result"""
    mlp_norm: NormWeights | None
    gate_up: Matrix
    down: Matrix
    output_norm: NormWeights | None
    """The norm of the MLP's result"""

    def tensors(self) -> list[Tensor]:
        """Return all parameters that there are, in order."""
        parts = [(*part.tensors, part.bias) if isinstance(part, Matrix) else _flat(part) for part in self]
        return [tensor for part in parts for tensor in part if tensor is not None]

    def norms(self) -> list[NormWeights]:
        """Return the norms of hidden states that there are, in order."""
        return [part for part in self if isinstance(part, NormWeights)]


def _flat(part: NormWeights | Tensor | None) -> list[Tensor]:
    return [x for x in (part if isinstance(part, NormWeights) else (part,)) if x is not None]


class Params(NamedTuple):
    """A whole model. `head` is `embedding` itself where the two are tied."""

    embedding: Tensor
    """[vocab, hidden]; of a share its own tokens, as in `head`"""
    layers: list[Layer]
    norm: NormWeights
    head: Tensor
    """[vocab, hidden]"""
    positions: Tensor | None = None
    """[positions, hidden] learned embeddings of positions"""
    kv_scales: Tensor | None = None
    """float32 [layers, 2] on the host: scales of keys and values in 8 bits, which a quantised checkpoint may have; 0
    for none, and None once read if it has none"""
    share: Share = WHOLE_SHARE


class _Maker(NamedTuple):
    """Makes uninitialised parameters of a rank's share."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    below: int = 0
    format: WeightFormat | None = None
    share: Share = WHOLE_SHARE

    def tensor(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)

    def norm(self, present: bool = True) -> NormWeights | None:
        spec = self.config.spec
        new = partial(torch.zeros, spec.hidden_size, dtype=torch.float32, device=self.device)
        return NormWeights(new(), new() if spec.norm.bias else None) if present else None

    def matrix(self, name: str, layer: LayerSpec, prefix: str) -> Matrix:
        depth, outputs, biased = layer.shared(self.share).products(self.config.spec.hidden_size)[name]
        biased = biased and layer.parts(self.share)[name].biased
        columns, lines = sum(outputs), sum(outputs) + self.below * len(outputs)
        bias = torch.zeros(lines, dtype=self.dtype, device=self.device)[:columns] if biased else None
        layout = product_layout(self.format, self.config, name, layer, prefix)
        if layout == DENSE:
            return Matrix((self.tensor(lines, depth)[:columns],), bias, layout, self.dtype)
        assert not self.below, "tables of adapters are below plain weights alone"
        return Matrix.empty(layout, columns, depth, self.dtype, self.device)._replace(bias=bias)


def allocate(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, below: int = 0, share: Share = WHOLE_SHARE
) -> Params:
    """Uninitialised parameters of a rank's share. Below each matrix of a layer its memory extends by `below` lines a
    projection, and behind its bias for as many zeros."""
    make, spec = _Maker(config, dtype, device, below, format_of(config), share), config.spec
    layers = [_layer(make, layer, config.names.layer.format(i)) for i, layer in enumerate(spec.layers)]
    first, last = spec.own_tokens(share)
    embedding, norm = make.tensor(last - first, spec.hidden_size), make.norm()
    assert norm is not None
    head = embedding if spec.tied else torch.empty_like(embedding)
    positions = make.tensor(spec.positions, spec.hidden_size) if spec.positions else None
    asked = config.quantization
    scales = None if asked is None or asked.at_load else torch.zeros(len(layers), 2)
    return Params(embedding, layers, norm, head, positions, scales, share)


def allocate_layer(
    config: ModelConfig, dtype: torch.dtype, device: torch.device, prefix: str, share: Share = WHOLE_SHARE
) -> Layer:
    """Uninitialised parameters of a rank's share of a layer like the first, whose tensors have names after
    `prefix`."""
    return _layer(_Maker(config, dtype, device, format=format_of(config), share=share), config.spec.layer, prefix)


def allocate_norm(*sizes: int, device: torch.device) -> Tensor:
    """Uninitialised weights of a norm."""
    return torch.empty(*sizes, dtype=torch.float32, device=device)


def _layer(make: _Maker, layer: LayerSpec, prefix: str) -> Layer:
    at, order = layer.attention.shared(make.share), layer.order
    heads = at.heads + at.kv_heads
    added = order in (NormOrder.SANDWICH, NormOrder.POST)
    return Layer(
        input_norm=make.norm(order is not NormOrder.POST),
        qkv=make.matrix("qkv", layer, prefix),
        qk_norm=None if at.qk_norm is QKNorm.NONE else allocate_norm(heads, at.head_dim, device=make.device),
        output=make.matrix("output", layer, prefix),
        attention_norm=make.norm(added),
        mlp_norm=make.norm(order in (NormOrder.PRE, NormOrder.SANDWICH)),
        gate_up=make.matrix("gate_up", layer, prefix),
        down=make.matrix("down", layer, prefix),
        output_norm=make.norm(added),
    )
