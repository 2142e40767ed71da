"""Compares a model's logits through a paged KV cache with another computation's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from gapless.base.errors import CheckpointError
from gapless.model.seam import BatchShape, KVCache, Model, StepInputs

TOKENS = 12
"""Tokens of a check, in two pages; more than a window of SMALL_WINDOW"""
SMALL_WINDOW = 5
"""Largest window or chunk of attention of a model that is made for a check"""
PARTS = (5, 3, 1, 1, 1, 1)
"""Query tokens of a check's steps: two chunks, then decode rows"""
TOLERANCE = 1e-3
"""Largest difference of logits in float32, in parts of the largest logit"""
_PAGE = 8


def check(reference: Callable[[Tensor], Tensor], model: Model, device: torch.device, where: str) -> None:
    """Compare `reference` (ids int64 [T] -> logits [T, vocab]) with a model whose dtype is float32.

    Raises CheckpointError if they differ.
    """
    ids = tokens(model.vocab_size, device)
    with torch.no_grad():
        want, got = reference(ids).float(), paged_logits(model, ids)
    different = (got - want).abs().max().item()
    largest = want.abs().max().item()
    if not different <= TOLERANCE * largest:
        raise CheckpointError(
            f"{where}: this class computes something that this engine does not: its logits differ by up to "
            f"{different:.3g} from the class's own, the largest of which is {largest:.3g}"
        )


def tokens(vocab: int, device: torch.device, count: int = TOKENS) -> Tensor:
    """Token ids int64 [count], spread over the vocabulary."""
    return (torch.arange(1, count + 1, device=device) * 7_919 + 11) % vocab


def paged_logits(model: Model, ids: Tensor) -> Tensor:
    """Return the logits float32 [T, vocab] of ids [T], computed in chunks and then token by token."""
    return torch.cat([step().float() for step in paged_steps(model, ids)])


def paged_steps(model: Model, ids: Tensor) -> list[Callable[[], Tensor]]:
    """Return the steps that compute the logits of ids [TOKENS], in order, over a small cache whose pages are not."""
    cache = model.new_cache(4, _PAGE, ids.device)
    table = torch.tensor([[0, 0], [3, 1]], dtype=torch.int32, device=ids.device)
    steps: list[Callable[[], Tensor]] = []
    start = 0
    for count in PARTS:
        shape, inputs = _step(ids, table, start, count)
        steps.append(partial(_logits, model, inputs, model.plan(shape), cache))
        start += count
    return steps


def _logits(model: Model, inputs: StepInputs, plan: Any, cache: KVCache) -> Tensor:
    return model.logits(model.forward(inputs, plan, cache))


def _step(ids: Tensor, table: Tensor, start: int, count: int) -> tuple[BatchShape, StepInputs]:
    """The next `count` tokens, as a chunk or, if it is one, as a decode row."""

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=ids.device)

    end = start + count
    positions = torch.arange(start, end, device=ids.device)
    slots = table[1].long()[positions // _PAGE] * _PAGE + positions % _PAGE
    shape = BatchShape(1, (), end) if count == 1 else BatchShape(0, ((start, count),), 1)
    starts = None if count == 1 else ints([0, count])
    return shape, StepInputs(ids[start:end], positions, slots, ints([end]), ints([1]), table, 2, starts)
