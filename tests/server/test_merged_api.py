"""Streams whose steps reach the server several at a time hold what streams of single steps hold."""

import pytest
from merging import together
from server_harness import events, fake_core, serving
from sharpest import sharpest

CHAT = {"messages": [{"role": "user", "content": "hello"}]}
TEXT = {"prompt": "hi", "return_token_ids": True}


@pytest.fixture(scope="module", params=sharpest([7, 2, 30]))
def merged(request):
    with serving(core=lambda: together(fake_core(), request.param)) as server, server.client() as client:
        yield client


def streamed(client, fields):
    """Text, tokens, log-probabilities and ends of each choice."""
    path = "chat/completions" if "messages" in fields else "completions"
    response = client.post(f"/v1/{path}", json={"model": "tiny", "stream": True, **fields})
    parts = [event["choices"][0] for event in events(response) if event["choices"]]
    found = {}
    for part in parts:
        text, tokens, logprobs, ends = found.setdefault(part["index"], ([], [], [], []))
        text.append(part["text"] if "text" in part else part["delta"].get("content", ""))
        tokens += part.get("token_ids") or ()
        logprobs += lines(part["logprobs"])
        ends += [(part["finish_reason"], part["stop_reason"])] if part["finish_reason"] else []
    return {index: ("".join(text), *rest) for index, (text, *rest) in found.items()}


def lines(logprobs):
    """One item a token."""
    if not logprobs:
        return []
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return logprobs.get("content") or list(zip(*(logprobs[name] for name in names), strict=True))


@pytest.mark.parametrize(
    ("fields", "text", "tokens", "end"),
    [
        ({"max_tokens": 30}, "abcdefghijklmnopqrstuvwxyzabcd", 30, ("length", None)),
        ({"max_tokens": 30, "stop": ["ijkl"]}, "abcdefgh", 12, ("stop", "ijkl")),
        ({"max_tokens": 30, "stop": "hij", "include_stop_str_in_output": True}, "abcdefghij", 10, ("stop", "hij")),
        ({"prompt": "$"}, "abc", 4, ("stop", None)),
        ({"prompt": "+", "max_tokens": 9, "stop": "öü"}, "ä", 6, ("stop", "öü")),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_of_merged_steps(client, merged, n, fields, text, tokens, end):
    for more in ({**CHAT, "logprobs": True, "top_logprobs": 2}, {**TEXT, "logprobs": 2}, CHAT, TEXT):
        if "prompt" in fields and more.get("messages"):
            continue
        asked = {**more, **fields, "n": n}
        one, several = streamed(client, asked), streamed(merged, asked)
        assert one == several and sorted(several) == list(range(n))
        for shown, ids, logprobs, ends in several.values():
            assert (shown, ends) == (text, [end])
            assert len(ids) == tokens * ("prompt" in more) and len(logprobs) == tokens * bool(more.get("logprobs"))
