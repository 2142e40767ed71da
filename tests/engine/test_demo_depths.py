"""The demo model gives the same tokens at every depth, greedy and sampled, with prompts that share prefixes."""

from __future__ import annotations

import pytest

from gapless import LLM, SamplingParams

PROMPTS = [
    f"Question: {name} has {count} {thing} and buys {count // 2} more. How many {thing} does {name} have?\nAnswer:"
    for name, count, thing in (("Mia", 14, "pens"), ("Tom", 32, "apples"), ("Ada", 8, "coins"), ("Mia", 14, "books"))
] + ["Question: What is", "A", "The host and the device", "Question: What is 12 + 30?\nAnswer:"]

PARAMS = {
    "greedy": [SamplingParams(temperature=0, max_tokens=40, ignore_eos=i > 3) for i in range(len(PROMPTS))],
    "seeded": [
        SamplingParams(
            temperature=0.9, seed=100 + i, max_tokens=30 + i, top_k=(0, 20)[i % 2], top_p=(1.0, 0.9)[i // 2 % 2],
            min_tokens=i, ignore_eos=i == 5,
        )
        for i in range(len(PROMPTS))
    ],
}  # fmt: skip


def generate(depth: str, params: list[SamplingParams]) -> list[list[int]]:
    # Few rows, few tokens a step and few pages, so that chunks, queueing and preemption take part.
    with LLM("demo", depth=depth, device="cpu", max_num_seqs=4, max_num_batched_tokens=24, max_model_len=160,
             num_gpu_blocks_override=14) as llm:  # fmt: skip
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


@pytest.mark.parametrize("kind", sorted(PARAMS))
def test_every_depth_gives_the_same_tokens(kind):
    reference = generate("1", PARAMS[kind])
    assert all(len(tokens) > 3 for tokens in reference)
    for depth in ("2", "4", "8", "auto"):
        assert generate(depth, PARAMS[kind]) == reference, f"depth {depth}"
