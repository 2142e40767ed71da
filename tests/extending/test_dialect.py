"""A dialect outside the package: one file and an entry point, served to a plain HTTP client, streamed and whole."""

import json
import os
import re
import sys
from pathlib import Path

import httpx
import pytest
from extending.installed import TOYS, install
from served import Server

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from server_harness import serving

from gapless.base.errors import ConfigError

ROUTE, KEY = "/api/generate", {"authorization": "Bearer k"}
FAULTY = """
from dialect import DIALECT, Access
(ROUTE,) = DIALECT.routes
OPEN = DIALECT._replace(routes=(ROUTE._replace(access=Access.PUBLIC),))
TAKEN = DIALECT._replace(routes=(ROUTE._replace(path="/v1/completions"),))
"""


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    points = {"ollama": "dialect:DIALECT", "broken": "no_such_module:DIALECT", "wrong": "dialect:Lines"}
    install(tmp_path, "gapless.dialects", **points, open="faulty_dialects:OPEN", taken="faulty_dialects:TAKEN")
    (tmp_path / "faulty_dialects.py").write_text(FAULTY)
    for path in (TOYS, tmp_path):
        monkeypatch.syspath_prepend(str(path))
    yield os.pathsep.join([str(TOYS), str(tmp_path)])
    for name in ("dialect", "faulty_dialects"):
        sys.modules.pop(name, None)


def lines_of(response):
    assert response.headers["content-type"] == "application/x-ndjson", response.text
    return [json.loads(line) for line in response.text.splitlines()]


def test_a_dialect_answers_streamed_and_whole_with_the_same_text():
    with serving(dialects=("ollama",)) as server, server.client() as client:
        asked = {"prompt": "hi", "options": {"num_predict": 5}}
        *parts, end = lines_of(client.post(ROUTE, json=asked))
        whole = client.post(ROUTE, json={**asked, "stream": False}).json()
        assert "".join(part["response"] for part in parts) == whole["response"] == "abcde"
        counts = {"prompt_eval_count": 2, "eval_count": 5}
        assert end == {"model": "tiny", "response": "", "done": True, "done_reason": "length", **counts}
        assert whole == {**end, "response": "abcde"}


def test_a_dialect_has_the_limits_the_keys_and_the_description_of_every_route():
    with serving(dialects=("ollama",), api_key=("k",), max_body_bytes=200) as server, server.client() as client:
        refused = [
            (401, client.post(ROUTE, json={"prompt": "hi"})),
            (413, client.post(ROUTE, json={"prompt": "x" * 300}, headers=KEY)),
            (400, client.post(ROUTE, json={"prompt": "x", "options": {"temperature": -1}}, headers=KEY)),
            (400, client.post(ROUTE, json={"prompt": 3}, headers=KEY)),
            (404, client.post("/api/chat", headers=KEY)),
            (405, client.get(ROUTE, headers=KEY)),
        ]
        for status, response in refused:
            assert response.status_code == status and list(response.json()) == ["error"], response.text
        assert "temperature" in refused[2][1].json()["error"]
        described = client.get("/openapi.json").json()["paths"][ROUTE]["post"]
        assert described["summary"] == "Continue a prompt" and described["security"] == [{"key": []}]
        assert f"POST {ROUTE}" in client.get("/docs").text


def test_a_dialect_is_served_only_if_it_is_named():
    with serving() as server, server.client() as client:
        assert client.post(ROUTE, json={"prompt": "hi"}).status_code == 404
    assert "dialect" not in sys.modules


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("other", "'other' is not installed; entry points of gapless.dialects: broken, ollama, open, taken, wrong"),
        ("broken", "cannot be imported: No module named 'no_such_module'"),
        ("wrong", "must be a gapless.server.endpoint.Dialect, got type"),
        ("open", "open opens /api/generate to all: its access must be USER or OPERATOR"),
        ("taken", "taken has the route /v1/completions, which is taken: leave one out"),
    ],
)
def test_a_dialect_that_cannot_be_used_is_refused_at_the_start(name, fault):
    with pytest.raises(ConfigError, match=re.escape(fault)), serving(dialects=(name,)):
        pass


@pytest.mark.process
def test_gapless_serve_answers_in_a_dialect_that_a_flag_names(package, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])))
    server = Server("demo", "--device", "cpu", "--dialects", "ollama")
    try:
        asked = {"prompt": "12 + 30 =", "options": {"num_predict": 8, "temperature": 0}}
        *parts, end = lines_of(httpx.post(server.base + ROUTE, json=asked, timeout=60))
        whole = httpx.post(server.base + ROUTE, json={**asked, "stream": False}, timeout=60).json()
    finally:
        assert server.stop() == 0
    assert end["done"] and "".join(part["response"] for part in parts) == whole["response"] != ""
