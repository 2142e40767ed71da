"""Random weights in place of a checkpoint's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gapless.kernels.kinds import DENSE
from gapless.kernels.matrix import Matrix, round_to
from gapless.kernels.views import NormWeights
from gapless.model.params import Layer, Params

_DUMMY_BLOCK = 4_194_301
"""Random numbers drawn for dummy weights; prime, so that no two rows of a matrix repeat each other."""


def fill_dummy(params: Params, seed: int) -> None:
    """Norms 1, all else from N(0, 0.02) by `seed`, equal on every device: one random block, laid out end to end.
    Quantised weights are these numbers, rounded."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.empty(_DUMMY_BLOCK).normal_(0.0, 0.02, generator=generator)
    block = numbers.to(device=params.embedding.device, dtype=params.embedding.dtype)
    at = 0
    for part in _parts(params):
        if isinstance(part, Tensor) or part.layout == DENSE:
            at = _lay(block, at, (part if isinstance(part, Tensor) else part.tensors[0]).view(-1))
        else:
            at = _lay_rounded(block, at, part)
    for norm in _norms(params):
        norm.fill_(1.0)


def _lay_rounded(block: Tensor, at: int, matrix: Matrix) -> int:
    """Fill a quantised weight; see `_lay`."""
    plain = block.new_empty(matrix.outputs, matrix.inputs)
    at = _lay(block, at, plain.view(-1))
    for target, tensor in zip(matrix.tensors, round_to(matrix.layout, plain), strict=True):
        target.copy_(tensor)
    return at


def _lay(block: Tensor, at: int, flat: Tensor) -> int:
    """Fill `flat` from `block`, starting at `at` and wrapping round; returns the next place."""
    done = 0
    while done < len(flat):
        size = min(len(block) - at, len(flat) - done)
        flat[done : done + size] = block[at : at + size]
        done, at = done + size, (at + size) % len(block)
    return at


def _parts(params: Params) -> Iterator[Tensor | Matrix]:
    yield params.embedding
    for layer in params.layers:
        yield from _layer_parts(layer)
    if params.head is not params.embedding:
        yield params.head
    if params.positions is not None:
        yield params.positions


def _layer_parts(layer: Layer) -> Iterator[Tensor | Matrix]:
    for part in layer:
        if isinstance(part, Matrix):
            yield part
            found: tuple[Tensor | None, ...] = (part.bias,)
        else:
            found = part if isinstance(part, NormWeights) else (part,)
        yield from (tensor for tensor in found if tensor is not None)


def _norms(params: Params) -> Iterator[Tensor]:
    yield params.norm.weight
    for layer in params.layers:
        yield from (norm.weight for norm in layer.norms())
        if layer.qk_norm is not None:
            yield layer.qk_norm
