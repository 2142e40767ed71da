"""Adapters on a GPU: the checks of tests/kernels with real sizes, and an engine whose rows have several."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from adapt_cases import check_adapt, check_alone
from adapter_files import write_adapter

from gapless import LLM, SamplingParams
from gapless.kernels.all_triton import KERNELS
from gapless.model.config import read_model_config, resolve_model_dir

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA, and torch sees no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "slots"), [(1, 1), (32, 8), (1000, 4)])
def test_it_adds_what_the_definition_says(tokens: int, slots: int, dtype: torch.dtype) -> None:
    for seed in range(2):
        check_adapt(KERNELS, dtype, "cuda", tokens, slots, seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_is_alone(dtype: torch.dtype) -> None:
    check_alone(KERNELS, dtype, "cuda")


def test_rows_of_several_adapters_have_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    config = read_model_config(resolve_model_dir("demo"))
    modules = tuple(f"{n}={write_adapter(tmp_path / n, config, seed, size=0.05)}" for seed, n in enumerate("abc"))
    prompts = [f"Question: {name} has 14 pens and buys 7 more." for name in ("Mia", "Tom", "Ada", "Bo")]
    greedy, found = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), []
    for device, depth in (("cpu", "1"), ("cuda", "1"), ("cuda", "8")):
        options = {"dtype": "float32", "depth": depth, "max_num_seqs": 4, "max_model_len": 128, "max_loras": 2}
        with LLM("demo", device=device, lora_modules=modules, **options) as llm:
            outputs = llm.generate(prompts, greedy, use_tqdm=False, adapter=["a", "", "b", "c"])
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1] == found[2]
