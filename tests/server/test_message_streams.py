"""Streams of messages before their first block, and where their conversations are converted."""

import json
import threading

import pytest
from server_harness import TOKENS, serving

from gapless.server.dialects.messages import answer
from gapless.server.dialects.messages.request import CountTokensRequest
from gapless.testing.core import FakeCore

THOUGHT, ANSWER = "<think>Let me see.</think>", "Forty-two."
BODY = {
    "model": "tiny",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "hi"}],
    "thinking": {"type": "adaptive", "display": "omitted"},
}


class Thinker:
    """Speaks a hidden thought and an answer; in the middle of a thought it waits for `go_on`."""

    def __init__(self):
        self.go_on = threading.Event()
        self.in_time = None

    def core(self):
        return FakeCore(TOKENS.vocab_size, script=self._speak)

    def _speak(self, request, count):
        if count == len(THOUGHT) // 2:
            self.in_time = self.go_on.wait(60)
        ids = [*TOKENS.encode(THOUGHT + ANSWER), TOKENS.eos_token_id]
        return ids[min(count, len(ids) - 1)]


@pytest.fixture
def thinker():
    return Thinker()


@pytest.fixture
def server(thinker):
    with serving(reasoning_parser="think", core=thinker.core) as running:
        yield running


@pytest.mark.parametrize("seconds", [1000.0, 0.0])
def test_a_hidden_thought_is_streamed_as_pings(server, thinker, monkeypatch, seconds):
    monkeypatch.setattr(answer, "PING_SECONDS", seconds)
    with server.client() as client, client.stream("POST", "/v1/messages", json={**BODY, "stream": True}) as response:
        lines = response.iter_lines()
        assert next(lines) == "event: message_start"
        assert json.loads(next(lines).removeprefix("data: "))["message"]["content"] == []
        assert [next(lines) for _ in range(2)] == ["", "event: ping"]
        thinker.go_on.set()
        silent, begun, rest = "\n".join(lines).partition("event: content_block_start")
    assert thinker.in_time, "nothing came before the thought went on"
    assert ("event: ping" in silent) == (seconds == 0.0)
    assert begun and "thinking_delta" not in rest


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
def test_a_conversation_is_converted_beside_the_event_loop(server, thinker, monkeypatch, path):
    thinker.go_on.set()
    convert, threads = CountTokensRequest.chat, []

    def noted(request, **sampling):
        threads.append(threading.get_ident())
        return convert(request, **sampling)

    monkeypatch.setattr(CountTokensRequest, "chat", noted)
    with server.client() as client:
        assert client.post(path, json=BODY).status_code == 200
    assert len(threads) == 1 and server.run(threading.get_ident) not in threads
