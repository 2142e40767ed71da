"""Drafts on a GPU: the checksum model's tokens at any depth with an oracle, and engines."""

from __future__ import annotations

from collections import Counter
from itertools import product
from math import exp, prod
from typing import Any

import pytest

from gapless.pace.draft_gate import WITHOUT_DRAFTS, DraftGate, Verify

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")


from oracle_drafter import cost
from oracles import right_drafts

from gapless import LLM, SamplingParams
from gapless.device import CudaDevice

EAGLE = {"method": "eagle3", "num_speculative_tokens": 4}
ITSELF = {"method": "draft_model", "model": "demo", "num_speculative_tokens": 4}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "prompt_lookup_max": 4}
IN_BFLOAT16 = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 32, "max_model_len": 256}
NEAR_TIE = 0.5
"""Between bfloat16 and float32 on a CPU, the gap between the two best log-probabilities changed by 0.2 or less at 99 of
100 tokens of the answers below, and by 0.47 at most. 96 of 100 gaps are wider than this, and half of them than 11."""
WORDS = (5, 6, 72, 1121)
UNLIKELY = 114.0
"""A chi-square of 63 degrees of freedom exceeds this once in 10,000 times. On a CPU that of the draws below was 44, and
253 where one in four wrong first drafts was kept."""


@pytest.mark.parametrize("depth", [1, 2, 4, 8])
@pytest.mark.parametrize("errs", [0.0, 0.3, 1.0])
@pytest.mark.usefixtures("reserved_memory")
def test_drafts_change_no_token(depth: int, errs: float) -> None:
    for seed in (0, 9, 12):
        device, counts = CudaDevice(), Counter[str]()
        loop = right_drafts(errs, 0.0, 1.0).play(seed, device, depth, counts=counts)
        assert loop.launcher.gate is not None and loop.launcher.gate.report().draft_tokens
        device.close()


@pytest.mark.parametrize("speculative", [EAGLE, ITSELF], ids=("head", "draft model"))
def test_a_head_drafts_inside_captured_steps_and_changes_no_token(
    speculative: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    learn = DraftGate.learn  # steps with drafts take twice as long as others, whatever else the machine does
    monkeypatch.setattr(DraftGate, "learn", lambda gate, kind, *size: learn(gate, kind, *size[:2], cost(*size[:2])))
    chats = [[{"role": "user", "content": f"{name} has {n} pens and buys 7 more. How many pens does {name} have?"}]
             for n in (14, 25, 38) for name in ("Mia", "Tom")]  # fmt: skip
    asked = [SamplingParams(temperature=0.7 * (i % 3 == 2), seed=i, max_tokens=60) for i in range(len(chats))]
    options = {"device": "cuda", "dtype": "float32", "max_num_seqs": 8, "max_model_len": 256, "batch_invariant": True}
    found = []
    for depth, config in (("1", None), ("1", speculative), ("4", speculative), ("auto", speculative)):
        with LLM("demo", **options, depth=depth, speculative_config=config) as llm:
            found.append([output.outputs[0].token_ids for output in llm.chat(chats, asked, use_tqdm=False)])
            stats = llm.stats()
        assert stats.steps.captures_refused == 0
        if config:
            assert sum(stats.drafts.accepted) > 0.5 * stats.drafts.draft_tokens > 20
    assert all(tokens == found[0] for tokens in found[1:])


@pytest.fixture
def every_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps without chunks run all drafts, whatever pays."""
    everything = Verify(5, drafts=True)
    monkeypatch.setattr(DraftGate, "decide", lambda gate, decode: everything if decode else WITHOUT_DRAFTS)


@pytest.mark.usefixtures("every_draft")
def test_greedy_tokens_in_bfloat16_differ_from_those_without_drafts_at_near_ties_alone() -> None:
    said = ["Repeat: ribbons Prague flowers buttons Vienna apples", "Tell me about ribbons and Prague."]
    said += [f"{name} has {n} pens and buys 7 more. How many pens does {name} have?"
             for n in (14, 25, 38) for name in ("Mia", "Tom")]  # fmt: skip
    asked, found = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, logprobs=2), []
    for config in (None, NGRAM):
        with LLM("demo", **IN_BFLOAT16, speculative_config=config) as llm:
            chats = [[{"role": "user", "content": text}] for text in said]
            found.append([output.outputs[0] for output in llm.chat(chats, asked, use_tqdm=False)])
            stats = llm.stats()
    assert stats.drafts.draft_tokens > 200 and sum(stats.drafts.accepted) > 50
    for plain, drafted in zip(*found, strict=True):
        pairs = zip(plain.token_ids, drafted.token_ids, strict=True)
        first = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
        if first is None or plain.logprobs is None:
            continue
        best, second = sorted((word.logprob for word in plain.logprobs[first].values()), reverse=True)[:2]
        assert drafted.token_ids[first] in plain.logprobs[first], f"{plain.token_ids[:first]}: no tie of the best two"
        assert best - second < NEAR_TIE, f"{plain.token_ids[:first]}: {best - second}"


def chances(prompt: list[int]) -> Counter[tuple[int, ...]]:
    """Return the probability of each three of WORDS after the prompt and two of them, where no other token may come."""
    fives, likely, found = list(product(WORDS, repeat=5)), dict[tuple[int, ...], float](), Counter[tuple[int, ...]]()
    prompts = [{"prompt_token_ids": [*prompt, *five]} for five in fives]
    with LLM("demo", **IN_BFLOAT16, load_format="dummy") as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
    for five, output in zip(fives, outputs, strict=True):
        for count, line in enumerate((output.prompt_logprobs or [])[len(prompt) :], 1):
            likely[five[:count]] = exp(line[five[count - 1]].logprob) if line else 0.0
    for five in fives:
        begun = [five[:count] for count in range(5)]
        shares = [likely[five[: len(one) + 1]] / sum(likely[(*one, word)] for word in WORDS) for one in begun]
        found[five[2:]] += prod(shares)
    return found


@pytest.mark.usefixtures("every_draft")
def test_tokens_that_are_drawn_beside_drafts_come_as_often_as_the_model_says() -> None:
    """The fifth token of each answer, with the two before it: the first ones come before there are drafts."""
    prompt, count = [*WORDS, *WORDS], 8192
    expected = chances(prompt)
    any_word = SamplingParams(temperature=1, max_tokens=8, ignore_eos=True, allowed_token_ids=WORDS)
    asked = [any_word.replace(seed=seed) for seed in range(count)]
    with LLM("demo", **IN_BFLOAT16, load_format="dummy", speculative_config=NGRAM) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt}] * count, asked, use_tqdm=False)
        stats = llm.stats()
    assert stats.drafts.drafts > count and stats.drafts.accepted[0] > count / 4
    drawn = Counter(tuple(output.outputs[0].token_ids[2:5]) for output in outputs)
    squares = [(drawn[three] - count * chance) ** 2 / (count * chance) for three, chance in expected.items()]
    assert sum(squares) < UNLIKELY
