"""Byte tokens over HTTP: streams, stop strings, usage and offsets of a vocabulary of the Llama 2 kind."""

from functools import partial

import pytest
from server_harness import TEMPLATE, events, serving
from vocabularies import byte_fallback

from gapless.engine.frontdoor import ModelAssets
from gapless.testing.core import FakeCore
from gapless.text.chat import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
BYTES = byte_fallback(template=ChatTemplate(TEMPLATE, SPECIAL))
COMPLETIONS = "/v1/completions"
SAID = {"script": []}
"""The tokens that the model says"""


def ids(*parts):
    """Tokens by name; bytes as two digits."""
    found = [BYTES.token_id(part if BYTES.token_id(part) is not None else f"<0x{part}>") for part in parts]
    assert None not in found
    return found


WAVE = ("F0", "9F", "91", "8B")
TEXTS = [
    ("breaks", ids("a", "0A", "0A", "b"), ["a", "\n", "\n", "b"]),
    ("emoji", ids(*WAVE, *WAVE, "a"), ["", "", "", "👋", "", "", "", "👋", "a"]),
    ("accents", ids("he", "C3", "A9", "0A", "▁a"), ["he", "", "é", "\n", " a"]),
    ("stray", ids("0A", "FF", "0A", "a"), ["\n", "�", "\n", "a"]),
    ("cut", ids("a", "F0", "9F"), ["a", "", "��"]),
    ("broken", ids("a", "F0", "9F", "▁b", "0A"), ["a", "", "", "�� b", "\n"]),
]
STOPS = [
    (ids("a", "b", "0A", "c", "d"), "\n", "ab", 3),
    (ids("0A", "0A", "a", "0A", "0A", "b"), "\n\n", "", 2),
    (ids("a", "0A", "b", "0A", "0A", "c"), "\n\n", "a\nb", 5),
    (ids("a", *WAVE, *WAVE, "b"), "👋", "a", 5),
    (ids("a", *WAVE, "0A", *WAVE, "b"), "\n👋", "a👋", 10),
    (ids("he", "C3", "A9", "b"), "eé", "h", 3),
    (ids("0A", "FF", "0A", "a", "b"), "�", "\n", 2),
    (ids("E2", "82", "a", "b", "c"), "��a", "", 3),
    (ids("▁a", "0A", "▁b", "b"), "\n b", " a", 3),
]


@pytest.fixture(scope="module")
def client():
    def say(request, count):
        return (SAID["script"] + ids("a") * 99)[count]

    core = partial(FakeCore, BYTES.vocab_size, max_model_len=500, script=say)
    with serving(core=core, front=ModelAssets(BYTES, (BYTES.eos_token_id,), {})) as server, server.client() as client:
        yield client


def post(client, said, path=COMPLETIONS, **fields):
    SAID["script"] = said
    base = {"prompt": "he"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "he"}]}
    response = client.post(path, json={"max_tokens": len(said), **base, **fields})
    assert response.status_code == 200, response.text
    return response


@pytest.mark.parametrize(("said", "texts"), [one[1:] for one in TEXTS], ids=[one[0] for one in TEXTS])
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
def test_a_stream_has_each_character_with_its_last_byte(client, path, said, texts):
    fields = {"return_token_ids": True, "logprobs": 1 if path == COMPLETIONS else True}
    whole = post(client, said, path, **fields).json()["choices"][0]
    text = whole["text"] if path == COMPLETIONS else whole["message"]["content"]
    assert text == "".join(texts) and whole["token_ids"] == said
    parts = [e["choices"][0] for e in events(post(client, said, path, **fields, stream=True)) if e["choices"]]
    at, shown = 0, ""
    for part in parts:
        shown += part["text"] if path == COMPLETIONS else part["delta"].get("content", "")
        at += len(part.get("token_ids") or ())
        assert shown == "".join(texts[:at])
    assert shown == text
    if path == COMPLETIONS:
        starts = [sum(map(len, texts[:i])) for i in range(len(texts))]
        assert whole["logprobs"]["text_offset"] == starts
        assert [at for part in parts if part["logprobs"] for at in part["logprobs"]["text_offset"]] == starts


@pytest.mark.parametrize(("said", "stop", "text", "count"), STOPS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_at_the_token_that_completes_it(client, said, stop, text, count, stream):
    fields = {"stop": stop, "return_token_ids": True, "max_tokens": 40}
    if stream:
        found = events(post(client, said, stream=True, stream_options={"include_usage": True}, **fields))
        parts, usage = [event["choices"][0] for event in found[:-1]], found[-1]["usage"]
        shown, tokens = "".join(part["text"] for part in parts), [one for part in parts for one in part["token_ids"]]
        last = parts[-1]
    else:
        body = post(client, said, **fields).json()
        last, usage = body["choices"][0], body["usage"]
        shown, tokens = last["text"], last["token_ids"]
    assert (shown, tokens, usage["completion_tokens"]) == (text, said[:count], count)
    assert (last["finish_reason"], last["stop_reason"]) == ("stop", stop)
    included = post(client, said, include_stop_str_in_output=True, **fields).json()["choices"][0]["text"]
    assert included == text + stop


@pytest.mark.parametrize(
    "prompt",
    [
        *("a\nb c", "\n1 a b", "a\n\n\nb", "👋👋 a", "é\n é", "a</s>\nb"),
        *(ids("a", "0A", "FF", "C3", "A9", "b"), ids("FF", "▁a")),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_token_of_an_echo_is_where_its_offset_says(client, prompt, stream):
    said = ids("0A", "▁b", *WAVE, "a")
    fields = {"prompt": prompt, "echo": True, "logprobs": 0}
    if stream:
        parts = [event["choices"][0] for event in events(post(client, said, stream=True, **fields))]
        shown = "".join(part["text"] for part in parts)
        scored = {
            name: [one for part in parts if part["logprobs"] for one in part["logprobs"][name]]
            for name in ("tokens", "text_offset")
        }
    else:
        choice = post(client, said, **fields).json()["choices"][0]
        shown, scored = choice["text"], choice["logprobs"]
    assert shown.endswith("\n b👋a")
    places = list(zip(scored["tokens"], scored["text_offset"], strict=True))
    assert len(places) > len(said) and sorted(scored["text_offset"]) == scored["text_offset"]
    for token, at in places:
        if not token.startswith("bytes:") and token != "<s>":
            assert shown.startswith(token, at) or shown.startswith(token.lstrip(" "), at), (token, at, shown)


def test_the_text_of_ids_is_what_a_stream_of_them_says(client):
    tokens = ids("a", "0A", "FF", "C3", "A9", "b")
    assert client.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == "a\n�éb"
