"""Chooses how a weight is multiplied, by one measurement kept with the native build.

One answer for every number of rows: two ways add in different orders, and a row's bits must not depend on the number of
rows. So the answer weighs several numbers of rows equally.
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
    """A way to multiply by a packed weight, with the operators' number for it."""

    FLOATS = 0
    """Weights are widened to float32 in registers; any vector unit, every dtype"""
    BF16_DOT = 1
    """Dot products of pairs: vdpbf16ps of AVX-512, bfdot of ARM"""
    AMX = 2


CHOICE_ROWS = (1, 8, 32, 128)
CHOICE_TURNS = 3
SAMPLE = 1 << 22
"""Most weights of a measurement: a larger matrix is measured by its first columns."""
CUT_COLUMNS = 64
"""Columns at whose multiples a packed weight may be cut."""
MEASURING_SECONDS = 0.3
"""Longest time that a process measures, without the last shape. Later shapes get the first way."""
CLEAR_RATIO = 1.1
"""The second way is chosen if the first takes this many times as long: no busy moment makes such a difference."""

CHOICES_LOCK = "choices.lock"
"""Lock file in the cache folder, held by the measuring process."""
CHOICES_LOCK_SECONDS = 60.0
"""Longest wait for other processes: each holds the lock for one shape, a part of a second."""

spent = 0.0
_answers: dict[tuple[Path, str], list[float]] = {}
"""Answers read or measured by this process, kept even if the file changes."""


def fastest(ways: Sequence[Way], packed: Tensor, outputs: int, inputs: int, kept: Path) -> Way:
    """Return the faster of two ways to multiply by this packed weight [outputs, inputs]; of one, that."""
    if len(ways) == 1:
        return ways[0]
    name = f"{pair_name(ways)}: {outputs} x {inputs}, {torch.get_num_threads()} threads"
    if (kept, name) not in _answers:
        found = read(kept).get(name)
        _answers[kept, name] = _settled(name, ways, packed, outputs, inputs, kept) if found is None else found
    return ways[0 if serves_first(_answers[kept, name]) else 1]


def pair_name(ways: Sequence[Way]) -> str:
    """Return the name of the choice between two ways: AMX may be switched off at another start."""
    return " or ".join(way.name.lower() for way in ways)


def _settled(name: str, ways: Sequence[Way], packed: Tensor, outputs: int, inputs: int, kept: Path) -> list[float]:
    """Return the first process's answer. Processes measure in turn, or one would slow the other.

    Raises UserError if another process keeps the lock for CHOICES_LOCK_SECONDS.
    """
    with ExitStack() as turn:
        with suppress(OSError):  # a cache on a read-only disk: every start measures
            turn.enter_context(build.only_one(kept.parent / CHOICES_LOCK, CHOICES_LOCK_SECONDS))
        shapes = read(kept)
        if name not in shapes:
            shapes[name] = measured_ratios(ways, packed, outputs, inputs)
            _write(kept, shapes)
        return shapes[name]


def serves_first(ratios: list[float]) -> bool:
    """Return whether the first way is chosen, by its times over the second's; True if nothing was measured."""
    return typical(ratios) < CLEAR_RATIO


def typical(ratios: list[float]) -> float:
    """Return the geometric mean; 1 of nothing."""
    return math.prod(ratios) ** (1 / max(len(ratios), 1))


def read(kept: Path) -> dict[str, list[float]]:
    """Return, by ways, shape and threads, the first way's time over the second's for each of CHOICE_ROWS; an empty list
    if time was short."""
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
    columns = max(SAMPLE // inputs // CUT_COLUMNS, 1) * CUT_COLUMNS
    if columns < outputs:
        packed, outputs = packed[: columns * (inputs + inputs % 2)], columns
    ratios = [round(_ratio(ways, packed, outputs, inputs, rows), 3) for rows in CHOICE_ROWS]
    spent += perf_counter() - start
    return ratios


def _ratio(ways: Sequence[Way], packed: Tensor, outputs: int, inputs: int, rows: int) -> float:
    """Return the first way's time over the second's, the least of a few each, in turns."""
    x = torch.ones(rows, inputs, dtype=packed.dtype)
    times: dict[Way, list[float]] = {way: [] for way in ways}
    for _ in range(CHOICE_TURNS):
        for way, seconds in times.items():
            start = perf_counter()
            torch.ops.gapless.linear.default(x, packed, outputs, None, way)
            seconds.append(perf_counter() - start)
    return min(times[ways[0]]) / min(times[ways[1]])
