"""Puts the steps of every engine under no_sync, with an empty allow list. tests/conftest.py does it for all tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from gapless import guard
from gapless.guard import watch
from gapless.guard.report import Finding
from gapless.guard.sync import Region
from gapless.loop.loop import Loop, Turn
from gapless.step.program import StepKey, StepProgram

TESTS = str(Path(__file__).parent)
PLAIN = StepProgram.run
PLAIN_LAUNCH = Loop._launch
ON_THE_DEVICE = ("Launcher._run", "Launcher._copy_home")
"""Programs of streams, which SimDevice may run while the host launches; the step in them is a region of its own."""
EVERY = 16
"""Of steps like one that was checked before, one in so many is checked again."""


def tensors_of(value: Any, seen: set[int] | None = None) -> Iterator[Tensor]:
    """Every tensor that an object of ours holds, however deep."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    for part in (*parts, *getattr(value, "__dict__", {}).values()):
        yield from tensors_of(part, seen)


def kind_of(key: StepKey) -> Hashable:
    """What decides which lines a step comes by: not how many rows, but whether there are any."""
    batch, packet = key.batch, key.packet
    continued = any(start for start, _ in batch.chunks)
    return (
        min(batch.decode, 2), min(len(batch.chunks), 2), continued, packet.page_writes > 0, packet.admissions > 0,
        key.samples == batch.rows, key.mode,
    )  # fmt: skip


@contextmanager
def steps_under_no_sync(which: Literal["every", "kinds"] = "every", tests_look: bool = False) -> Iterator[Region]:
    """StepProgram.run, on whatever thread, and the host's Loop._launch are regions. Gives the step's region, if strict.

    A finding of the first raises on the device, one of the second in the loop's turn.

    Tables, cache, weights and the packet's words are the device tensors. With "kinds" the first step of each kind is
    checked, and one in EVERY of the others: what waits is a line of code, and the kind says which ones run. With
    `tests_look` a line of the tests themselves may read, as their models do to check what they are given.
    """
    strict = guard.no_sync(slow_ms=0)  # a test's engine is cold: its first calls load kernels, and its memory grows
    seen: Counter[Hashable] = Counter()

    def run(program: StepProgram, key: StepKey, words: Tensor) -> Tensor:
        if torch._C._len_torch_dispatch_stack() and watch.current() is None:
            return PLAIN(program, key, words)  # a test watches operations by itself, and wants to see them whole
        if which == "kinds":
            kind = (type(program._model), kind_of(key))
            seen[kind] += 1
            if seen[kind] % EVERY != 1:
                return PLAIN(program, key, words)
        _mark(program)
        guard.device_tensor(words)
        with guard.no_sync(mode="record", slow_ms=0) if tests_look else strict as region:
            lines = PLAIN(program, key, words)
        _raise_first(region)
        return lines

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepProgram, "run", run)
        patch.setattr(Loop, "_launch", _launch_checked)
        yield strict


def _launch_checked(loop: Loop, turn: Turn) -> bool:
    """The host's half of a launch: plan, pack, enqueue."""
    program = getattr(loop._launcher, "_program", None)
    if program is None or torch._C._len_torch_dispatch_stack():
        return PLAIN_LAUNCH(loop, turn)  # a stand-in for a launcher, or a test that watches by itself
    _mark(program)
    guard.device_tensor((loop._launcher._words, loop._launcher._lines))
    with guard.no_sync(mode="record", slow_ms=0) as region:
        launched = PLAIN_LAUNCH(loop, turn)
    _raise_first(region)
    return launched


def _mark(program: StepProgram) -> None:
    if "guarded" not in vars(program):
        guard.device_tensor(list(tensors_of(program)))
        vars(program)["guarded"] = True


def _raise_first(region: Region) -> None:
    for finding in region.report.findings:
        if _counts(finding):
            raise guard.SyncError(finding)


def _counts(finding: Finding) -> bool:
    """Tests may look, and a test's engine is cold; what streams run is not the host's."""
    ours = not finding.site.file.startswith(TESTS) and finding.rule != "allocator-growth"
    return ours and not any(frame.function in ON_THE_DEVICE for frame in finding.stack)
