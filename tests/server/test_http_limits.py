"""Headers, bodies and slow senders, on raw sockets."""

import json
import socket
import time
from contextlib import contextmanager

import pytest
from server_harness import serving

from gapless.server import limits, protocols

BODY = json.dumps({"prompt": "hi", "max_tokens": 2}).encode()
MAX_BODY = 100_000


@pytest.fixture(scope="module")
def bounded():
    with serving(max_body_bytes=MAX_BODY) as server:
        yield server


@contextmanager
def connected(server):
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        yield connection


def head(length, *lines, path="/v1/completions"):
    rows = [f"POST {path} HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {length}", *lines]
    return ("\r\n".join(rows) + "\r\n\r\n").encode()


def answer(connection):
    """(status, error body or None) of the next response."""
    with connection.makefile("rb") as stream:
        line = stream.readline()
        assert line, "the connection was closed without an answer"
        status = int(line.split()[1])
        headers = {}
        while (row := stream.readline()) not in (b"\r\n", b""):
            name, _, value = row.decode().partition(":")
            headers[name.lower()] = value.strip()
        body = json.loads(stream.read(int(headers["content-length"])))
    return status, body


def ask(server, data):
    with connected(server) as connection:
        connection.sendall(data)
        return answer(connection)


def assert_refused(reply, status, code):
    assert reply[0] == status
    assert set(reply[1]["error"]) == {"message", "type", "param", "code"}
    assert reply[1]["error"]["code"] == code


def test_connections_do_not_wait_for_acknowledgements(bounded):
    with connected(bounded) as connection:
        connection.sendall(head(len(BODY)) + BODY)
        assert answer(connection)[0] == 200

        def options():
            for open_one in bounded.front.server_state.connections:
                accepted = open_one.transport.get_extra_info("socket")
                yield accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

        assert set(bounded.run(lambda: list(options()))) == {1}


def test_the_largest_body_passes_and_one_byte_more_does_not(bounded):
    room = MAX_BODY - len(BODY)
    assert ask(bounded, head(MAX_BODY) + BODY + b" " * room)[0] == 200
    assert_refused(ask(bounded, head(MAX_BODY + 1) + BODY), 413, "body_too_large")


def test_a_chunked_body_is_counted_too(bounded):
    rows = head(0, "transfer-encoding: chunked").replace(b"content-length: 0\r\n", b"")
    with connected(bounded) as connection:
        connection.sendall(rows + b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n")
        assert answer(connection)[0] == 200
    with connected(bounded) as connection:
        connection.sendall(rows + (b"8000\r\n" + b" " * 0x8000 + b"\r\n") * 4)
        assert_refused(answer(connection), 413, "body_too_large")


@pytest.mark.parametrize("count", [limits.MAX_HEADERS - 2, 5000], ids=["many", "far too many"])
def test_too_many_small_headers_are_refused(bounded, count):
    data = head(len(BODY), *(f"x-{i}: 1" for i in range(count))) + BODY
    assert_refused(ask(bounded, data), 431, "headers_too_large")


def test_as_many_headers_as_allowed_are_taken(bounded):
    data = head(len(BODY), *(f"x-{i}: 1" for i in range(limits.MAX_HEADERS - 3))) + BODY
    assert ask(bounded, data)[0] == 200


@pytest.mark.parametrize("size", [limits.MAX_HEADER_BYTES, 200_000])
def test_one_header_that_is_too_long_is_refused(bounded, size):
    assert_refused(ask(bounded, head(len(BODY), "x-long: " + "y" * size) + BODY), 431, "headers_too_large")


def test_a_header_without_end_is_cut_off(bounded):
    with connected(bounded) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nx-long: ")
        connection.sendall(b"y" * protocols.MAX_HEAD_BYTES)
        assert_refused(answer(connection), 431, "headers_too_large")


def test_a_path_without_end_is_cut_off(bounded):
    with connected(bounded) as connection:
        connection.sendall(b"GET /" + b"y" * (protocols.MAX_HEAD_BYTES + 10))
        assert_refused(answer(connection), 431, "headers_too_large")


@pytest.mark.parametrize("data", [b"hello\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\r\n"])
def test_bytes_that_are_not_http_are_refused(bounded, data):
    assert_refused(ask(bounded, data), 400, "invalid_http")


def test_an_encoded_body_is_not_opened(bounded):
    assert_refused(ask(bounded, head(len(BODY), "content-encoding: gzip") + BODY), 415, "unsupported_encoding")


@pytest.mark.process
def test_headers_that_come_too_slowly_are_refused(bounded, monkeypatch):
    monkeypatch.setattr(protocols, "HEAD_SECONDS", 0.3)
    with connected(bounded) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\n")
        assert_refused(answer(connection), 408, "header_timeout")
    with connected(bounded) as connection:  # not a byte
        assert_refused(answer(connection), 408, "header_timeout")


@pytest.mark.process
def test_a_slow_second_request_on_one_connection_has_its_own_time(bounded, monkeypatch):
    monkeypatch.setattr(protocols, "HEAD_SECONDS", 0.3)
    with connected(bounded) as connection:
        connection.sendall(head(len(BODY)) + BODY)
        assert answer(connection)[0] == 200
        time.sleep(0.5)  # idle between requests is another matter, and allowed
        connection.sendall(head(len(BODY)) + BODY)
        assert answer(connection)[0] == 200
        connection.sendall(b"GET /he")
        assert_refused(answer(connection), 408, "header_timeout")


@pytest.mark.process
def test_a_body_that_comes_too_slowly_is_refused(monkeypatch):
    monkeypatch.setattr(limits, "BODY_SECONDS", 0.3)
    with serving() as server, connected(server) as connection:
        connection.sendall(head(len(BODY)) + BODY[:5])
        assert_refused(answer(connection), 408, "body_timeout")


def test_others_are_served_while_many_are_slow(bounded):
    slow = [socket.create_connection(("127.0.0.1", bounded.port)) for _ in range(100)]
    try:
        for connection in slow:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        assert ask(bounded, head(len(BODY)) + BODY)[0] == 200
    finally:
        for connection in slow:
            connection.close()


def test_two_requests_at_once_on_one_connection_are_both_answered(bounded):
    with connected(bounded) as connection:
        connection.sendall((head(len(BODY)) + BODY) * 2)
        data = b""
        while data.count(b'"usage"') < 2:
            data += connection.recv(4096) or pytest.fail("the connection was closed")
        assert data.count(b"HTTP/1.1 200") == 2
