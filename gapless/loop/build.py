"""Putting a loop together: one place that knows how the rooms below fit."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from gapless.device import Device
from gapless.kernels.choose import choose
from gapless.kernels.seam import Kernels
from gapless.loop.depth import Depth
from gapless.loop.loop import Loop
from gapless.memory.ledger import Ledger
from gapless.memory.pages import PagePool
from gapless.memory.prefix import PrefixHasher
from gapless.memory.rows import RowTable
from gapless.model.seam import Model
from gapless.plan.planner import Limits, Planner
from gapless.step.asked import Asking
from gapless.step.graphs import PATIENCE, buckets_up_to
from gapless.step.launcher import Launcher
from gapless.step.packet import Packer
from gapless.step.program import StepProgram
from gapless.step.tables import Tables


class Sizes(NamedTuple):
    """Bounds of everything that an engine allocates."""

    rows: int
    """Requests running at once."""
    max_len: int
    """Tokens of the longest sequence, prompt and output."""
    pages: int
    """KV pages, the null page included."""
    page_size: int
    step_tokens: int
    """Token budget of one step; at least `rows`."""
    queue: int
    """Waiting requests."""


def build_loop(
    device: Device,
    model: Model,
    sizes: Sizes,
    depth: int | None = None,
    *,
    model_name: str = "",
    prefix_caching: bool = True,
    by_priority: bool = False,
    kernels: Kernels | None = None,
    buckets: Iterable[int] | None = None,
    patience: int = PATIENCE,
    chain: int | None = None,
    mixed: bool | None = None,
) -> Loop:
    """Allocate tables, KV memory and rings on `device`, and return a loop over `model`. `depth` None is auto.

    `kernels` None takes the best for the device. `buckets` are the rows of captured steps: None for the usual ones,
    empty for none. `mixed` is whether steps with chunks are captured too: on CUDA, unless told otherwise. `chain` is
    how many steps one visit may enqueue: None for auto, or 1 where the depth is fixed.
    """
    max_pages = -(-sizes.max_len // sizes.page_size)
    page_writes = max_pages + 2 * sizes.rows
    steps = Depth(depth, chain)
    ledger = Ledger()
    pool = PagePool(sizes.pages, sizes.page_size, ledger)
    rows = RowTable(sizes.rows, sizes.max_len, ledger)
    planner = Planner(Limits(sizes.step_tokens, page_writes, sizes.queue, by_priority), pool, rows, ledger)
    tables = Tables.new(sizes.rows, sizes.max_len, max_pages, device.torch_device)
    cache = model.new_cache(sizes.pages, sizes.page_size, device.torch_device)
    launcher = Launcher(
        device,
        model,
        StepProgram(model, tables, cache, kernels or choose(device.kind)),
        Packer(rows, max_pages),
        Asking(rows),
        slots=steps.most + 1,
        rows=sizes.rows,
        page_writes=page_writes,
        tokens=sizes.step_tokens,
        buckets=buckets_up_to(sizes.rows) if buckets is None else buckets,
        patience=patience,
        chain=steps.longest,
        mixed=device.kind == "cuda" if mixed is None else mixed,
    )
    hasher = PrefixHasher(model_name, sizes.page_size) if prefix_caching else None
    return Loop(device, launcher, planner, pool, rows, ledger, steps, hasher)
