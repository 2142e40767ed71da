"""Whole decode steps on every path that the size of a batch chooses, in the interpreter, beside plain torch; run by
tests/kernels/test_forward_triton.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from forward_cases import Family, Launched, batch_of, error, models, ragged, run, written
from paged import Heads

from gapless.kernels import linear
from gapless.kernels.all_triton import HALF_KERNELS
from gapless.kernels.many_rows import MANY_ROWS

KERNELS = HALF_KERNELS._replace(many_rows=MANY_ROWS._replace(serves=lambda linear: True))
SMALL = {
    "qwen3": Family("Qwen3ForCausalLM", 64, 96, Heads(4, 2, 16)),
    "llama": Family("LlamaForCausalLM", 48, 80, Heads(4, 1, 16), biased=True),
}


@pytest.mark.parametrize(
    ("name", "rows", "launched"),
    [
        ("qwen3", 1, "one_row_linear"),
        ("llama", 3, "linear_add"),
        ("llama", 6, "rotated_decode"),
        ("qwen3", 40, "divided_linear"),
    ],
)
def test_a_step_is_that_of_plain_torch(name, rows, launched, tmp_path, monkeypatch):
    # Kernels read weights as they are on a GPU: not in the layout that torch packs for a CPU.
    monkeypatch.setattr(linear, "packs", lambda weight: False)
    family = SMALL[name]
    model, exact = models(family, KERNELS, tmp_path, "cpu", torch.float32)
    batch = batch_of(family.heads, [min(length, 90) for length in ragged(rows)])
    ours, theirs = (batch.moved(torch.float32, "cpu") for _ in range(2))
    with Launched() as seen:
        found = run(model, ours)
    assert seen.names[launched]
    for got, want in zip(found, run(exact, theirs), strict=True):
        assert error(got[: batch.real], want[: batch.real]) < 1e-5
    (put, rest), (wanted, before) = written(ours), written(theirs)
    assert error(put, wanted) < 1e-5
    torch.testing.assert_close(rest, before, rtol=0, atol=0, equal_nan=True)
