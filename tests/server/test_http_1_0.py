"""Clients of HTTP/1.0 get bodies without chunks, which end with the connection (RFC 9112, 6.1 and 6.3)."""

import json
import re
import socket
from collections import defaultdict

import pytest
from server_harness import serving
from sharpest import sharpest

MESSAGES = [{"role": "user", "content": "hi"}]
REQUESTS = [
    ("/v1/completions", {"prompt": "hi", "max_tokens": 3, "stream": True}),
    ("/v1/completions", {"prompt": ["hi", "a"], "max_tokens": 3, "stream": True, "logprobs": 1, "n": 2}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 3}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 3, "stream": True}),
    ("/v1/responses", {"input": "hi", "max_output_tokens": 16, "stream": True}),
    ("/v1/messages", {"model": "tiny", "messages": MESSAGES, "max_tokens": 3, "stream": True}),
    ("/v1/completions", {"prompt": "hi", "max_tokens": 0, "stream": True}),
    ("/metrics", None),
    ("/nowhere", None),
    ("/ui", None),
    ("/v1/models", None),
]


@pytest.fixture(scope="module")
def alone():
    with serving() as server:
        yield server


def asked(server, version, path, body, *headers, method=None):
    """(head, body) as they come before the end of the connection."""
    data = b"" if body is None else json.dumps(body).encode()
    verb = method or ("GET" if body is None else "POST")
    lines = [f"{verb} {path} HTTP/{version}", "Host: 127.0.0.1", *headers]
    lines += ["Content-Type: application/json", f"Content-Length: {len(data)}"] * (body is not None)
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as link:
        link.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + data)
        head, _, rest = link.makefile("rb").read().partition(b"\r\n\r\n")
    return head.decode().lower(), rest


def steady(data):
    """What two answers to equal requests have in common: their texts, by choice, however they were cut into events."""
    texts = defaultdict(str)
    for event in data.decode().split("\n\n"):
        choice = re.search(r'"index":(\d+)', event)
        texts[choice and choice[1]] += "".join(re.findall(r'"(?:text|content|delta|message)":"(.*?)"', event))
    return texts


@pytest.mark.parametrize(
    "connection", ["", "Connection: keep-alive", *sharpest(["Connection: close", "Expect: 100-continue"], keep=0)]
)
@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=lambda one: str(one)[:40])
def test_an_answer_has_no_chunks_and_ends_with_the_connection(alone, path, body, connection):
    head, data = asked(alone, "1.0", path, body, *filter(None, [connection]))
    assert "transfer-encoding" not in head and "\r\nconnection: close" in head
    sized = re.search(r"content-length: (\d+)", head)
    assert sized is None or int(sized[1]) == len(data)
    newer, chunked = asked(alone, "1.1", path, body, "Connection: close")
    assert head.split()[1] == newer.split()[1]
    if "transfer-encoding: chunked" in newer:
        assert sized is None and data.startswith((b"data: ", b"event: "))
        chunked = b"".join(chunks(chunked))
    if path != "/metrics":
        assert steady(data) == steady(chunked)


def chunks(data):
    while data:
        size, _, rest = data.partition(b"\r\n")
        yield rest[: int(size, 16)]
        data = rest[int(size, 16) + 2 :]


def test_a_head_alone_has_no_body(alone):
    head, data = asked(alone, "1.0", "/metrics", None, method="HEAD")
    assert head.split()[1] == "200" and data == b""
