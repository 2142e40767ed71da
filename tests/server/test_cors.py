"""A page of an allowed origin can read every answer: the errors, and what is answered before there is a route."""

import asyncio
import json
import socket
import threading

import httpx
import pytest
from message_events import error_of as message_error_of
from server_harness import COMPLETIONS, error_of, fake_core, serving
from sharpest import sharpest

from gapless.server import protocols
from gapless.server.config import ServerConfig
from gapless.server.router import PairRouter

ORIGIN = "https://app.example"
KEY = {"authorization": "Bearer k"}
ASK = {"prompt": "hi", "max_tokens": 1}
MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")
SAID = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
MANY = {f"x-{number}": "1" for number in range(120)}
ANSWERS = [
    (200, "POST", COMPLETIONS, {"json": ASK}),
    (200, "POST", COMPLETIONS, {"json": ASK | {"stream": True}}),
    (200, "GET", "/health", {}),
    (200, "GET", "/metrics", {}),
    (400, "POST", COMPLETIONS, {"json": ASK | {"n": 0}}),
    (400, "POST", COMPLETIONS, {"content": b"{"}),
    (401, "POST", COMPLETIONS, {"json": ASK, "headers": {"authorization": "Bearer other"}}),
    (401, "GET", "/v1/models", {"headers": {"authorization": ""}}),
    (404, "POST", COMPLETIONS, {"json": ASK | {"model": "other"}}),
    (404, "GET", "/nowhere", {}),
    (404, "POST", "/v1/messages/nowhere", {"json": {}}),
    (405, "GET", COMPLETIONS, {}),
    (405, "OPTIONS", COMPLETIONS, {}),
    (413, "POST", COMPLETIONS, {"json": ASK | {"user": "x" * 3000}}),
    (413, "POST", COMPLETIONS, {"content": iter([])}),
    (415, "POST", COMPLETIONS, {"content": b"a", "headers": {"content-encoding": "gzip"}}),
    (415, "POST", COMPLETIONS, {"content": b"a", "headers": {"content-type": "text/plain"}}),
    (431, "GET", "/health", {"headers": MANY}),
    (500, "POST", COMPLETIONS, {"json": ASK | {"prompt": "!", "max_tokens": 5}}),
    *((405, "GET", path, {}) for path in MESSAGES),
    (404, "POST", "/v1/messages/batches", {"json": {}}),
    (404, "GET", "/v1/messages/", {}),
    *((400, "POST", path, {"content": b"{"}) for path in MESSAGES),
    *((401, "POST", path, {"json": SAID, "headers": {"authorization": "Bearer other"}}) for path in MESSAGES),
    *((404, "POST", path, {"json": SAID | {"model": "other"}}) for path in MESSAGES),
    *((413, "POST", path, {"content": b"x" * 3000}) for path in MESSAGES),
    *((413, "POST", path, {"content": iter([])}) for path in MESSAGES),
    *((415, "POST", path, {"content": b"{}", "headers": {"content-type": "text/plain"}}) for path in MESSAGES),
    *((415, "POST", path, {"json": SAID, "headers": {"content-encoding": "gzip"}}) for path in MESSAGES),
    *((431, "POST", path, {"json": SAID, "headers": MANY}) for path in MESSAGES),
    (500, "POST", MESSAGES[0], {"json": SAID | {"messages": [{"role": "user", "content": "!"}]}}),
]
KINDS = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 500: "api_error"}
"""The types of Anthropic's errors; of any other status it is a request that is invalid."""


def allowing(*origins, key=(), **more):
    return ServerConfig(port=0, allowed_origins=origins, api_key=key, max_body_bytes=2500, **more)


@pytest.fixture(scope="module", params=["k", pytest.param("", marks=pytest.mark.seeds)], ids=["keyed", "open"])
def keyed(request):
    key = (request.param,) if request.param else ()
    with serving(allowing(ORIGIN, key=key)) as server, server.client() as client:
        yield client, key


def assert_formed(response, path, status):
    """An error below /v1/messages has Anthropic's form, and any other OpenAI's."""
    if path.startswith("/v1/messages"):
        message = message_error_of(response, KINDS.get(status, "invalid_request_error"))
    else:
        message = error_of(response)["message"]
    assert status != 500 or "incident" in message
    assert response.headers.get("allow") == ("POST" if status == 405 else None)


