"""Chooses how a weight is multiplied, by one measurement that is kept beside the native build.

One answer for every number of rows: two ways add in different orders, and a row's bits must not depend on how many
rows are beside it. So the answer weighs several numbers of rows, alike.
"""

from __future__ import annotations

import json
import logging
import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from enum import IntEnum
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from gapless.device import build

log = logging.getLogger("gapless.kernels")


class Way(IntEnum):
    """A way to multiply by a packed weight, by the number that the operators know it by."""

    FLOATS = 0
    """Weights are widened to float32 in registers; any vector unit, every dtype"""
    BF16_DOT = 1
    """Dot products of pairs: vdpbf16ps of AVX-512, bfdot of ARM"""
    AMX = 2


ROWS = (1, 8, 32, 128)
TURNS = 3
SAMPLE = 1 << 22
"""Weights of a measurement: a larger matrix is measured by its first columns."""
COLUMNS = 64
"""A packed weight may be cut at multiples of these."""
MEASURING_SECONDS = 0.3
"""Seconds that a process measures at most, but for the last shape. Shapes after that get the first way."""
CLEAR = 1.1
"""The second way serves where the first takes this many times its time: a busy moment makes no such difference."""

LOCK = "choices.lock"
"""The file in the cache folder that the process which measures holds."""
LOCK_SECONDS = 60.0
"""The longest wait for other processes: each holds the lock for one shape, which takes a part of a second."""

spent = 0.0
_answers: dict[tuple[Path, str], list[float]] = {}
"""Answers that this process has read or measured. It keeps them even if the file changes."""


def fastest(ways: Sequence[Way], packed: Tensor, outputs: int, inputs: int, kept: Path) -> Way:
    """Return which of two ways multiplies by this packed weight [outputs, inputs]; of one, that."""
    if len(ways) == 1:
        return ways[0]
    name = f"{pair_name(ways)}: {outputs} x {inputs}, {torch.get_num_threads()} threads"
    if (kept, name) not in _answers:
        found = read(kept).get(name)
        _answers[kept, name] = _settled(name, ways, packed, outputs, inputs, kept) if found is None else found
    return ways[0 if serves_first(_answers[kept, name]) else 1]


def pair_name(ways: Sequence[Way]) -> str:
    """Return what the choice between two ways is called: AMX may be switched off at another start."""
    return " or ".join(way.name.lower() for way in ways)


def _settled(name: str, ways: Sequence[Way], packed: Tensor, outputs: int, inputs: int, kept: Path) -> list[float]:
    """Return the answer of the first process to ask. Processes measure in turn, or one would slow the other.

    Raises UserError when another process keeps the lock for LOCK_SECONDS.
    """
    with ExitStack() as turn:
        with suppress(OSError):  # a cache on a read-only disk: every start measures
            turn.enter_context(build.only_one(kept.parent / LOCK, LOCK_SECONDS))
        shapes = read(kept)
        if name not in shapes:
            shapes[name] = measured_ratios(ways, packed, outputs, inputs)
            _write(kept, shapes)
        return shapes[name]


def serves_first(ratios: list[float]) -> bool:
    """Return whether the first way serves, by its times over those of the second; True if nothing was measured."""
    return typical(ratios) < CLEAR


def typical(ratios: list[float]) -> float:
    """Return the geometric mean; 1 of nothing."""
    return math.prod(ratios) ** (1 / max(len(ratios), 1))


def read(kept: Path) -> dict[str, list[float]]:
    """Return, by ways, shape and threads, the first way's time over that of the second for each of ROWS; an empty list
    where time was short."""
    try:
        found: dict[str, list[float]] = json.loads(kept.read_text())
    except OSError:  # none yet, or not ours to read
        return {}
    except ValueError as error:
        log.warning("%s is no JSON and is measured again: %s", kept, error)
        return {}
    return found


def _write(kept: Path, shapes: dict[str, list[float]]) -> None:
    with suppress(OSError):  # read-only, or full
        with tempfile.NamedTemporaryFile("w", dir=kept.parent, prefix=kept.name, delete=False) as file:
            json.dump(shapes, file, indent=1)
        Path(file.name).replace(kept)


def measured_ratios(ways: Sequence[Way], packed: Tensor, outputs: int, inputs: int) -> list[float]:
    global spent
    if spent > MEASURING_SECONDS:
        return []
    start = perf_counter()
    columns = max(SAMPLE // inputs // COLUMNS, 1) * COLUMNS
    if columns < outputs:
        packed, outputs = packed[: columns * (inputs + inputs % 2)], columns
    ratios = [round(_ratio(ways, packed, outputs, inputs, rows), 3) for rows in ROWS]
    spent += perf_counter() - start
    return ratios


def _ratio(ways: Sequence[Way], packed: Tensor, outputs: int, inputs: int, rows: int) -> float:
    """Return the first way's time over that of the second, the least of a few each, in turns."""
    x = torch.ones(rows, inputs, dtype=packed.dtype)
    times: dict[Way, list[float]] = {way: [] for way in ways}
    for _ in range(TURNS):
        for way, seconds in times.items():
            start = perf_counter()
            torch.ops.gapless.linear.default(x, packed, outputs, None, way)
            seconds.append(perf_counter() - start)
    return min(times[ways[0]]) / min(times[ways[1]])
