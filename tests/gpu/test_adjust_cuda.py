"""Adjusted logits on a GPU: the checks of tests/kernels with real sizes, and an engine whose rows ask."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from adjust_cases import check_adjust, check_draws

from gapless import LLM, SamplingParams
from gapless.kernels.all_triton import TRITON_KERNELS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA, and torch sees no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [131, 2500, 151_936])
def test_slots_hold_the_logits_of_the_definition(vocab: int, dtype: torch.dtype) -> None:
    for seed in range(6):
        check_adjust(TRITON_KERNELS, vocab, dtype, "cuda", seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_with_a_slot_are_cut_and_drawn_from_it(dtype: torch.dtype) -> None:
    check_draws(TRITON_KERNELS, 151_936, dtype, "cuda")


def test_rows_that_ask_get_the_same_tokens_at_every_depth() -> None:
    prompts = [f"Question: {name} has {n} pens and buys 7 more." for n in (14, 25) for name in ("Mia", "Tom", "Ada")]
    asks = SamplingParams(
        temperature=0.8, top_p=0.95, seed=5, max_tokens=48, ignore_eos=True, repetition_penalty=1.2,
        presence_penalty=0.4, logit_bias={9: -3.0}, bad_words=["Mia"],
    )  # fmt: skip
    plain = SamplingParams(temperature=0.8, seed=6, max_tokens=48, ignore_eos=True)
    found = []
    for depth in ("1", "8", "auto"):
        with LLM("demo", device="cuda", dtype="float32", depth=depth, max_num_seqs=8, batch_invariant=True) as llm:
            outputs = llm.generate(prompts, [asks, plain] * 3, use_tqdm=False)
        found.append([output.outputs[0].token_ids for output in outputs])
        assert not any("Mia" in output.outputs[0].text for output in outputs[::2])
    assert found[0] == found[1] == found[2]
