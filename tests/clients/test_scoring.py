"""The score of a given answer, asked for as a chat and as a completion, is what transformers computes."""

from __future__ import annotations

import pytest
import torch
import transformers

from gapless.demo import weights_dir

TALK = [{"role": "user", "content": "What is 14 + 7?"}, {"role": "assistant", "content": "14 + 7 = 21"}]


def test_the_score_of_an_answer_costs_no_token_and_is_that_of_transformers(demo):
    asked = {"messages": TALK, "add_generation_prompt": False, "continue_final_message": True}
    chat = demo.post(
        "/v1/chat/completions", json={**asked, "max_tokens": 0, "prompt_logprobs": 0, "return_token_ids": True}
    ).json()
    ids = chat["prompt_token_ids"]
    assert chat["usage"]["completion_tokens"] == 0
    scores = [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], chat["prompt_logprobs"][1:], strict=True)]
    body = {"prompt": ids, "max_tokens": 0, "logprobs": 0, "echo": True}
    echoed = demo.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert echoed["token_logprobs"][1:] == pytest.approx(scores, abs=1e-5)
    model = transformers.AutoModelForCausalLM.from_pretrained(weights_dir(), dtype=torch.float32)
    with torch.inference_mode():
        rows = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [float(rows[place, token]) for place, token in enumerate(ids[1:])]
    assert scores == pytest.approx(expected, abs=0.05)
    assert sum(scores[-8:]) == pytest.approx(sum(expected[-8:]), abs=0.1)
