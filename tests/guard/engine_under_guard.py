"""Puts every step of an engine under no_sync: for the tests of this folder, and for the harness that others use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from gapless import guard
from gapless.guard.sync import Region
from gapless.step.program import StepKey, StepProgram


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


@contextmanager
def steps_under_no_sync() -> Iterator[Region]:
    """Every StepProgram.run, on whatever thread, is a region: nothing is allowed, a finding raises on the device.

    Tables, cache, weights and the packet's words are the device tensors. The value is the region, for its report.
    """
    plain = StepProgram.run
    region = guard.no_sync()

    def run(program: StepProgram, key: StepKey, words: Tensor) -> Tensor:
        if not hasattr(program, "guarded"):
            guard.device_tensor(list(tensors_of(program)))
            program.guarded = True  # type: ignore[attr-defined]
        guard.device_tensor(words)
        with region:
            return plain(program, key, words)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepProgram, "run", run)
        yield region
