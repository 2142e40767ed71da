"""The demo model with penalties, biases, allowed ids and bad words: what each means for tokens and text."""

from __future__ import annotations

import pytest

from gapless import LLM, SamplingParams

PROMPT = "Question: Mia has 14 pens and buys 7 more. How many pens does Mia have?\nAnswer:"


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", device="cpu", max_num_seqs=4, max_model_len=256) as one:
        yield one


def run(llm, **asks):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **asks)
    return llm.generate([PROMPT], params, use_tqdm=False)[0].outputs


def test_what_asks_for_nothing_changes_nothing(llm):
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "logit_bias": {}, "bad_words": []}
    assert run(llm, **neutral)[0].token_ids == run(llm)[0].token_ids


def test_a_bias_of_100_is_sampled_and_one_of_minus_100_is_not(llm):
    plain = run(llm)[0].token_ids
    assert run(llm, logit_bias={7: 100})[0].token_ids == [7] * 40
    assert plain[0] not in run(llm, logit_bias={plain[0]: -100})[0].token_ids


def test_no_other_than_allowed_tokens_come(llm):
    plain = run(llm)[0].token_ids
    allowed = plain[:5]
    assert set(run(llm, allowed_token_ids=allowed)[0].token_ids) <= set(allowed)
    assert run(llm, allowed_token_ids=[9], min_tokens=3)[0].token_ids == [9] * 40


def test_a_bad_word_is_not_in_the_text(llm):
    assert "####" in run(llm)[0].text
    assert "####" not in run(llm, bad_words=["####"])[0].text


def test_a_penalty_makes_tokens_rarer_and_each_completion_counts_for_itself(llm):
    plain, once = run(llm)[0].token_ids, run(llm, frequency_penalty=2.0)[0].token_ids
    assert len(set(once)) > len(set(plain))
    assert [one.token_ids for one in run(llm, frequency_penalty=2.0, n=3)] == [once] * 3
    assert run(llm, repetition_penalty=2.0)[0].token_ids != plain


def test_rows_beside_one_that_asks_are_as_without_it(llm):
    greedy = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    asks = greedy.replace(presence_penalty=1.5, bad_words=["pens"], logprobs=2)
    prompts = [PROMPT, PROMPT.replace("Mia", "Tom"), PROMPT.replace("14", "25")]
    plain = llm.generate(prompts, greedy, use_tqdm=False)
    beside = llm.generate([PROMPT, *prompts], [asks, *[greedy] * 3], use_tqdm=False)
    assert [one.outputs[0].token_ids for one in beside[1:]] == [one.outputs[0].token_ids for one in plain]
    # Log-probabilities are those of the raw logits, whatever was sampled from.
    first = beside[0].outputs[0].logprobs[0]
    assert plain[0].outputs[0].token_ids[0] in first
