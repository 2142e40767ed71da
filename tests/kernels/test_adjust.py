"""Adjusted logits of the torch and C++ kernels, against their definition and other libraries' processors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from adjust_cases import check_adjust, check_draws, tables_of

from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.kernels import native, plain
from gapless.kernels.layout import LENGTH
from gapless.kernels.seam import Kernels

VOCAB = 131


def both() -> list[Kernels]:
    compiled = native.load()
    if compiled is None:
        pytest.skip("the C++ kernels are not built")
    return [plain.KERNELS, compiled]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, VOCAB, 2500, 70_001])
def test_slots_hold_the_logits_of_the_definition(vocab: int, dtype: torch.dtype) -> None:
    for kernels in both():
        for seed in range(12 if vocab < 70_000 else 3):
            check_adjust(kernels, vocab, dtype, "cpu", seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_a_slot_are_cut_and_drawn_from_it(dtype: torch.dtype) -> None:
    for kernels in both():
        check_draws(kernels, 1500, dtype, "cpu")


def test_the_implementations_agree_to_the_bit() -> None:
    """Any other result would make tokens depend on where an engine runs."""
    request = Request(
        0, np.arange(40, dtype=np.int32),
        SamplingParams(repetition_penalty=1.1, frequency_penalty=0.3, presence_penalty=0.7, logit_bias={3: 1.7}),
        0, (), 0, 64,
    )  # fmt: skip
    logits, found = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(0)) * 5, []
    for kernels in both():
        tables, slots = tables_of([request], VOCAB, "cpu")
        tables.history[1, :60] = torch.arange(60) % 43
        tables.state[1, LENGTH] = 60
        one = torch.ones(1, dtype=torch.int32)
        kernels.adjust(logits, one - 1, one, tables, slots)
        found.append(slots.adjusted[0, 1])
    assert torch.equal(*found)


@pytest.mark.parametrize("penalty", [0.6, 1.2, 2.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    tokens = torch.randint(VOCAB, (1, 50), generator=torch.Generator().manual_seed(1))
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(2)) * 5
    expected = transformers.RepetitionPenaltyLogitsProcessor(penalty)(tokens, logits.clone())
    request = Request(
        0, tokens[0, :20].int().numpy(), SamplingParams(repetition_penalty=penalty), 0, (), 0, 64
    )  # fmt: skip
    for kernels in both():
        tables, slots = tables_of([request], VOCAB, "cpu")
        tables.history[1, :50] = tokens[0]
        tables.state[1, LENGTH] = 50
        one = torch.ones(1, dtype=torch.int32)
        kernels.adjust(logits, one - 1, one, tables, slots)
        # A float32 penalty here, a double there.
        torch.testing.assert_close(slots.adjusted[0, 1], expected[0], rtol=2e-7, atol=0)
