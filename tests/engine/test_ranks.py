"""Engines of several ranks, each a process, give the tokens of one rank, with all that a request may ask for."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from gapless import LLM, SamplingParams, StructuredOutputs
from gapless.demo import weights_dir

pytestmark = pytest.mark.process
OPTIONS: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_num_seqs": 8, "max_model_len": 256}
PAGES = {"num_gpu_blocks_override": 20}
"""So few that rows are preempted"""
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Paris"]}}, "required": ["city"]}
SHARED = "Repeat: ribbons Prague flowers buttons ribbons Prague flowers buttons. "
ASKS: list[tuple[str, dict[str, Any]]] = [
    ("Once upon a time", {}),
    (SHARED + "ribbons", {"max_tokens": 90}),
    (SHARED + "Prague", {"max_tokens": 60}),
    (SHARED * 3, {"max_tokens": 50}),
    ("Mia has 14 pens", {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}),
    ("Mia has 14 pens", {"logit_bias": {42: 5.0}, "bad_words": ["pens"], "min_tokens": 20}),
    ("Hello", {"logprobs": 5, "prompt_logprobs": 3}),
    ("The city is", {"structured_outputs": StructuredOutputs(json=SCHEMA)}),
    ("The sum is", {"structured_outputs": StructuredOutputs(regex=r" [0-9]{2,9} pens( and no more)?")}),
    ("Tell me", {"temperature": 0.9, "seed": 5, "structured_outputs": StructuredOutputs(choice=["ribbons", "Prague"])}),
    ("Tell me", {"n": 3, "temperature": 1.2, "seed": 6, "stop": ["uttons"]}),
    *[("Tell me", {"temperature": 1.0, "seed": seed, "top_p": 0.9, "top_k": 40, "min_p": 0.01}) for seed in range(20)],
    *[(f"{number}", {"temperature": 1.0, "seed": number}) for number in range(100, 180)],
]
USUAL = {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True}


def played(**options: Any) -> list[Any]:
    """Outputs of all requests at once: tokens of each, and of some also scores."""
    with LLM("demo", **{**OPTIONS, **PAGES, **options}) as llm:
        params = [SamplingParams(**{**USUAL, **asks}) for _, asks in ASKS]
        found = llm.generate([prompt for prompt, _ in ASKS], params)
        assert llm.stats().queue.preemptions, "pages are few"
    return found


@pytest.fixture(scope="module")
def alone():
    return played()


@pytest.mark.parametrize(
    ("depth", "method"), [("auto", None), ("1", None), ("4", "suffix"), ("auto", "ngram")], ids=str
)
def test_two_ranks_give_the_tokens_of_one(alone, depth, method):
    drafts = {} if method is None else {"speculative_config": json.dumps({"method": method})}
    found = played(tensor_parallel_size=2, depth=depth, **drafts)
    for (prompt, asks), mine, theirs in zip(ASKS, found, alone, strict=True):
        for one, other in zip(mine.outputs, theirs.outputs, strict=True):
            assert one.token_ids == other.token_ids, (prompt, asks)
            assert one.finish_reason == other.finish_reason
            compare_scores(one.logprobs, other.logprobs)
        compare_scores(mine.prompt_logprobs, theirs.prompt_logprobs)


def test_three_ranks_share_heads_and_a_vocabulary_that_does_not_divide(tmp_path):
    config = json.loads((weights_dir() / "config.json").read_text())
    changes = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 576}
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    options = OPTIONS | {"model": str(tmp_path), "load_format": "dummy", "tokenizer": str(weights_dir()), "seed": 3}
    params = [
        SamplingParams(temperature=float(seed % 2), seed=seed, max_tokens=20, ignore_eos=True) for seed in range(9)
    ]
    tokens = []
    for ranks in (1, 3):
        with LLM(**options, tensor_parallel_size=ranks) as llm:
            found = llm.generate([f"Tell me {number}" for number in range(9)], params)
            tokens.append([one.outputs[0].token_ids for one in found])
    assert tokens[0] == tokens[1] and len(set(map(tuple, tokens[0]))) > 4


def compare_scores(mine, theirs):
    assert (mine is None) == (theirs is None)
    for one, other in zip(mine or [], theirs or [], strict=True):
        assert (one is None) == (other is None)
        for token, score in (one or {}).items():
            assert token in other and math.isclose(score.logprob, other[token].logprob, abs_tol=1e-3)
