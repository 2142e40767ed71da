"""What an answer costs beyond its tokens: calls to the system, and work for the garbage collector."""

import gc
import socket

import pytest
from server_harness import COMPLETIONS, posted, serving
from sharpest import sharpest

CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
TEXT = ("/v1/completions", {"prompt": "hi"})
MESSAGES = ("/v1/messages", {"model": "tiny", **CHAT[1]})


OURS = ("gapless", "uvicorn", "starlette")


def left_by(path, body, headers, status):
    """The types of our objects that three requests leave to the garbage collector."""
    with serving() as server, server.client() as client:

        def ask():
            assert client.post(path, json=body, headers=headers).status_code == status

        ask()
        server.run(gc.collect)
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            for _ in range(3):
                ask()
            server.until(lambda: server.state.open == 0)
            server.run(gc.collect)
            return {type(each).__qualname__ for each in gc.garbage if type(each).__module__.startswith(OURS)}
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()


@pytest.mark.parametrize(("path", "body"), sharpest([CHAT, TEXT, MESSAGES]), ids=["chat", "text", "messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_leaves_no_cycles(path, body, stream):
    """Memory in a cycle waits for the garbage collector, which then holds up everybody's tokens."""
    assert left_by(path, {**body, "max_tokens": 5, "stream": stream}, {}, 200) == set()


LATE = {"x-request-timeout": "0.0001"}
REFUSED = {
    "no such model": ({"model": "other"}, {}, 404),
    "out of time": ({"max_tokens": 5}, LATE, 408),
    "out of time, streamed": ({"max_tokens": 5, "stream": True}, LATE, 408),
    "wrong field": ({"temperature": -1}, {}, 400),
}


@pytest.mark.parametrize(("body", "headers", "status"), sharpest(REFUSED.values(), keep=2), ids=REFUSED)
def test_a_refusal_leaves_no_cycles(body, headers, status):
    """A request's body, of megabytes perhaps, would wait for the garbage collector with it."""
    path, plain = TEXT
    assert left_by(path, {**plain, **body}, headers, status) == set()


class Noting:
    """A transport that notes what is written to another."""

    def __init__(self, transport):
        self._transport = transport
        self.writes = []

    def write(self, data):
        self.writes.append(bytes(data))
        self._transport.write(data)

    def __getattr__(self, name):
        return getattr(self._transport, name)


def writes_of(server, tokens, *head):
    """The writes of a streamed answer, and whether the connection was closed after it."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        known = server.front.server_state.connections
        server.until(lambda: len(known) == 1)
        (protocol,) = known
        noting = protocol.transport = Noting(protocol.transport)
        connection.sendall(posted(COMPLETIONS, {"prompt": "~", "max_tokens": tokens, "stream": True}, *head))
        data = b""
        while not data.endswith(b"\r\n0\r\n\r\n"):
            data += connection.recv(65536)
        closed = bool(head) and connection.recv(1) == b""
    server.until(lambda: not known)
    return noting.writes, closed


def test_the_end_costs_no_write_of_its_own():
    with serving() as server:
        # On a busy machine several tokens may be one event.
        head, first, *rest = writes_of(server, 6)[0]
        last = rest[-1] if rest else first
        assert head.startswith(b"HTTP/1.1 200 ") and b'"text":"a' in first
        assert b'"finish_reason":"length"' in last and b"data: [DONE]" in last and last.endswith(b"\r\n0\r\n\r\n")


def test_a_connection_that_ends_with_its_answer_is_closed_after_it():
    with serving() as server:
        (_, whole), closed = writes_of(server, 1, "connection: close")
        assert whole.endswith(b"\r\n0\r\n\r\n") and closed
