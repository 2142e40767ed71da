"""Everything a client can get wrong is a 4xx with an OpenAI error body that names the field."""

import json

import pytest
from server_harness import VOCAB, error_of

COMPLETION = {"prompt": "hi"}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
both = pytest.mark.parametrize(("path", "base"), ROUTES, ids=["completions", "chat"])


@both
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, 101, "hot", [])),
        *(("top_p", value) for value in (0, -1, 1.01, "x")),
        *(("top_k", value) for value in (-2, 2**31, 1.5, True)),
        *(("min_p", value) for value in (-0.1, 1.1)),
        *(("n", value) for value in (0, -1, 65, 10**30, "1")),
        *(("max_tokens", value) for value in (0, -1, 2**31, 1.5)),
        *(("min_tokens", value) for value in (-1, 2**40)),
        *(("seed", value) for value in (2**63, -(2**63) - 1, "s", 0.5)),
        *(("stop", value) for value in ("", [""], ["x"] * 17, ["x" * 1001], 5, [5])),
        *(("stop_token_ids", value) for value in ([-1], [VOCAB], [2**40], list(range(33)), "x", [1.5])),
        *(("ignore_eos", value) for value in ("yes", 1)),
        *(("priority", value) for value in (2**31, "high")),
        *(("stream", value) for value in ("true", 1)),
        *(("stream_options", value) for value in (True, {"include_usage": "yes"})),
        *(("cache_salt", value) for value in (1,)),
        *(("logprobs", value) for value in ("yes", 1.5, [])),
        *(("prompt_logprobs", value) for value in (-1, 21, True, "1")),
        *((f"{name}_penalty", value) for name in ("presence", "frequency") for value in (-2.01, 2.01, "1", True, [])),
        *(("repetition_penalty", value) for value in (0, -1, 1e-38, 0.009, 101, "1", True)),
        *(("logit_bias", value) for value in ({"x": 1}, {"-1": 1}, {"1": 101}, {"1": "a"}, {"99999999": 1}, [1], 3)),
        *(("logit_bias", {str(token): 1 for token in range(1_025)}) for _ in "1"),
        *(("allowed_token_ids", value) for value in ([], [-1], ["1"], [99_999_999], [1.5], 1, list(range(1_025)))),
        *(("logits_processors", value) for value in ("a", ["a"], [{"qualname": "a"}], ["a"] * 9, [1], [{"args": [1]}])),
        *(("logits_processors", [{"qualname": "a", **part}]) for part in ({"args": [1e39]}, {"kwargs": {"x": 1}})),
        *(("logits_processors", [{"qualname": "a", "args": args}]) for args in ([1] * 9, ["1"], [True], 3)),
        *(("bad_words", value) for value in ("x", [""], [" "], [1], ["x" * 1_001], ["x"] * 129, ["abcdef" * 150] * 9)),
        *(("return_token_ids", value) for value in ("yes", 1)),
        *(("model", value) for value in (7,)),
    ],
)  # fmt: skip
def test_a_field_out_of_range_or_of_the_wrong_type_is_refused(client, path, base, name, value):
    response = client.post(path, json={**base, name: value})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    assert error["param"].split("[")[0].split(".")[0] == name


@both
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["audio"]),
        ("use_beam_search", True),
        ("chat_template", "{{ x }}"),
        ("suffix", "end"),
        ("repetition_detection", {"max_pattern_size": 4, "min_count": 3}),
        ("logprob_token_ids", [5]),
        ("mirostat", 2),
        ("documents", [{"text": "d"}]),
        ("prompt_embeds", "AAAA"),
    ],
)
def test_a_field_known_but_not_supported_is_refused(client, path, base, name, value):
    response = client.post(path, json={**base, name: value})
    assert response.status_code == 400, response.text
    error = error_of(response)
    assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert "not supported" in error["message"]


def test_template_variables_of_the_renderer_are_refused(client):
    for variables in ({"tokenize": True}, {"messages": True}, {"bos_token": False}):
        response = client.post("/v1/chat/completions", json={**CHAT, "chat_template_kwargs": variables})
        assert response.status_code == 400
        assert error_of(response)["param"] == "chat_template_kwargs"
    response = client.post("/v1/chat/completions", json={**CHAT, "chat_template_kwargs": ["enable_thinking"]})
    assert response.status_code == 400


@both
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"hello",
        b"\xff\xfe",
        b'{"prompt": "\xff", "messages": "\xff"}',
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}], "temperature": Infinity}',
        b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}], "temperature": 1e999}',
        b'{"prompt": "x", "messages": [{"role": "user", "content": "x"}], "n": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x"} {"messages": []}',
        b"\xef\xbb\xbf{}",
    ],
)
def test_a_body_that_is_no_json_object_is_refused(client, path, base, body):
    response = client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    error_of(response)


@both
@pytest.mark.parametrize("depth", [65, 10_000, 200_000])
@pytest.mark.parametrize("ends", ["[]", "{}"])
def test_deep_json_is_refused(client, path, base, depth, ends):
    opening = "[" if ends == "[]" else '{"a":'
    deep = opening * depth + "1" + ends[1] * depth
    body = json.dumps(base)[:-1] + ', "x": ' + deep + "}"
    response = client.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert error_of(response)["code"] == "too_deep"


def test_brackets_in_strings_and_wide_json_are_not_depth(client):
    body = {"prompt": "[" * 200 + '\\"{' * 100, "x": [[1]] * 500, "max_tokens": 2}
    response = client.post("/v1/completions", json=body)
    assert response.json()["choices"][0]["text"] == "ab"


def test_half_a_surrogate_in_a_large_message_is_no_fault_of_ours(client):
    body = b'{"prompt": "' + b"x" * 200 + b'\\udfff"}'
    response = client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    error_of(response)


