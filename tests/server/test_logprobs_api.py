"""Log-probabilities over HTTP, in OpenAI's shapes, with a core that says known numbers: every token is second to its
predecessor in the vocabulary, at -2, and the ones around it are at -1, -3, -4 and so on."""

import threading

import pytest
from server_harness import TOKENS, VOCAB, error_of, events

from gapless.server import logprobs as server_logprobs

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HI = TOKENS.encode("hi")
EURO = TOKENS.encode("€")


def post(client, path=COMPLETIONS, **fields):
    base = {"prompt": "hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    response = client.post(path, json={**base, **fields})
    assert response.status_code == 200, response.text
    return response


def choice_of(client, path=COMPLETIONS, **fields):
    return post(client, path, **fields).json()["choices"][0]


def text(token):
    return TOKENS.decode([token % VOCAB])


def likely(token, top):
    """What the fake core says of a place where `token` stands."""
    named = {text(token): -2.0, **{text(token - 1 + i): -1.0 - i for i in range(top)}}
    assert len(named) == max(top, 1) + (top == 1)
    return named


def streamed(client, path=COMPLETIONS, **fields):
    """The events of choice 0, and its text."""
    found = [event for event in events(post(client, path, stream=True, **fields)) if event["choices"]]
    parts = [event["choices"][0] for event in found]
    content = [part["text"] if path == COMPLETIONS else part["delta"].get("content", "") for part in parts]
    return parts, "".join(content)


def joined(parts):
    """The log-probabilities of several chunks as one."""
    whole = {name: [] for name in ("text_offset", "token_logprobs", "tokens", "top_logprobs")}
    for part in parts:
        for name, values in (part["logprobs"] or {}).items():
            whole[name] += values
    return whole


def echoed(client, stream, **fields):
    """The text and log-probabilities of a completion, streamed or whole."""
    if stream:
        parts, shown = streamed(client, **fields)
        return shown, joined(parts)
    choice = choice_of(client, **fields)
    return choice["text"], choice["logprobs"]


# Completions.

ECHO, ALONE = {"echo": True, "logprobs": 0, "max_tokens": 2}, {"echo": True, "logprobs": 0, "max_tokens": 0}
ABC, EURO_BYTES = ["a", "b", "c"], ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
FULL = HI * 512  # the context's 1,024 tokens
SCORED = [
    *(({"max_tokens": 3, "logprobs": top}, "abc", ABC, [0, 1, 2]) for top in (0, 1, 3)),
    ({**ECHO, "logprobs": 1}, "hiab", ["h", "i", "a", "b"], [0, 1, 2, 3]),
    ({**ECHO, "prompt": HI}, "hiab", ["h", "i", "a", "b"], [0, 1, 2, 3]),
    # No token is generated for a client that only wants to score.
    (ALONE, "hi", ["h", "i"], [0, 1]),
    ({**ALONE, "prompt": FULL}, "hi" * 512, ["h", "i"] * 512, [*range(1024)]),
    # The text of the end token is left out, not the token.
    ({"prompt": "$", "max_tokens": 9, "logprobs": 0}, "abc", [*ABC, "</s>"], [0, 1, 2, 3]),
    # A stop string that may have begun holds text back, not log-probabilities.
    ({"prompt": "hi~", "max_tokens": 6, "stop": ["cx", "efz"], "logprobs": 2}, "abcdef", [*"abcdef"], [*range(6)]),
    # Parts of a character are named by their bytes, and their offset is that of the character.
    ({**ECHO, "prompt": EURO, "logprobs": 1, "max_tokens": 1}, "€a", [*EURO_BYTES, "a"], [0, 0, 0, 1]),
    ({**ECHO, "prompt": [*EURO, *TOKENS.encode("+")], "max_tokens": 4}, "€+äö",
     [*EURO_BYTES, "+", *(f"bytes:\\x{byte:02x}" for byte in "äö".encode())], [0, 0, 0, 1, 2, 2, 3, 3]),
    ({**ECHO, "prompt": "</s>hi"}, "</s>hiab", ["</s>", "h", "i", "a", "b"], [0, 4, 5, 6, 7]),
    ({**ECHO, "prompt": "h</s>i</s></s>"}, "h</s>i</s></s>ab", ["h", "</s>", "i", "</s>", "</s>", "a", "b"],
     [0, 1, 5, 6, 10, 14, 15]),
    ({**ECHO, "prompt": "h€i"}, "h€iab", ["h", *EURO_BYTES, "i", "a", "b"], [0, 1, 1, 1, 2, 3, 4]),
    # The echo of ids leaves special tokens out.
    ({**ECHO, "prompt": [*HI, TOKENS.eos_token_id, HI[0]]}, "hihab", ["h", "i", "</s>", "h", "a", "b"],
     [0, 1, 2, 2, 3, 4]),
    ({**ECHO, "prompt": [EURO[0], *HI]}, "\ufffdhiab", [EURO_BYTES[0], "h", "i", "a", "b"], [0, 0, 2, 3, 4]),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "shown", "tokens", "offsets"), SCORED, ids=lambda one: str(one)[:40])
