"""The parameters of a dense decoder as loaded: plain tensors, and which part of them each checkpoint tensor fills."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gapless.kernels.matrix import Matrix, layout_named
from gapless.model.config import ModelConfig

_DUMMY_BLOCK = 4_194_301
"""Random numbers drawn for dummy weights; prime, so that no two rows of a matrix repeat each other."""


MODULES = {
    "qkv": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "output": ("self_attn", ("o_proj",)),
    "gate_up": ("mlp", ("gate_proj", "up_proj")),
    "down": ("mlp", ("down_proj",)),
}
"""Each product of a layer: the block and the modules of a checkpoint that it is made of"""


def sizes_of(name: str, config: ModelConfig) -> tuple[int, tuple[int, ...]]:
    """Return how many inputs a product of a layer has, and how many outputs each of its modules."""
    heads, kv = config.heads * config.head_dim, config.kv_heads * config.head_dim
    hidden, middle = config.hidden_size, config.intermediate_size
    known = {
        "qkv": (hidden, (heads, kv, kv)),
        "output": (heads, (hidden,)),
        "gate_up": (hidden, (middle, middle)),
        "down": (middle, (hidden,)),
    }
    return known[name]


class Layer(NamedTuple):
    """Parameters of a decoder layer; products are named as in MODULES."""

    input_norm: Tensor
    """[hidden]; norms are float32 in all models"""
    qkv: Matrix
    qk_norm: Tensor | None
    """[heads + kv_heads, head_dim]: the norm of queries repeated for each head, then that of keys, if there are any"""
    output: Matrix
    mlp_norm: Tensor
    """[hidden]"""
    gate_up: Matrix
    down: Matrix

    def tensors(self) -> list[Tensor]:
        """Return all parameters that there are, in order."""
        parts = [part.named().values() if isinstance(part, Matrix) else (part,) for part in self]
        return [tensor for part in parts for tensor in part if tensor is not None]


class Params(NamedTuple):
    """A whole model. `head` is `embedding` itself where the two are tied."""

    embedding: Tensor
    """[vocab, hidden]"""
    layers: list[Layer]
    norm: Tensor
    """[hidden]"""
    head: Tensor
    """[vocab, hidden]"""


def allocate(config: ModelConfig, dtype: torch.dtype, device: torch.device, below: int = 0) -> Params:
    """Uninitialised parameters. Below each matrix of a layer its memory extends by `below` lines a projection, and
    behind its bias for as many zeros."""
    layers = [allocate_layer(config, dtype, device, below) for _ in range(config.layers)]
    embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
    norm = allocate_norm(config.hidden_size, device=device)
    return Params(embedding, layers, norm, embedding if config.tied else torch.empty_like(embedding))


def allocate_norm(*sizes: int, device: torch.device) -> Tensor:
    """Uninitialised weights of a norm."""
    return torch.empty(*sizes, dtype=torch.float32, device=device)


def allocate_layer(config: ModelConfig, dtype: torch.dtype, device: torch.device, below: int = 0) -> Layer:
    """Uninitialised parameters of one layer; see `allocate`."""
    norm = partial(allocate_norm, device=device)
    layout = layout_named(config.layout)

    def matrix(name: str, biased: bool) -> Matrix:
        depth, outputs = sizes_of(name, config)
        columns, lines = sum(outputs), sum(outputs) + below * len(outputs)
        bias = torch.zeros(lines, dtype=dtype, device=device)[:columns] if biased else None
        kinds = layout.tensors.values()
        stored = (torch.empty(lines, kind.columns(depth), dtype=kind.dtype or dtype, device=device) for kind in kinds)
        return Matrix(tuple(tensor[:columns] for tensor in stored), bias, layout)

    return Layer(
        input_norm=norm(config.hidden_size),
        qkv=matrix("qkv", config.qkv_bias),
        qk_norm=norm(config.heads + config.kv_heads, config.head_dim) if config.qk_norm else None,
        output=matrix("output", config.output_bias),
        mlp_norm=norm(config.hidden_size),
        gate_up=matrix("gate_up", config.mlp_bias),
        down=matrix("down", config.mlp_bias),
    )


def slots(config: ModelConfig, params: Params) -> dict[str, Tensor]:
    """Return where each tensor goes that the checkpoint must hold, by its Hugging Face name."""
    found = {"model.embed_tokens.weight": params.embedding, "model.norm.weight": params.norm}
    if not config.tied:
        found["lm_head.weight"] = params.head
    for i, layer in enumerate(params.layers):
        found |= layer_slots(config, layer, f"model.layers.{i}")
    return found


def layer_slots(config: ModelConfig, layer: Layer, prefix: str) -> dict[str, Tensor]:
    """Return where each tensor of a layer goes that the checkpoint must hold, by its name after `prefix`."""
    found = {"input_layernorm.weight": layer.input_norm, "post_attention_layernorm.weight": layer.mlp_norm}
    for name, (block, modules) in MODULES.items():
        outputs, matrix = list(sizes_of(name, config)[1]), getattr(layer, name)
        for kind, fused in matrix.named().items():
            names = [f"{block}.{module}.{kind}" for module in modules]
            found |= dict(zip(names, torch.split(fused, outputs), strict=True))
    if layer.qk_norm is not None:
        found["self_attn.q_norm.weight"] = layer.qk_norm[: config.heads]
        found["self_attn.k_norm.weight"] = layer.qk_norm[config.heads :]
    return {f"{prefix}.{name}": target for name, target in found.items()}


def shape_of(name: str, target: Tensor) -> tuple[int, ...]:
    """Return the shape that a checkpoint's tensor must have. A norm of heads is repeated for each of them."""
    return tuple(target.shape[-1:] if name.endswith(("q_norm.weight", "k_norm.weight")) else target.shape)


def fill_dummy(params: Params, seed: int) -> None:
    """Norms 1, all else from N(0, 0.02) by `seed`, equal on every device: one random block, laid out end to end."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.empty(_DUMMY_BLOCK).normal_(0.0, 0.02, generator=generator)
    block = numbers.to(device=params.embedding.device, dtype=params.embedding.dtype)
    at = 0
    for tensor in _tensors(params):
        at = _lay(block, at, tensor.view(-1))
    for norm in _norms(params):
        norm.fill_(1.0)


def _lay(block: Tensor, at: int, flat: Tensor) -> int:
    """Fill `flat` from `block`, starting at `at` and wrapping round; returns the next place."""
    done = 0
    while done < len(flat):
        size = min(len(block) - at, len(flat) - done)
        flat[done : done + size] = block[at : at + size]
        done, at = done + size, (at + size) % len(block)
    return at


def _tensors(params: Params) -> Iterator[Tensor]:
    yield params.embedding
    for layer in params.layers:
        yield from layer.tensors()
    if params.head is not params.embedding:
        yield params.head


def _norms(params: Params) -> Iterator[Tensor]:
    yield params.norm
    for layer in params.layers:
        yield layer.input_norm
        yield layer.mlp_norm
        if layer.qk_norm is not None:
            yield layer.qk_norm
