"""Random weights in place of a checkpoint's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gapless.kernels.kinds import DENSE
from gapless.kernels.matrix import Matrix, dense, round_to
from gapless.kernels.views import NormWeights
from gapless.model.config import ModelConfig
from gapless.model.params import PRODUCTS, Params, allocate
from gapless.model.shares import ALL, Cut, module_cuts, token_cut

_DUMMY_BLOCK = 4_194_301
"""Random numbers drawn for dummy weights; prime, so that no two rows of a matrix repeat each other."""


class _Part(NamedTuple):
    """A part of a model that is filled."""

    target: Matrix | None
    """None: another rank has it"""
    shape: torch.Size
    """The shape of the whole that it is cut from"""
    cut: Cut = ALL


def fill_dummy(params: Params, seed: int, config: ModelConfig) -> None:
    """Norms 1, all else from N(0, 0.02) by `seed`, equal on every device: one random block, laid out end to end.
    Quantised weights are these numbers, rounded. A rank's share is cut from the whole."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.empty(_DUMMY_BLOCK).normal_(0.0, 0.02, generator=generator)
    block = numbers.to(device=params.embedding.device, dtype=params.embedding.dtype)
    at = 0
    for target, shape, cut in _parts(params, config):
        if target is not None and target.layout == DENSE and cut == ALL:
            _lay(block, at, target.tensors[0].view(-1))
        elif target is not None:
            rows, columns = (*shape, 1)[:2]
            _lay_rows(block, at, target, cut if cut.rows else cut._replace(rows=((0, rows),)), columns)
        at = (at + shape.numel()) % len(block)
    for norm in _norms(params):
        norm.fill_(1.0)


def _lay_rows(block: Tensor, at: int, target: Matrix, cut: Cut, columns: int) -> None:
    """Fill a rounded or cut part by pieces of whole rows; see `_lay`."""
    begin, size, inputs = 0, max(1, len(block) // columns), cut.of_columns
    for first, last in cut.rows:
        for start in range(first, last, size):
            plain = block.new_empty(min(size, last - start), columns)
            _lay(block, (at + start * columns) % len(block), plain.view(-1))
            rounded = inputs.of_matrix(Matrix(round_to(target.layout, plain), None, target.layout))
            for own, tensor in zip(target.tensors, rounded.tensors, strict=True):
                own[begin : begin + len(plain)] = tensor.view_as(own[begin : begin + len(plain)])
            begin += len(plain)


def _lay(block: Tensor, at: int, flat: Tensor) -> None:
    """Fill `flat` from `block`, starting at `at` and wrapping round."""
    done = 0
    while done < len(flat):
        size = min(len(block) - at, len(flat) - done)
        flat[done : done + size] = block[at : at + size]
        done, at = done + size, (at + size) % len(block)


def _parts(params: Params, config: ModelConfig) -> Iterator[_Part]:
    whole = params
    if params.share.world > 1:
        whole = allocate(config, params.embedding.dtype, torch.device("meta"))
    tokens = token_cut(config.spec, params.share)
    yield _plain(params.embedding, whole.embedding, tokens)
    for kind, own, layer in zip(config.spec.layers, params.layers, whole.layers, strict=True):
        for name in layer._fields:
            cut = ALL
            if name in PRODUCTS:
                (cut,) = module_cuts(name, kind, config.spec.hidden_size, params.share, 1)
            yield from _field_parts(getattr(own, name), getattr(layer, name), cut)
    if whole.head is not whole.embedding:
        yield _plain(params.head, whole.head, tokens)
    if whole.positions is not None:
        yield _plain(params.positions, whole.positions)


def _field_parts(own: Any, whole: Any, cut: Cut) -> Iterator[_Part]:
    """Yield the parts of a field of a layer."""
    if isinstance(whole, Matrix):
        yield _Part(own, torch.Size((whole.outputs, whole.inputs)), cut)
        if whole.bias is not None:
            yield _plain(own.bias, whole.bias, cut.of_rows)
    else:
        pairs = zip(own, whole, strict=True) if isinstance(whole, NormWeights) else [(own, whole)]
        yield from (_plain(mine, tensor) for mine, tensor in pairs if tensor is not None)


def _plain(own: Tensor | None, whole: Tensor, cut: Cut = ALL) -> _Part:
    return _Part(None if own is None else dense(own), whole.shape, cut)


def _norms(params: Params) -> Iterator[Tensor]:
    yield params.norm.weight
    for layer in params.layers:
        yield from (norm.weight for norm in layer.norms())
        if layer.qk_norm is not None:
            yield layer.qk_norm