@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_has_its_text_tokens_offsets_and_scores(client, stream, fields, shown, tokens, offsets):
    found, scores = echoed(client, stream, **fields)
    assert (found, scores["tokens"], scores["text_offset"]) == (shown, tokens, offsets)
    first = [None] * bool(fields.get("echo"))
    assert scores["token_logprobs"] == [*first, *[-2.0] * (len(tokens) - len(first))]
    tops, most = scores["top_logprobs"], fields["logprobs"]
    assert tops[: len(first)] == first
    for token, top in list(zip(tokens, tops, strict=True))[len(first) :]:
        assert len(top) == max(most, 1) + (most == 1)
        assert len(token) > 1 or top == likely(*TOKENS.encode(token), most)


@pytest.mark.parametrize("stream", [False, True])
def test_the_end_of_a_completion_that_is_not_shown_is_not_sent(client, stream):
    fields = {"echo": True, "max_tokens": 0, "stop_token_ids": TOKENS.encode("a")}
    choice = streamed(client, **fields)[0][-1] if stream else choice_of(client, **fields)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)
    usage = post(client, **fields).json()["usage"]
    assert usage == {"prompt_tokens": 2, "completion_tokens": 0, "total_tokens": 2}


@pytest.mark.parametrize("fields", [{"echo": True, "logprobs": 1}, {"echo": True}, {"prompt_logprobs": 0}])
@pytest.mark.parametrize("prompts", [[FULL], [FULL, HI], [FULL[1:], FULL, FULL[:5]]], ids=len)
def test_a_prompt_of_the_whole_context_is_scored(client, fields, prompts):
    body = post(client, prompt=prompts, max_tokens=0, **fields).json()
    count = sum(map(len, prompts))
    assert body["usage"] == {"prompt_tokens": count, "completion_tokens": 0, "total_tokens": count}
    for prompt, choice in zip(prompts, body["choices"], strict=True):
        assert (choice["text"], choice["finish_reason"]) == (TOKENS.decode(prompt) * ("echo" in fields), "length")
        scored = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else choice.get("prompt_logprobs")
        assert scored is None or (scored[0] is None and len(scored) == len(prompt) and None not in scored[1:])


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"max_tokens": 0, "echo": True, "prompt": [*FULL, 7]}, "your prompt has 1025 tokens."),
        ({"max_tokens": 0, "echo": True, "prompt": [HI, [*FULL, 7, 7]]}, "your prompt has 1026 tokens."),
        ({"max_tokens": 0, "prompt_logprobs": 1, "prompt": [*FULL, 7]}, "your prompt has 1025 tokens."),
        ({"max_tokens": 1, "echo": True, "prompt": FULL}, "your prompt has 1024 tokens, and at least one must be left"),
        ({"max_tokens": None, "prompt": FULL}, "your prompt has 1024 tokens, and at least one must be left"),
        ({"max_tokens": 2, "echo": True, "prompt": FULL[1:]}, "you requested 1025 tokens (1023 in the prompt, 2 in"),
    ],
)
def test_a_prompt_beyond_the_context_is_refused_with_its_length(client, fields, said):
    response = client.post(COMPLETIONS, json=fields)
    assert response.status_code == 400
    error = error_of(response)
    assert (error["code"], said in error["message"]) == ("context_length_exceeded", True), error["message"]


def test_each_choice_has_its_own(client):
    body = post(client, prompt=["one", "t", "hi$"], n=2, echo=True, logprobs=1, max_tokens=2).json()
    tokens = ["".join(choice["logprobs"]["tokens"]) for choice in body["choices"]]
    assert tokens == ["oneab", "oneab", "tab", "tab", "hi$ab", "hi$ab"]
    assert [choice["logprobs"]["token_logprobs"][0] for choice in body["choices"]] == [None] * 6
    whole = [""] * 6
    for event in events(
        post(client, prompt=["one", "t", "hi$"], n=2, echo=True, logprobs=1, max_tokens=2, stream=True)
    ):
        part = event["choices"][0]
        whole[part["index"]] += "".join((part["logprobs"] or {"tokens": []})["tokens"])
    assert whole == tokens


# Chat.


def test_chat_has_one_entry_a_token(client):
    content = choice_of(client, CHAT, max_tokens=2, logprobs=True, top_logprobs=2)["logprobs"]["content"]
    a, b = TOKENS.encode("ab")
    assert content == [
        {
            **{"token": text(token), "logprob": -2.0, "bytes": list(text(token).encode())},
            "top_logprobs": [
                {"token": text(other), "logprob": logprob, "bytes": list(text(other).encode())}
                for other, logprob in ((token - 1, -1.0), (token, -2.0))
            ],
        }
        for token in (a, b)
    ]


def test_a_chat_without_alternatives_has_its_own_log_probabilities(client):
    for fields in ({}, {"top_logprobs": 0}):
        content = choice_of(client, CHAT, max_tokens=2, logprobs=True, **fields)["logprobs"]["content"]
        assert [(entry["token"], entry["top_logprobs"]) for entry in content] == [("a", []), ("b", [])]
    assert choice_of(client, CHAT, max_tokens=2, logprobs=False)["logprobs"] is None