def sent(client, method, path, options, origin=ORIGIN):
    headers = {**KEY, "content-type": "application/json", **options.get("headers", {}), "origin": origin}
    content = options.get("content")
    if content is not None and not isinstance(content, bytes):
        content = iter([b"x" * 2000, b"x" * 2000])
    return client.request(method, path, headers=headers, content=content, json=options.get("json"))


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda one: f"{one[0]} {one[1]} {one[2]}")
def test_an_answer_of_any_status_names_the_origin(keyed, answer):
    client, key = keyed
    status, *request = answer
    response = sent(client, *request)
    assert response.status_code == (status if key or status != 401 else 200)
    if response.status_code >= 400:
        assert_formed(response, request[1], status)
    assert response.headers.get_list("access-control-allow-origin") == [ORIGIN]
    assert "origin" in response.headers["vary"].lower()
    assert "access-control-allow-origin" not in sent(client, *request, origin="https://b.example").headers


@pytest.mark.parametrize("more", [{}, {"content-length": "0"}, MANY])
def test_a_preflight_needs_no_key_and_has_no_limits(keyed, more):
    client, _ = keyed
    asked = {"origin": ORIGIN, "access-control-request-method": "POST", "access-control-request-headers": "x-a"}
    response = client.options(COMPLETIONS, headers=asked | more)
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, ORIGIN)
    assert response.headers["access-control-allow-headers"] == "x-a"
    assert client.options(COMPLETIONS, headers=asked | {"origin": "https://b.example"}).status_code == 400


def test_answers_of_a_server_that_loads_or_is_full_name_the_origin():
    go = threading.Event()
    options = dict(max_num_seqs=1, max_queue=0)
    core = lambda: go.wait(20) and fake_core(**options)  # noqa: E731
    with serving(allowing(ORIGIN), core=core, wait=False) as server, server.client() as client:
        loading = [sent(client, "GET", "/health", {}), sent(client, "POST", COMPLETIONS, {"json": ASK})]
        go.set()
        server.until(lambda: client.get("/health").status_code == 200)
        full = [sent(client, "POST", COMPLETIONS, {"json": ASK})]
    for response in loading + full:
        assert (response.status_code, response.headers["access-control-allow-origin"]) == (503, ORIGIN)


RAW = [
    (431, b"GET /health HTTP/1.1\r\norigin: %b\r\nx-long: " + b"y" * 60_000),
    (400, b"GET /health HTTP/1.1\r\norigin: %b\r\nx-good: 1\r\nbad header\x00: 1\r\n\r\n"),
    (408, b"GET /health HTTP/1.1\r\norigin: %b\r\nx-slow: 1\r\n"),
]


@pytest.mark.parametrize(("status", "data"), RAW, ids=[str(status) for status, _ in RAW])
@pytest.mark.parametrize("allowed", sharpest([ORIGIN, "*"]))
def test_an_answer_before_the_end_of_the_headers_names_the_origin(monkeypatch, allowed, status, data):
    monkeypatch.setattr(protocols, "HEAD_SECONDS", 0.2 if status == 408 else 60.0)
    with serving(allowing(allowed)) as server:
        for origin in (ORIGIN, "https://b.example"):
            with socket.create_connection(("127.0.0.1", server.port), timeout=20) as link:
                link.sendall(data.replace(b"%b", origin.encode()))
                head = link.makefile("rb").read().partition(b"\r\n\r\n")[0].decode().lower()
            named = f"access-control-allow-origin: {allowed}" in head
            assert (int(head.split()[1]), named) == (status, allowed in ("*", origin)), head


@pytest.mark.parametrize(
    ("status", "path"), [(404, "/nowhere"), (503, "/health"), (503, COMPLETIONS), (413, COMPLETIONS)]
)
def test_answers_of_the_router_itself_name_the_origin(tmp_path, status, path):
    app = PairRouter(str(tmp_path / "p"), str(tmp_path / "d"), str(tmp_path / "kv"), allowing(ORIGIN))

    async def asked():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            body = json.dumps(ASK | {"user": "x" * (3000 if status == 413 else 1)})
            return await client.request("POST", path, content=body, headers={"origin": ORIGIN})

    response = asyncio.run(asked())
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (status, ORIGIN)
