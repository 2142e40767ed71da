"""The parameters of a decoder as loaded: plain tensors, and which part of them each checkpoint tensor fills."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gapless.kernels.matrix import Matrix, layout_named
from gapless.kernels.views import NormWeights
from gapless.model.config import ModelConfig
from gapless.model.family import TensorNames
from gapless.model.spec import LayerSpec, ModelSpec, NormOrder, QKNorm

_DUMMY_BLOCK = 4_194_301
"""Random numbers drawn for dummy weights; prime, so that no two rows of a matrix repeat each other."""
PRODUCTS = ("qkv", "output", "gate_up", "down")
"""The products of a layer"""
NORMS = ("input_norm", "attention_norm", "mlp_norm", "output_norm")
"""The norms of its hidden states"""


class Slot(NamedTuple):
    """The place of a checkpoint's tensor."""

    target: Tensor
    shape: tuple[int, ...]
    """The tensor's shape in the checkpoint"""
    arrange: Callable[[Tensor], Tensor] | None = None
    """Makes the contents of `target` of it; None if they are a copy, or repeat it"""

    @classmethod
    def of(cls, target: Tensor) -> Slot:
        """Return the slot of a tensor that is copied as it is."""
        return cls(target, tuple(target.shape))

    def fill(self, read: Tensor) -> None:
        self.target.copy_(read if self.arrange is None else self.arrange(read))


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
        parts = [part.named().values() if isinstance(part, Matrix) else _flat(part) for part in self]
        return [tensor for part in parts for tensor in part]

    def norms(self) -> list[NormWeights]:
        """Return the norms of hidden states that there are, in order."""
        return [part for part in self if isinstance(part, NormWeights)]


def _flat(part: NormWeights | Tensor | None) -> list[Tensor]:
    return [x for x in (part if isinstance(part, NormWeights) else (part,)) if x is not None]


class Params(NamedTuple):
    """A whole model. `head` is `embedding` itself where the two are tied."""

    embedding: Tensor
    """[vocab, hidden]"""
    layers: list[Layer]
    norm: NormWeights
    head: Tensor
    """[vocab, hidden]"""
    positions: Tensor | None = None
    """[positions, hidden] learned embeddings of positions"""


class _Maker(NamedTuple):
    """Makes uninitialised parameters."""

    config: ModelConfig
    dtype: torch.dtype
    device: torch.device
    below: int

    def tensor(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=self.dtype, device=self.device)

    def norm(self, present: bool = True) -> NormWeights | None:
        spec = self.config.spec
        new = partial(torch.zeros, spec.hidden_size, dtype=torch.float32, device=self.device)
        return NormWeights(new(), new() if spec.norm.bias else None) if present else None

    def matrix(self, name: str, layer: LayerSpec) -> Matrix:
        layout = layout_named(self.config.layout)
        depth, outputs, biased = layer.products(self.config.spec.hidden_size)[name]
        columns, lines = sum(outputs), sum(outputs) + self.below * len(outputs)
        bias = torch.zeros(lines, dtype=self.dtype, device=self.device)[:columns] if biased else None
        stored = [
            torch.empty(lines, kind.columns(depth), dtype=kind.dtype or self.dtype, device=self.device)
            for kind in layout.tensors.values()
        ]
        return Matrix(tuple(tensor[:columns] for tensor in stored), bias, layout)


def allocate(config: ModelConfig, dtype: torch.dtype, device: torch.device, below: int = 0) -> Params:
    """Uninitialised parameters. Below each matrix of a layer its memory extends by `below` lines a projection, and
    behind its bias for as many zeros."""
    make, spec = _Maker(config, dtype, device, below), config.spec
    layers = [_layer(make, layer) for layer in spec.layers]
    embedding, norm = make.tensor(spec.vocab_size, spec.hidden_size), make.norm()
    assert norm is not None
    head = embedding if spec.tied else torch.empty_like(embedding)
    positions = make.tensor(spec.positions, spec.hidden_size) if spec.positions else None
    return Params(embedding, layers, norm, head, positions)


