"""Small things that requests ask for: cut prompts, scored answers, special tokens, documents."""

import pytest
from server_harness import TEMPLATE, TOKENS, error_of, serving, tokenizer

from gapless.engine.frontdoor import ModelAssets

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TALK = [{"role": "user", "content": "What is the capital of Norway?"}, {"role": "assistant", "content": "Oslo"}]
SCORED = {"messages": TALK, "add_generation_prompt": False, "continue_final_message": True, "max_tokens": 0}


def ids_of(answer):
    """The tokens of the prompt: each API shows them in its own place."""
    assert answer.status_code == 200, answer.text
    body = answer.json()
    return body.get("prompt_token_ids") or body["choices"][0]["prompt_token_ids"]


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": "abcdefgh"}), (CHAT, {"messages": TALK[:1]})])
@pytest.mark.parametrize(("asked", "part"), [
    ({"truncate_prompt_tokens": 3}, slice(-3, None)),
    ({"truncate_prompt_tokens": 3, "truncation_side": "right"}, slice(None, 3)),
    ({"truncate_prompt_tokens": 900}, slice(None)),
    ({"truncate_prompt_tokens": -1}, slice(None)),
])  # fmt: skip
def test_a_prompt_is_cut_where_the_request_says(client, path, prompt, asked, part):
    body = {**prompt, "max_tokens": 2, "return_token_ids": True}
    whole = ids_of(client.post(path, json=body))
    answer = client.post(path, json={**body, **asked})
    assert ids_of(answer) == whole[part]
    assert answer.json()["usage"]["prompt_tokens"] == len(whole[part])


def test_a_long_prompt_is_cut_to_what_the_context_leaves(client):
    body = {"prompt": "abc" * 500, "max_tokens": 24, "return_token_ids": True}
    assert error_of(client.post(COMPLETIONS, json=body))["code"] == "context_length_exceeded"
    answer = client.post(COMPLETIONS, json={**body, "truncate_prompt_tokens": -1})
    assert ids_of(answer) == TOKENS.encode("abc" * 500)[-1000:]


def test_an_answer_in_a_chat_is_scored_without_a_new_one(client):
    answer = client.post(CHAT, json={**SCORED, "prompt_logprobs": 1, "return_token_ids": True}).json()
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == "" and choice["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    assert len(answer["prompt_logprobs"]) == len(answer["prompt_token_ids"])
    assert TOKENS.decode(answer["prompt_token_ids"][-4:]) == "Oslo"


def test_an_answer_of_no_token_needs_something_to_score(client):
    for more in ({}, {"prompt_logprobs": 0, "response_format": {"type": "json_object"}}):
        answer = client.post(CHAT, json={**SCORED, **more})
        assert answer.status_code == 400, more
        assert error_of(answer)["param"] == ("response_format" if more else "max_tokens")


def test_special_tokens_are_left_out_where_the_request_says(client):
    for asked in (True, False):
        body = {"prompt": ["abc", "de"], "add_special_tokens": asked, "max_tokens": 1, "return_token_ids": True}
        choices = client.post(COMPLETIONS, json=body).json()["choices"]
        assert [choice["prompt_token_ids"] for choice in choices] == [TOKENS.encode(t, asked) for t in ("abc", "de")]


def test_documents_reach_a_template_that_has_a_place_for_them():
    template = "{% for d in documents or [] %}[{{ d.text }}]{% endfor %}" + TEMPLATE
    front = ModelAssets(tokenizer(template), (TOKENS.eos_token_id,), {})
    with serving(front=front) as server, server.client() as client:
        body = {"messages": TALK[:1], "documents": [{"text": "d"}], "max_tokens": 1, "return_token_ids": True}
        assert TOKENS.decode(ids_of(client.post(CHAT, json=body))).startswith("[d]")
