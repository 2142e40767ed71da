"""The memory of steps: tables, KV, packets and outboxes, of sizes that all ranks of an engine share."""

from __future__ import annotations

from typing import NamedTuple

from gapless.device import Device
from gapless.kernels.seam import Kernels
from gapless.kernels.tables import Tables
from gapless.model.seam import Model
from gapless.step.executor import Executor
from gapless.step.outbox import OutboxShape
from gapless.step.program import RowOptions, StepProgram


class MemorySizes(NamedTuple):
    """Sizes of the memory of steps. Executors of equal sizes run the same orders."""

    rows: int
    history: int
    """Tokens of a row's history"""
    entries: int
    """Entries of a row's page table, of all page groups"""
    pages: int
    page_size: int
    outbox: OutboxShape
    words: int
    """Words of the largest packet"""
    packets: int
    outboxes: int
    """Slots of the two rings"""
    fill: int
    """Most words before a packet that fill new rows"""


def build_executor(
    device: Device, model: Model, make: type[StepProgram], kernels: Kernels, sizes: MemorySizes, options: RowOptions
) -> Executor:
    """Allocate tables, KV memory and rings on `device`, for the programs that `make` makes."""
    drafts, at = options.speculation, device.torch_device
    places = drafts.places if drafts else 1
    tables = Tables.new(sizes.rows, sizes.history, sizes.entries, at, model.vocab_size, places)
    cache = model.new_cache(sizes.pages, sizes.page_size, at)
    program = make(model, tables, cache, kernels, sizes.outbox, options)
    return Executor(device, program, sizes.words, sizes.packets, sizes.outboxes, sizes.fill)