def allocate_layer(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> Layer:
    """Uninitialised parameters of the first layer."""
    return _layer(_Maker(config, dtype, device, 0), config.spec.layer)


def allocate_norm(*sizes: int, device: torch.device) -> Tensor:
    """Uninitialised weights of a norm."""
    return torch.empty(*sizes, dtype=torch.float32, device=device)


def _layer(make: _Maker, layer: LayerSpec) -> Layer:
    at, order = layer.attention, layer.order
    heads = at.heads + at.kv_heads
    added = order in (NormOrder.SANDWICH, NormOrder.POST)
    return Layer(
        input_norm=make.norm(order is not NormOrder.POST),
        qkv=make.matrix("qkv", layer),
        qk_norm=None if at.qk_norm is QKNorm.NONE else allocate_norm(heads, at.head_dim, device=make.device),
        output=make.matrix("output", layer),
        attention_norm=make.norm(added),
        mlp_norm=make.norm(order in (NormOrder.PRE, NormOrder.SANDWICH)),
        gate_up=make.matrix("gate_up", layer),
        down=make.matrix("down", layer),
        output_norm=make.norm(added),
    )


def slots(config: ModelConfig, params: Params) -> dict[str, Slot]:
    """Return where each tensor goes that the checkpoint must hold, by its Hugging Face name."""
    names, spec = config.names, config.spec
    found = {f"{names.embedding}.weight": Slot.of(params.embedding)} | _norm_slots(names.norm, params.norm, names)
    if params.positions is not None:
        found[f"{names.positions}.weight"] = Slot.of(params.positions)
    if not spec.tied:
        found[f"{names.head}.weight"] = Slot.of(params.head)
    for i, layer in enumerate(params.layers):
        found |= _layer_slots(spec, spec.layers[i], names, layer, names.layer.format(i))
    return found


def layer_slots(config: ModelConfig, layer: Layer, prefix: str) -> dict[str, Slot]:
    """Return where each tensor of the first layer goes that the checkpoint must hold, by its name after `prefix`."""
    return _layer_slots(config.spec, config.spec.layer, config.names, layer, prefix)


def _layer_slots(spec: ModelSpec, kind: LayerSpec, names: TensorNames, layer: Layer, prefix: str) -> dict[str, Slot]:
    found: dict[str, Slot] = {}
    for name in NORMS:
        if (norm := getattr(layer, name)) is not None:
            found |= _norm_slots(getattr(names, name), norm, names)
    for name in PRODUCTS:
        outputs, matrix = names.outputs(name, kind, spec.hidden_size), getattr(layer, name)
        for suffix, whole in matrix.named().items():
            parts = zip(names.modules(name), torch.split(whole, list(outputs)), strict=True)
            found |= {f"{module}.{suffix}": _part_slot(part, name, spec, kind, names, i)
                      for i, (module, part) in enumerate(parts)}  # fmt: skip
    if layer.qk_norm is not None:
        found |= _qk_norm_slots(spec, kind, names, layer.qk_norm)
    return {f"{prefix}.{name}": slot for name, slot in found.items()}


def _norm_slots(name: str, norm: NormWeights, names: TensorNames) -> dict[str, Slot]:
    slot = Slot.of(norm.weight)
    found = {f"{name}.weight": slot._replace(arrange=_plus_one) if names.norms_lack_one else slot}
    return found if norm.bias is None else found | {f"{name}.bias": Slot.of(norm.bias)}


def _plus_one(weight: Tensor) -> Tensor:
    return weight.float() + 1


def _part_slot(part: Tensor, name: str, spec: ModelSpec, kind: LayerSpec, names: TensorNames, number: int) -> Slot:
    """Return the slot of one module's part of a product's tensor."""
    turned = names.transposed and part.dim() == 2
    order = rope_rows(spec, kind, names, name, number)
    shape = tuple(part.shape[::-1] if turned else part.shape)

    def arrange(read: Tensor) -> Tensor:
        read = read.mT if turned else read
        return read if order is None else read[order]

    return Slot(part, shape, arrange if turned or order is not None else None)


def rope_rows(spec: ModelSpec, kind: LayerSpec, names: TensorNames, name: str, number: int) -> Tensor | None:
    """Return the kernels' order of a module's outputs, int64; None for the checkpoint's own. See `RopeConfig.order`."""
    at = kind.attention
    if name != "qkv" or at.rope is None or number == 2:
        return None
    rope = spec.ropes[at.rope]
    if not rope.interleaved and rope.rotated(at.head_dim) == at.head_dim:
        return None
    queries, keys = at.heads * at.head_dim, at.kv_heads * at.head_dim
    within = torch.tensor(rope.order(at.head_dim))
    heads = at.heads + at.kv_heads if len(names.qkv) == 1 else (at.heads, at.kv_heads)[number]
    rows = (torch.arange(heads)[:, None] * at.head_dim + within).flatten()
    return torch.cat((rows, torch.arange(queries + keys, queries + 2 * keys))) if len(names.qkv) == 1 else rows


def _qk_norm_slots(spec: ModelSpec, kind: LayerSpec, names: TensorNames, norm: Tensor) -> dict[str, Slot]:
    """Return the slots of the norms of queries and keys: the weight of one head, or of all together."""
    at = kind.attention
    order = None if at.rope is None else torch.tensor(spec.ropes[at.rope].order(at.head_dim))
    found = {}
    for name, part in ((names.q_norm, norm[: at.heads]), (names.k_norm, norm[at.heads :])):
        shape = (at.head_dim,) if at.qk_norm is QKNorm.HEAD else (part.numel(),)

        def arrange(read: Tensor) -> Tensor:
            heads = read.float().view(-1, at.head_dim)
            return (heads if order is None else heads[:, order]) + (1 if names.norms_lack_one else 0)

        found[f"{name}.weight"] = Slot(part, shape, arrange)
    return found


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
    if params.positions is not None:
        yield params.positions


def _norms(params: Params) -> Iterator[Tensor]:
    yield params.norm.weight
    for layer in params.layers:
        yield from (norm.weight for norm in layer.norms())
        if layer.qk_norm is not None:
            yield layer.qk_norm
