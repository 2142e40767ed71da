"""The short way of streamed tokens: one event a token, in order, whatever the connection can take."""

import json
import random
import socket

import pytest
from server_harness import ALPHABET, COMPLETIONS, events, fake_core, posted, serving

from gapless.server import answer
from gapless.server.answer import DirectBody


@pytest.fixture(scope="module")
def server():
    with serving(core=lambda: fake_core(max_model_len=100_000)) as running:
        yield running


def alphabet(count):
    return (ALPHABET * (count // 26 + 1))[:count]


def stream(server, count, **fields):
    with server.client() as client:
        body = {"prompt": "hi", "max_tokens": count, "stream": True, **fields}
        return events(client.post("/v1/completions", json=body))


def texts(found):
    return [event["choices"][0]["text"] for event in found]


def test_a_token_is_an_event_also_when_the_front_is_behind(server):
    """A core this fast has hundreds of tokens ready before the first is out."""
    found = texts(stream(server, 500))
    assert "".join(found) == alphabet(500)
    # Those that were there before the stream began come with the first, and the last one with the end.
    assert set(map(len, found[1:-1])) == {1}


@pytest.mark.parametrize("seed", range(2))
def test_tokens_keep_their_order_when_ways_change(server, monkeypatch, seed):
    rng = random.Random(seed)
    takes, taken = DirectBody.takes, []

    def moody(body):
        taken.append(takes(body) and rng.random() < 0.5)
        return taken[-1]

    monkeypatch.setattr(DirectBody, "takes", moody)
    assert "".join(texts(stream(server, 200, prompt="~"))) == alphabet(200)
    assert True in taken and False in taken


def tight(server):
    """A connection that holds little, and the server's side of it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.settimeout(20)
    connection.connect(("127.0.0.1", server.port))
    address = connection.getsockname()

    def side():
        known = server.front.server_state.connections
        return next((each for each in known if each.transport.get_extra_info("peername") == address), None)

    server.until(lambda: server.run(side) is not None)
    protocol = server.run(side)
    protocol.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return connection, protocol


def ask(connection, tokens):
    connection.sendall(posted(COMPLETIONS, {"prompt": "hi", "max_tokens": tokens, "stream": True}))


def test_a_client_that_reads_late_gets_everything(server):
    connection, protocol = tight(server)
    ask(connection, 3000)
    server.until(lambda: protocol.flow.write_paused)
    data = b""
    while not data.endswith(b"\r\n0\r\n\r\n"):
        data += connection.recv(65536)
    found = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
    assert "".join(texts(found)) == alphabet(3000)
    connection.close()


def test_a_client_that_never_reads_is_given_up(server, monkeypatch):
    monkeypatch.setattr(answer, "WRITE_SECONDS", 0.2)
    connection, protocol = tight(server)
    aborted = len(server.core.aborted)
    ask(connection, 90_000)
    server.until(lambda: protocol.flow.write_paused)
    server.until(lambda: len(server.core.aborted) > aborted)
    connection.close()
