"""A thinking budget in whole engines: its tokens are those of a run in which the end was put by hand."""

from __future__ import annotations

import re

import pytest
from sharpest import sharpest

from gapless import LLM, SamplingParams, StructuredOutputs
from gapless.text import reply_tables
from gapless.text.replies import ReplyForms
from gapless.text.reply_tables import think_table
from gapless.text.tools import NO_TOOLS, formed

QUESTION = {"role": "user", "content": "Mia has 14 pens and buys 7 more. How many pens does Mia have?"}
GREEDY = SamplingParams(temperature=0, max_tokens=40)
BUDGET = 6
MARKS = {"tools": ("<tools>", "</tools>"), "think": ("<think>", "</think>")}
"""Marks that are tokens of the demo's vocabulary, and marks that are text to it"""
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}


@pytest.fixture(scope="module", params=sharpest(["4", "1", "auto"]))
def llm(request):
    depth = request.param
    options = {"speculative_config": NGRAM} if depth == "4" else {}
    with LLM(
        "demo", device="cpu", max_num_seqs=4, max_model_len=512, depth=depth, reasoning_parser="think", **options
    ) as one:
        yield one


def after(llm, ids, params=GREEDY):
    (output,) = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
    return output.outputs[0].token_ids


@pytest.mark.parametrize("name", MARKS)
def test_tokens_after_a_budget_are_those_after_an_end_put_by_hand(llm, name, monkeypatch):
    begin, end = MARKS[name]
    monkeypatch.setitem(reply_tables.REASONING_TABLES, name, think_table(name, begin, end))
    tokenizer = llm.get_tokenizer()
    put = tokenizer.encode(end, False)
    assert (len(put) == 1) == (name == "tools")
    ids = tokenizer.encode(tokenizer.chat([QUESTION]) + f"{begin}\n", False)
    free = after(llm, ids)
    assert len(free) > BUDGET, "the model was meant to think longer"
    thought = free[:BUDGET]
    wanted = (thought + put + after(llm, ids + thought + put))[: GREEDY.max_tokens]

    def asked(form=None, budget=BUDGET):
        params = GREEDY.replace(thinking_token_budget=budget, structured_outputs=form)
        return formed(params, NO_TOOLS, ReplyForms(tokenizer, "none", name), begin)

    choice = StructuredOutputs(choice=["21 pens", "7 pens"])
    prompts = [{"prompt_token_ids": ids}] * 4
    outputs = llm.generate(prompts, [asked(), asked(choice), GREEDY, asked(budget=39)], use_tqdm=False)
    bounded, chosen, beside, enough = (output.outputs[0].token_ids for output in outputs)
    assert bounded == wanted
    assert chosen[: BUDGET + len(put)] == thought + put
    assert re.fullmatch(r"\n{0,2}(21|7) pens", tokenizer.decode(chosen[BUDGET + len(put) :]))
    assert beside == enough == free, "rows without a budget, or with enough, are what they are alone"


def test_a_chat_is_taken_apart_at_the_end_that_was_put(llm):
    begun = [QUESTION, {"role": "assistant", "content": "<think>\n"}]
    params = GREEDY.replace(thinking_token_budget=BUDGET)
    (output,) = llm.chat(begun, params, use_tqdm=False, add_generation_prompt=False, continue_final_message=True)
    (said,) = output.outputs
    assert said.reasoning and said.text == f"{said.reasoning}</think>{said.text.partition('</think>')[2]}"
    thought = llm.get_tokenizer().encode(said.reasoning, False)
    assert said.token_ids[:BUDGET] == thought[:BUDGET] and len(thought) == BUDGET
