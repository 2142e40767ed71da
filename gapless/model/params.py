"""The parameters of a dense decoder as loaded: plain tensors, and which part of them each checkpoint tensor fills."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gapless.model.config import ModelConfig

_DUMMY_BLOCK = 4_194_301
"""Random numbers drawn for dummy weights; prime, so that no two rows of a matrix repeat each other."""


class Layer(NamedTuple):
    """Parameters of a decoder layer. Projections of one input are one matrix; what the family lacks is None."""

    input_norm: Tensor
    """[hidden]"""
    qkv: Tensor
    """[(heads + 2 * kv_heads) * head_dim, hidden]"""
    qkv_bias: Tensor | None
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim]: the norm of queries repeated for each head, then that of keys"""
    output: Tensor
    """[hidden, heads * head_dim]"""
    output_bias: Tensor | None
    mlp_norm: Tensor
    """[hidden]"""
    gate_up: Tensor
    """[2 * intermediate, hidden]"""
    gate_up_bias: Tensor | None
    down: Tensor
    """[hidden, intermediate]"""
    down_bias: Tensor | None


class Params(NamedTuple):
    """A whole model. `head` is `embedding` itself where the two are tied."""

    embedding: Tensor
    """[vocab, hidden]"""
    layers: list[Layer]
    norm: Tensor
    """[hidden]"""
    head: Tensor
    """[vocab, hidden]"""


class WeightSlot(NamedTuple):
    """Destination of one checkpoint tensor of `shape`; `target` may have leading axes that it is repeated over."""

    target: Tensor
    shape: tuple[int, ...]


def allocate(config: ModelConfig, dtype: torch.dtype, device: torch.device, below: int = 0) -> Params:
    """Uninitialised parameters. Below each matrix of a layer its memory goes on for `below` lines a projection, and
    behind its bias for as many zeros."""
    layers = [allocate_layer(config, dtype, device, below) for _ in range(config.layers)]
    embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
    norm = torch.empty(config.hidden_size, dtype=dtype, device=device)
    return Params(embedding, layers, norm, embedding if config.tied else torch.empty_like(embedding))


def allocate_layer(config: ModelConfig, dtype: torch.dtype, device: torch.device, below: int = 0) -> Layer:
    """Uninitialised parameters of one layer; see `allocate`."""

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def matrix(columns: int, depth: int, projections: int = 1) -> Tensor:
        return new(columns + below * projections, depth)[:columns]

    def bias(wanted: bool, size: int, projections: int = 1) -> Tensor | None:
        return torch.zeros(size + below * projections, dtype=dtype, device=device)[:size] if wanted else None

    hidden, middle, dim = config.hidden_size, config.intermediate_size, config.head_dim
    wide = (config.heads + 2 * config.kv_heads) * dim
    return Layer(
        input_norm=new(hidden),
        qkv=matrix(wide, hidden, 3),
        qkv_bias=bias(config.qkv_bias, wide, 3),
        qk_norm=new(config.heads + config.kv_heads, dim) if config.qk_norm else None,
        output=matrix(hidden, config.heads * dim),
        output_bias=bias(config.output_bias, hidden),
        mlp_norm=new(hidden),
        gate_up=matrix(2 * middle, hidden, 2),
        gate_up_bias=bias(config.mlp_bias, 2 * middle, 2),
        down=matrix(hidden, middle),
        down_bias=bias(config.mlp_bias, hidden),
    )


def slots(config: ModelConfig, params: Params) -> dict[str, WeightSlot]:
    """Every tensor that the checkpoint must hold, by its Hugging Face name."""
    found = {"model.embed_tokens.weight": params.embedding, "model.norm.weight": params.norm}
    if not config.tied:
        found["lm_head.weight"] = params.head
    named = {name: WeightSlot(target, tuple(target.shape)) for name, target in found.items()}
    for i, layer in enumerate(params.layers):
        named |= layer_slots(config, layer, f"model.layers.{i}")
    return named


def layer_slots(config: ModelConfig, layer: Layer, prefix: str) -> dict[str, WeightSlot]:
    """Every tensor of a layer that the checkpoint must hold, by its name after `prefix`."""
    named = {f"{prefix}.{name}": target for name, target in _layer_tensors(config, layer)}
    heads = ("q_norm.weight", "k_norm.weight")
    return {
        name: WeightSlot(target, (config.head_dim,) if name.endswith(heads) else tuple(target.shape))
        for name, target in named.items()
    }


def _layer_tensors(config: ModelConfig, layer: Layer) -> Iterator[tuple[str, Tensor]]:
    kv = config.kv_heads * config.head_dim
    qkv, middle = (config.heads * config.head_dim, kv, kv), (config.intermediate_size,) * 2
    yield "input_layernorm.weight", layer.input_norm
    yield "post_attention_layernorm.weight", layer.mlp_norm
    yield from _split("self_attn", ("q_proj", "k_proj", "v_proj"), qkv, layer.qkv, layer.qkv_bias)
    yield from _split("self_attn", ("o_proj",), (config.hidden_size,), layer.output, layer.output_bias)
    yield from _split("mlp", ("gate_proj", "up_proj"), middle, layer.gate_up, layer.gate_up_bias)
    yield from _split("mlp", ("down_proj",), (config.hidden_size,), layer.down, layer.down_bias)
    if layer.qk_norm is not None:
        yield "self_attn.q_norm.weight", layer.qk_norm[: config.heads]
        yield "self_attn.k_norm.weight", layer.qk_norm[config.heads :]


def _split(
    block: str, names: tuple[str, ...], sizes: tuple[int, ...], weight: Tensor, bias: Tensor | None
) -> Iterator[tuple[str, Tensor]]:
    for kind, fused in (("weight", weight), ("bias", bias)):
        if fused is not None:
            yield from zip((f"{block}.{name}.{kind}" for name in names), torch.split(fused, list(sizes)), strict=True)


def fill_dummy(params: Params, seed: int) -> None:
    """Norms 1, all else from N(0, 0.02) by `seed`, equal on every device: one random block, laid out end to end."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.empty(_DUMMY_BLOCK).normal_(0.0, 0.02, generator=generator)
    block = numbers.to(device=params.embedding.device, dtype=params.embedding.dtype)
    at = 0
    for tensor in _tensors(params):
        if tensor is not None:
            at = _lay(block, at, tensor.view(-1))
    for norm in _norms(params):
        norm.fill_(1.0)


def _lay(block: Tensor, at: int, flat: Tensor) -> int:
    """Fill `flat` from `block`, starting at `at` and wrapping round; the place to go on from."""
    done = 0
    while done < len(flat):
        size = min(len(block) - at, len(flat) - done)
        flat[done : done + size] = block[at : at + size]
        done, at = done + size, (at + size) % len(block)
    return at


def _tensors(params: Params) -> Iterator[Tensor | None]:
    yield params.embedding
    for layer in params.layers:
        yield from layer
    if params.head is not params.embedding:
        yield params.head


def _norms(params: Params) -> Iterator[Tensor]:
    yield params.norm
    for layer in params.layers:
        yield layer.input_norm
        yield layer.mlp_norm
        if layer.qk_norm is not None:
            yield layer.qk_norm
