"""Streams that stay open: headers for proxies, signs of life while nothing else is sent, and events of N tokens."""

import json
import threading

import pytest
from server_harness import ALPHABET, TOKENS, VOCAB, error_of, events, serving

from gapless.testing.core import FakeCore

HI = [{"role": "user", "content": "hi"}]
ASKED = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 4, "stream": True},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 4, "stream": True},
    "/v1/messages": {"model": "tiny", "messages": HI, "max_tokens": 4, "stream": True},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4, "stream": True},
}


class Gate:
    """Holds a core before the token `first` of every request."""

    def __init__(self):
        self.open = threading.Event()
        self.first = 0

    def token(self, request, count):
        if count >= self.first:
            self.open.wait(20)
        return TOKENS.encode(ALPHABET[count % 26])[0]


@pytest.fixture(scope="module")
def gate():
    return Gate()


def gated(gate, **settings):
    return serving(core=lambda: FakeCore(VOCAB, script=gate.token), **settings)


@pytest.fixture(scope="module")
def slow(gate):
    with gated(gate, sse_ping_interval=0.05) as server, server.client() as client:
        yield client


def text_of(data):
    """The text of a stream in any of the four forms."""
    for line in data.splitlines():
        if not line.startswith("data: {"):
            continue
        event = json.loads(line[6:])
        if event.get("type") in ("content_block_delta", "response.output_text.delta"):
            yield event["delta"] if isinstance(event["delta"], str) else event["delta"]["text"]
        for choice in event.get("choices", ()):
            yield choice.get("text") or choice.get("delta", {}).get("content") or ""


@pytest.mark.parametrize("path", ASKED)
def test_streams_ask_proxies_to_hold_nothing_back(client, path):
    headers = client.post(path, json=ASKED[path]).headers
    assert (headers["x-accel-buffering"], headers["cache-control"]) == ("no", "no-cache")


@pytest.mark.parametrize("first", [0, 2])
@pytest.mark.parametrize("path", ASKED)
def test_a_silent_stream_shows_life_and_then_its_text(gate, slow, path, first):
    gate.open.clear()
    gate.first = first
    sign = "event: ping" if first and path == "/v1/messages" else ": keep-alive"
    with slow.stream("POST", path, json=ASKED[path]) as response:
        pieces, seen = response.iter_text(), ""
        while seen.count(sign) < 2:
            seen += next(pieces)
        gate.open.set()
        seen += "".join(pieces)
    assert "".join(text_of(seen)) == "abcd"


def test_a_stream_that_fails_after_a_sign_of_life_says_so_in_an_event(gate, slow):
    gate.open.clear()
    gate.first = 0
    limit = {"x-request-timeout": "0.3"}
    with slow.stream("POST", "/v1/completions", json=ASKED["/v1/completions"], headers=limit) as response:
        seen = "".join(response.iter_text())
    gate.open.set()
    assert response.status_code == 200 and seen.startswith(": keep-alive") and '"code":"timeout"' in seen


@pytest.mark.process
def test_a_stream_without_an_interval_stays_silent_and_keeps_its_status(gate):
    gate.open.clear()
    gate.first = 0
    with gated(gate, sse_ping_interval=-1) as server, server.client() as client:
        limit = {"x-request-timeout": "0.3"}
        response = client.post("/v1/completions", json=ASKED["/v1/completions"], headers=limit)
        gate.open.set()
    assert response.status_code == 408 and error_of(response)["code"] == "timeout"


# Tokens of an event


@pytest.fixture(scope="module", params=[1, 3])
def interval(request):
    with serving(stream_interval=request.param) as server, server.client() as client:
        yield request.param, client


def counts(found):
    return [len(choice["token_ids"]) for event in found for choice in event["choices"] if choice.get("token_ids")]


@pytest.mark.parametrize("more", [{}, {"logprobs": 1}, {"stop": ["kl"]}, {"n": 2}])
def test_an_event_has_as_many_tokens_as_the_interval_allows(interval, more):
    """A core this fast has many tokens ready before the first is out."""
    most, client = interval
    fields = {"prompt": "hi", "max_tokens": 20, "stream": True, "return_token_ids": True, **more}
    found = events(client.post("/v1/completions", json=fields))
    sizes = counts(found)
    tokens = 12 if "stop" in more else 20
    assert sum(sizes) == tokens * more.get("n", 1) and max(sizes) <= most
    assert len(sizes) >= tokens // most
    for index in range(more.get("n", 1)):
        mine = [choice for event in found for choice in event["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in mine) == ALPHABET[: 10 if "stop" in more else 20]
        if most == 1 and "stop" not in more:
            assert [choice["text"] for choice in mine if choice["token_ids"]] == list(ALPHABET[:20])
        if "logprobs" in more:
            assert sum(len(choice["logprobs"]["tokens"]) for choice in mine) == 20


@pytest.mark.process
def test_tokens_wait_for_the_interval_but_for_the_first_and_the_end(gate):
    gate.open.set()
    with gated(gate, stream_interval=4) as server, server.client() as client:
        fields = {"prompt": "~", "max_tokens": 30, "stream": True, "return_token_ids": True}
        sizes = counts(events(client.post("/v1/completions", json=fields)))
    assert sum(sizes) == 30 and max(sizes) <= 4 and len(sizes) <= 30 // 4 + 8