@both
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": "hot"}, "temperature: expected `float | null`, got `str`"),
        ({"stream_options": {"include_usage": 2}}, "stream_options.include_usage: expected `bool | null`, got `int`"),
    ],
)
def test_a_wrong_type_names_its_field_first(client, path, base, fields, message):
    assert error_of(client.post(path, json={**base, "stream": True, **fields}))["message"] == message


@both
def test_another_model_is_404(client, path, base):
    response = client.post(path, json={**base, "model": "gpt-4"})
    assert response.status_code == 404
    assert error_of(response) == {
        "message": "the model is not served here; served as model: tiny",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


@pytest.mark.parametrize(
    "prompt",
    ["", [], [[]], ["a", ""], [1, "a"], [[1], "a"], [-1], [VOCAB], [[VOCAB]], [1.5], None, {"a": 1}, 3, [True]],
)
def test_a_wrong_prompt_is_refused_by_name(client, prompt):
    response = client.post("/v1/completions", json={"prompt": prompt})
    assert response.status_code == 400, response.text
    assert error_of(response)["param"].startswith("prompt")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_missing_fields_are_named(client, path):
    response = client.post(path, json={})
    assert response.status_code == 400
    assert error_of(response)["param"] in ("prompt", "messages", "tokens")


@both
def test_a_prompt_too_long_for_the_context_is_refused(client, path, base):
    long = "x" * 2000
    fields = {"prompt": long} if "prompt" in base else {"messages": [{"role": "user", "content": long}]}
    for stream in (False, True):
        response = client.post(path, json={**fields, "stream": stream})
        assert response.status_code == 400
        assert error_of(response)["code"] == "context_length_exceeded"
    response = client.post(path, json={**base, "max_tokens": 1024})
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"


@both
def test_far_too_long_is_refused_without_tokenising(client, path, base):
    long = "x" * 3_000_000
    fields = {"prompt": long} if "prompt" in base else {"messages": [{"role": "user", "content": long}]}
    response = client.post(path, json=fields)
    assert response.status_code == 400
    assert error_of(response)["code"] == "context_length_exceeded"


def test_the_product_of_prompts_and_n_is_bounded(client):
    response = client.post("/v1/completions", json={"prompt": ["x"] * 5, "n": 52, "max_tokens": 1})
    assert response.status_code == 400
    assert error_of(response)["param"] == "n"
    response = client.post("/v1/completions", json={"prompt": ["x"] * 4, "n": 64, "max_tokens": 1})
    assert len(response.json()["choices"]) == 256


def test_one_bad_prompt_ends_the_whole_request(server, client):
    for stream in (False, True):
        response = client.post("/v1/completions", json={"prompt": ["~ok", ""], "stream": stream, "max_tokens": 500})
        assert response.status_code == 400
        error_of(response)
    server.until(lambda: server.stats().running == 0)


@both
def test_other_content_types_are_refused(client, path, base):
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        response = client.post(path, content=json.dumps(base), headers={"content-type": kind})
        assert response.status_code == 415
        error_of(response)
    kind = "application/json; charset=utf-8"
    assert client.post(path, content=json.dumps(base), headers={"content-type": kind}).status_code == 200


def test_an_unknown_route_or_method_is_refused(client):
    for path in ("/v1", "/v1/nothing", "/v1/completions/x", "/%2e%2e/etc/passwd", "/v1/images"):
        response = client.get(path)
        assert response.status_code == 404
        error = error_of(response)
        assert error["code"] == "not_found"
        assert "POST /v1/" in error["message"] and "GET /openapi.json" in error["message"]
    response = client.get("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    assert error_of(response)["code"] == "method_not_allowed"


def test_a_failed_row_is_an_error_not_an_answer(client):
    response = client.post("/v1/completions", json={"prompt": "!"})
    assert response.status_code == 500
    error = error_of(response)
    assert error["type"] == "server_error"
    assert "incident" in error["message"]


def test_a_failed_row_ends_its_stream_with_an_error_event(client):
    response = client.post("/v1/completions", json={"prompt": "!~", "stream": True})
    assert response.status_code == 200
    *chunks, error, done = [line for line in response.text.split("\n\n") if line]
    assert done == "data: [DONE]"
    assert set(json.loads(error[6:])) == {"error"}
    text = "".join(json.loads(chunk[6:])["choices"][0]["text"] for chunk in chunks)
    assert text == "ab"


def test_the_neighbours_of_a_failed_row_go_on(client):
    from concurrent.futures import ThreadPoolExecutor

    def ask(prompt):
        return client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 40})

    with ThreadPoolExecutor(4) as pool:
        good, bad, other = pool.map(ask, ["~", "~!", "x"])
    assert (good.status_code, bad.status_code, other.status_code) == (200, 500, 200)
    assert len(good.json()["choices"][0]["text"]) == 40


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
        ({"messages": [{"role": "tool", "tool_call_id": 5, "content": "x"}]}, "messages[0].tool_call_id"),
        *(
            (
                {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]},
                "tools[0].function.parameters",
            )
            for parameters in (
                {"properties": []},
                {"required": "x"},
                {"required": [1]},
                {"type": "object", "required": 3},
            )
        ),
        *(({"structured_outputs": {"json": schema}}, "structured_outputs") for schema in (3, True, [1])),
        *(({"guided_json": schema}, "guided_json") for schema in (3, False)),
    ],
)
def test_a_malformed_part_of_a_chat_is_named(client, fields, param):
    response = client.post("/v1/chat/completions", json=CHAT | fields)
    assert response.status_code == 400, response.text
    assert error_of(response)["param"].startswith(param)
