"""POST /v1/completions against a running server."""

import re

import pytest
from server_harness import ALPHABET, TOKENS, events, serving

from gapless.server.config import ServerConfig


def post(client, **fields):
    return client.post("/v1/completions", json={"prompt": "hi", **fields})


def texts(response):
    assert response.status_code == 200, response.text
    return [choice["text"] for choice in response.json()["choices"]]


def test_a_plain_completion_has_the_fields_of_openai(client):
    response = post(client, model="tiny", max_tokens=5)
    body = response.json()
    assert re.fullmatch(r"cmpl-[0-9a-f]{24}", body["id"])
    assert body["object"] == "text_completion"
    assert body["model"] == "tiny"
    assert body["choices"] == [
        {"index": 0, "text": "abcde", "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert body["usage"] == {"prompt_tokens": 2, "completion_tokens": 5, "total_tokens": 7}


def test_a_completion_has_sixteen_tokens_by_default(client):
    assert texts(post(client)) == [ALPHABET[:16]]


@pytest.mark.parametrize(
    ("prompt", "count", "tokens"),
    [
        ("hi", 1, 2),
        (["hi", "you"], 2, 5),
        (TOKENS.encode("hi"), 1, 2),
        ([TOKENS.encode("hi"), TOKENS.encode("you")], 2, 5),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_every_form_of_prompt_is_answered(client, prompt, count, tokens):
    response = post(client, prompt=prompt, max_tokens=3)
    assert texts(response) == ["abc"] * count
    assert response.json()["usage"]["prompt_tokens"] == tokens
    assert [choice["index"] for choice in response.json()["choices"]] == list(range(count))


def test_several_completions_of_several_prompts_come_in_their_order(client):
    response = post(client, prompt=["x$", "yy", "z"], n=2, max_tokens=4)
    assert texts(response) == ["abc", "abc", "abcd", "abcd", "abcd", "abcd"]
    reasons = [choice["finish_reason"] for choice in response.json()["choices"]]
    assert reasons == ["stop", "stop", "length", "length", "length", "length"]
    # The end-of-sequence token counts, as it was generated.
    assert response.json()["usage"]["completion_tokens"] == 4 * 2 + 4 * 4


@pytest.mark.parametrize("prompt", ["hi", TOKENS.encode("hi")], ids=["text", "ids"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_echoed_prompt_comes_before_its_completion(client, prompt, stream):
    response = post(client, prompt=prompt, echo=True, max_tokens=3, stream=stream)
    if stream:
        assert "".join(event["choices"][0]["text"] for event in events(response)) == "hiabc"
    else:
        assert texts(response) == ["hiabc"]


def test_echo_goes_to_its_own_choice(client):
    response = post(client, prompt=["one", "two"], n=2, echo=True, max_tokens=1, stream=True)
    whole = [""] * 4
    for event in events(response):
        whole[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert whole == ["onea", "onea", "twoa", "twoa"]


@pytest.mark.parametrize("stop", ["de", ["x", "de"]])
def test_a_stop_string_ends_the_text_before_it(client, stop):
    response = post(client, stop=stop, max_tokens=20)
    choice = response.json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", "de")


def test_the_stop_string_is_kept_on_demand(client):
    assert texts(post(client, stop="de", include_stop_str_in_output=True, max_tokens=20)) == ["abcde"]


def test_a_stop_token_ends_the_text_before_it(client):
    (token,) = TOKENS.encode("d")
    choice = post(client, stop_token_ids=[token], max_tokens=20).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", token)


def test_the_end_of_sequence_stops_unless_ignored(client):
    choice = post(client, prompt="$", max_tokens=6).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("abc", "stop", None)
    assert texts(post(client, prompt="$", max_tokens=6, ignore_eos=True)) == ["abcef"]


def test_min_tokens_holds_the_end_back(client):
    choice = post(client, prompt="$", max_tokens=8, min_tokens=6).json()["choices"][0]
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize(
    "neutral",
    [
        {"logprobs": None, "best_of": 1, "repetition_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0.0},
        {"logit_bias": {}, "suffix": None, "user": "me", "response_format": {"type": "text"}, "n": 1, "stop": None},
        {"temperature": None, "top_p": None, "max_tokens": 16, "stream": None, "seed": None, "stream_options": None},
        {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0.0, "seed": 7, "priority": 3, "cache_salt": "s"},
        {"no_such_field": {"deep": [1, 2]}, "another": 1},
    ],
)
def test_fields_that_ask_for_nothing_are_taken(client, neutral):
    assert texts(post(client, **neutral)) == [ALPHABET[:16]]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_fields_that_adjust_logits_take_ids_as_json_has_them(client, path):
    """The core without a model samples as ever: what each field does is held by tests/engine/test_adjusted_demo.py."""
    asked = {
        "repetition_penalty": 1.2, "presence_penalty": -0.5, "frequency_penalty": 2, "logit_bias": {"5": -100, "6": 1},
        "allowed_token_ids": [5, 6, 7], "bad_words": ["no", "more"], "prompt": "a", "max_tokens": 4,
        "messages": [{"role": "user", "content": "a"}],
    }  # fmt: skip
    response = client.post(path, json=asked)
    assert response.status_code == 200 and response.json()["usage"]["completion_tokens"] == 4, response.text


def test_a_streamed_completion_has_the_text_in_parts(client):
    response = post(client, max_tokens=30, stream=True)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    found = events(response)
    assert "".join(event["choices"][0]["text"] for event in found) == (ALPHABET * 2)[:30]
    assert {(event["id"], event["object"], event["model"]) for event in found} == {
        (found[0]["id"], "text_completion", "tiny")
    }
    assert len({event["created"] for event in found}) == 1
    assert [event["choices"][0]["finish_reason"] for event in found[:-1]] == [None] * (len(found) - 1)
    assert found[-1]["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in event for event in found)


def test_usage_comes_last_with_no_choices(client):
    found = events(post(client, prompt=["a", "bb"], max_tokens=4, stream=True, stream_options={"include_usage": True}))
    assert found[-1]["choices"] == []
    assert found[-1]["usage"] == {"prompt_tokens": 3, "completion_tokens": 8, "total_tokens": 11}
    assert all(event["usage"] is None and event["choices"] for event in found[:-1])


def test_usage_is_in_every_chunk_on_demand(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    found = events(post(client, prompt="hi~", max_tokens=6, stream=True, stream_options=options))
    counts = [event["usage"]["completion_tokens"] for event in found]
    assert counts == sorted(counts)
    assert counts[-1] == 6
    assert {event["usage"]["prompt_tokens"] for event in found} == {3}


def test_characters_are_whole_in_every_chunk(client):
    found = events(post(client, prompt="+~", max_tokens=12, stream=True))
    assert "".join(event["choices"][0]["text"] for event in found) == "äöüäöü"
    assert all("\ufffd" not in event["choices"][0]["text"] for event in found)


def test_the_first_chunk_does_not_wait_for_the_second_token():
    """The second token is held until the client has read the first."""
    import threading

    from server_harness import VOCAB, script

    from gapless.testing.core import FakeCore

    seen = threading.Event()

    def gated(request, count):
        assert count == 0 or seen.wait(10)
        return script(request, count)

    with serving(core=lambda: FakeCore(VOCAB, script=gated)) as server, server.client() as client:
        fields = {"prompt": "hi", "max_tokens": 3, "stream": True}
        with client.stream("POST", "/v1/completions", json=fields) as response:
            lines = response.iter_lines()
            assert '"text":"a"' in next(lines)
            assert not seen.is_set()
            seen.set()
            assert '"finish_reason":"length"' in "".join(lines)


def test_details_and_usage_are_given_by_flag():
    config = ServerConfig(port=0, enable_prompt_tokens_details=True, enable_force_include_usage=True)
    with serving(config) as server, server.client() as client:
        assert post(client).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        found = events(post(client, stream=True))
        assert found[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_the_models_own_sampling_defaults_are_used():
    from server_harness import TOKENS, listening_core

    from gapless.engine.frontdoor import ModelAssets

    taken = []

    core = listening_core(lambda request: taken.append(request.params))
    front = ModelAssets(TOKENS, (), {"temperature": 0.6, "top_k": 20})
    with serving(core=core, front=front) as server, server.client() as client:
        assert post(client).status_code == 200
        assert post(client, temperature=0.0).status_code == 200
    assert [(params.temperature, params.top_k) for params in taken] == [(0.6, 20), (0.0, 20)]
