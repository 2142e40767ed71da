"""Errors below /v1/messages have Anthropic's form and the name of their request, whatever made them."""

import pytest
from message_events import error_of
from server_harness import serving

from gapless.server.config import ServerConfig
from gapless.server.errors import ApiError, error_response
from gapless.server.limits import MAX_HEADERS

KEY = {"x-api-key": "a-key"}
BODY = {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
LONG = b"x" * 3000
MANY = {f"x-{i}": "1" for i in range(MAX_HEADERS)}
LOST = {**BODY, "messages": [{"role": "user", "content": "!"}]}
INVALID = "invalid_request_error"
BELOW = ("/v1/messages", "/v1/messages/count_tokens")


@pytest.fixture(scope="module")
def client():
    config = ServerConfig(port=0, api_key=("a-key",), max_body_bytes=2000, disable_uvicorn_access_log=True)
    with serving(config) as server, server.client() as client:
        yield client


@pytest.mark.parametrize("path", BELOW)
@pytest.mark.parametrize(
    ("status", "kind", "asked"),
    [
        (400, INVALID, {"content": b"{"}),
        (401, "authentication_error", {"json": BODY, "headers": {"x-api-key": "another"}}),
        (404, "not_found_error", {"json": {**BODY, "model": "another"}}),
        (413, "request_too_large", {"content": LONG}),
        (413, "request_too_large", {"content": [LONG]}),
        (415, INVALID, {"content": b"{}", "headers": {**KEY, "content-type": "text/plain"}}),
        (415, INVALID, {"json": BODY, "headers": {**KEY, "content-encoding": "gzip"}}),
        (431, INVALID, {"json": BODY, "headers": {**KEY, **MANY}}),
    ],
)
def test_errors_of_a_request_have_the_form_of_anthropic(client, path, status, kind, asked):
    response = client.post(path, **{"headers": KEY, **asked})
    assert response.status_code == status, response.text
    assert error_of(response, kind)


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, INVALID),
        ("GET", "/v1/messages/count_tokens", 405, INVALID),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages/", 404, "not_found_error"),
    ],
)
def test_routes_that_are_not_there_are_refused_in_the_form_of_anthropic(client, method, path, status, kind):
    response = client.request(method, path)
    assert response.status_code == status
    assert error_of(response, kind)
    assert response.headers.get("allow") == ("POST" if status == 405 else None)


def test_an_engine_that_fails_and_a_server_that_stops_answer_in_the_form_of_anthropic():
    with serving() as server, server.client() as client:
        response = client.post("/v1/messages", json=LOST)
        assert response.status_code == 500 and "incident" in error_of(response, "api_error")
        server.state.stopping = True
        response = client.post("/v1/messages", json=BODY)
        assert response.status_code == 503 and response.headers["retry-after"]
        error_of(response, "api_error")


@pytest.mark.parametrize("path", ["/v1/messagesx", "/v1/messages-of-others", "/v2/messages", "/v1/models"])
def test_errors_of_other_paths_have_the_form_of_openai(path):
    error = ApiError(404, "no")
    assert error_response(error, {"path": path, "headers": []}).body == error.encode()
