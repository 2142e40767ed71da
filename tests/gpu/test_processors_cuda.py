"""Logits processors on a GPU: captured beside the kernels, with their counts, and refused when they would wait."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

sys.path.insert(0, str(Path(__file__).parents[1]))

from gapless import LLM, ConfigError, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA, and torch sees no CUDA device"),
]

OPTIONS = {"device": "cuda", "dtype": "float32", "max_num_seqs": 8, "max_model_len": 256, "batch_invariant": True}


def test_processed_rows_get_the_same_tokens_at_every_depth_and_neighbours_theirs() -> None:
    prompts = [f"Question: {name} has {n} pens and buys 7 more." for n in (14, 25) for name in ("Mia", "Tom", "Ada")]
    plain = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    asks = plain.replace(logits_processors=[{"qualname": "counts_both", "args": [0.75]}])
    paths, found = ("torch_processors:counts_both", "torch_processors:WithConstants"), []
    for depth in ("1", "8", "auto"):
        with LLM("demo", **OPTIONS, depth=depth, logits_processors=paths) as llm:
            outputs = llm.generate(prompts, [asks, plain] * 3, use_tqdm=False)
            same = llm.generate(prompts[::2], plain.replace(frequency_penalty=0.75), use_tqdm=False)
            alone = llm.generate(prompts[1::2], plain, use_tqdm=False)
            assert llm.stats().captures_refused == 0
        found.append([output.outputs[0].token_ids for output in outputs])
        assert found[-1][::2] == [output.outputs[0].token_ids for output in same]
        assert found[-1][1::2] == [output.outputs[0].token_ids for output in alone]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("name", ["syncs", "uploads"])
def test_a_processor_that_waits_for_the_device_is_refused_with_its_line(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"{name} cannot be captured: .*torch_processors\.py:\d+"):
        LLM("demo", **OPTIONS, logits_processors=(f"torch_processors:{name}",))
