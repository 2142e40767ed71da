"""The checksum model with adapters: numbers that fill slots, and that every KV entry of their rows depends on.

A stale or torn slot, that of another row, and a page of another adapter each change the output.
"""

from __future__ import annotations

from typing import Any

import torch
from harness import VOCAB
from torch import Tensor

from gapless.base.records import Request
from gapless.device import Device
from gapless.loop.loop import Loop
from gapless.loop.spec import Sizes
from gapless.model.seam import StepInputs
from gapless.step.adapters import AdapterContents, Adapters
from gapless.testing.checksum import PRIME, ChecksumModel, continue_prompt
from gapless.testing.loops import loop_of

WORDS = 64
NUMBERS = {"ann": 11, "bob": 222, "cem": 3_333, "dov": 44_444}


class Tables:
    """Slots of numbers."""

    def __init__(self, count: int = 2, at: torch.device | None = None) -> None:
        self.count = count
        self.numbers = torch.zeros(self.count + 1, WORDS, dtype=torch.int64, device=at)

    def slot(self, slot: int) -> list[Tensor]:
        return [self.numbers[slot, : WORDS // 2], self.numbers[slot, WORDS // 2 :]]


class WithAdapters(ChecksumModel):
    """Entries are moved by what a token's slot holds."""

    tables: Tables

    def entries(self, inputs: StepInputs) -> Tensor:
        plain = super().entries(inputs)
        if inputs.adapters is None:
            return plain
        return (plain + self.tables.numbers.index_select(0, inputs.adapters).sum(1)) % PRIME


class AdaptedModel(WithAdapters):
    """The checksum model with adapters."""

    def __init__(self, tables: Tables) -> None:
        super().__init__(VOCAB, 48)
        self.tables = tables


def expected(request: Request) -> list[int]:
    """All tokens of an undisturbed run, by direct computation."""
    count = request.max_len - len(request.tokens)
    tokens = continue_prompt(request.tokens.tolist(), count, VOCAB, shift_of(NUMBERS.get(request.adapter, 0)))
    ends = (index + 1 for index, token in enumerate(tokens) if token in request.stop_ids)
    return tokens[: next(ends, count)]


def shift_of(number: int) -> int:
    """What the adapter of this number adds to entries; 0 is none."""
    return number * WORDS


def contents_of(device: Device, number: int) -> AdapterContents:
    """The adapter of a number, in host memory."""
    memory = device.ring(1, 8 * WORDS).slots[0].tensor.view(torch.int64).fill_(number)
    return AdapterContents(list(memory.chunk(2)), digest_of(number))


def digest_of(number: int) -> str:
    return f"digest of {number}"


def adapters_of(device: Device, slots: int) -> Adapters:
    """Adapters for a device, in host memory."""
    return Adapters(
        Tables(slots, device.torch_device), {name: contents_of(device, number) for name, number in NUMBERS.items()}
    )


def adapted_loop(device: Device, shape: Sizes, depth: int | None, slots: int = 2, **options: Any) -> Loop:
    """A loop over the checksum model with the adapters of NUMBERS."""
    adapters = adapters_of(device, slots)
    return loop_of(device, AdaptedModel(adapters.tables), shape, depth, adapters=adapters, **options)