def test_log_probabilities_of_a_streamed_chat_come_in_chunks(client):
    fields = {"max_tokens": 5, "logprobs": True, "top_logprobs": 1}
    parts, shown = streamed(client, CHAT, **fields)
    assert parts[0]["logprobs"] is None
    found = [entry for part in parts for entry in (part["logprobs"] or {"content": []})["content"]]
    assert (shown, found) == ("abcde", choice_of(client, CHAT, **fields)["logprobs"]["content"])


def test_a_token_of_a_part_of_a_character_has_its_bytes(client):
    messages = [{"role": "user", "content": "+"}]
    content = choice_of(client, CHAT, messages=messages, max_tokens=2, logprobs=True)["logprobs"]["content"]
    assert [(entry["token"], entry["bytes"]) for entry in content] == [("bytes:\\xc3", [0xC3]), ("bytes:\\xa4", [0xA4])]


# Further fields.


def test_log_probabilities_of_the_prompt_are_given_by_id(client):
    expected = [None, {str(HI[1]): spelt(HI[1], -2.0, 2), str(HI[1] - 1): spelt(HI[1] - 1, -1.0, 1)}]
    assert choice_of(client, max_tokens=1, prompt_logprobs=1)["prompt_logprobs"] == expected
    chat = post(client, CHAT, max_tokens=1, prompt_logprobs=0, return_token_ids=True).json()
    assert chat["prompt_logprobs"][0] is None
    assert [list(entry) for entry in chat["prompt_logprobs"][1:]] == [[str(i)] for i in chat["prompt_token_ids"][1:]]
    for path in (COMPLETIONS, CHAT):
        assert "prompt_logprobs" not in post(client, path, max_tokens=1).text


def spelt(token, logprob, rank):
    return {"logprob": logprob, "rank": rank, "decoded_token": text(token)}


@pytest.mark.parametrize("echo", [False, True])
def test_token_ids_are_given_on_demand(client, echo):
    fields = {"max_tokens": 3, "return_token_ids": True, "echo": echo}
    choice, ids = choice_of(client, **fields), TOKENS.encode("abc")
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (HI, ids)
    parts, _ = streamed(client, **fields)
    assert [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part] == [HI]
    assert [token for part in parts for token in part.get("token_ids", [])] == ids


def test_token_ids_of_a_chat_are_given_on_demand(client):
    body = post(client, CHAT, max_tokens=3, return_token_ids=True).json()
    assert TOKENS.decode(body["prompt_token_ids"]) == "<user>hi<assistant>"
    assert body["choices"][0]["token_ids"] == TOKENS.encode("abc")
    found = events(post(client, CHAT, max_tokens=3, return_token_ids=True, stream=True))
    assert found[0]["prompt_token_ids"] == body["prompt_token_ids"]
    assert [token for event in found for token in event["choices"][0].get("token_ids", [])] == TOKENS.encode("abc")
    assert all("token_ids" not in event["choices"][0] for event in events(post(client, CHAT, stream=True)))


# Bounds.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "good"),
    [
        ({"prompt": "x" * 20, "echo": True, "max_tokens": 0, "logprobs": 4}, True),
        ({"prompt": "x" * 21, "echo": True, "max_tokens": 0, "logprobs": 4}, False),
        ({"prompt": ["x" * 11] * 2, "echo": True, "max_tokens": 0, "logprobs": 4}, False),
        ({"max_tokens": 20, "logprobs": 4}, True),
        ({"max_tokens": 21, "logprobs": 4}, False),
        ({"max_tokens": 11, "logprobs": 4, "n": 2}, False),
        ({"max_tokens": 101, "logprobs": 0}, False),
        ({"max_tokens": 101}, True),
    ],
)
def test_the_log_probabilities_of_one_request_are_bounded(client, monkeypatch, fields, good, stream):
    """They take far more memory than their tokens, and the front holds those of all requests."""
    monkeypatch.setattr("gapless.server.generation.MAX_SCORED", 100)
    response = client.post(COMPLETIONS, json={"prompt": "hi", "stream": stream, **fields})
    assert (response.status_code == 200 and "error" not in response.text) == good
    if not good:
        assert '"param":"logprobs"' in response.text and "log-probabilities" in response.text


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_long_answer_is_written_on_a_thread_and_is_the_same(client, monkeypatch, path):
    fields = {"max_tokens": 20, "logprobs": 4} if path == COMPLETIONS else {"max_tokens": 20, "logprobs": True}
    if path == COMPLETIONS:
        fields["echo"] = True
    choices, threads = [], []
    encode = server_logprobs.token_text

    def named(*arguments):
        threads.append(threading.current_thread().name)
        return encode(*arguments)

    monkeypatch.setattr(server_logprobs, "token_text", named)
    for limit in (2_000, 10):
        monkeypatch.setattr("gapless.server.answer.INLINE_SCORED", limit)
        choices.append(choice_of(client, path, **fields))
        assert all(name.startswith("gapless-text") == (limit == 10) for name in threads) and threads
        threads.clear()
    assert choices[0] == choices[1]
