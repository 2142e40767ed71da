"""A dialect outside the package: one file and an entry point, served to a plain HTTP client, streamed and whole."""

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

from server_harness import serving

from gapless.base.errors import ConfigError

TOY = Path(__file__).parent / "toys" / "dialect.py"
PAGE = Path(__file__).parents[2] / "docs" / "extend" / "dialect.md"
ROUTE, KEY = "/api/generate", {"authorization": "Bearer k"}


def install(folder, **points):
    """Write what an installation of packages with these entry points does; pip would need a network."""
    info = folder / "toy_dialects.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-dialects\nVersion: 1\n")
    lines = [f"{name} = {place}" for name, place in points.items()]
    (info / "entry_points.txt").write_text("\n".join(["[gapless.dialects]", *lines]))
    (folder / "ollama_dialect.py").write_text(TOY.read_text())


@pytest.fixture
def installed(tmp_path, monkeypatch):
    install(tmp_path, ollama="ollama_dialect:DIALECT", broken="no_such_module:DIALECT", wrong="ollama_dialect:Lines")
    (tmp_path / "open_dialect.py").write_text(
        "from gapless.server.auth import Access\nimport ollama_dialect as o\n"
        "(r,) = o.DIALECT.routes\nOPEN = o.Dialect((r._replace(access=Access.PUBLIC),))\n"
        "TAKEN = o.Dialect((r._replace(path='/v1/completions'),))\n"
    )
    with (tmp_path / "toy_dialects.dist-info" / "entry_points.txt").open("a") as file:
        file.write("\nopen = open_dialect:OPEN\ntaken = open_dialect:TAKEN\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in ("ollama_dialect", "open_dialect"):
        sys.modules.pop(name, None)


def lines_of(response):
    assert response.headers["content-type"] == "application/x-ndjson", response.text
    return [json.loads(line) for line in response.text.splitlines()]


def test_a_dialect_answers_streamed_and_whole_with_the_same_text(installed):
    with serving(dialect=("ollama",)) as server, server.client() as client:
        asked = {"prompt": "hi", "options": {"num_predict": 5}}
        *parts, end = lines_of(client.post(ROUTE, json=asked))
        whole = client.post(ROUTE, json={**asked, "stream": False}).json()
        assert "".join(part["response"] for part in parts) == whole["response"] == "abcde"
        counts = {"prompt_eval_count": 2, "eval_count": 5}
        assert end == {"model": "tiny", "response": "", "done": True, "done_reason": "length", **counts}
        assert whole == {**end, "response": "abcde"}


def test_a_dialect_has_the_limits_the_keys_and_the_description_of_every_route(installed):
    with serving(dialect=("ollama",), api_key=("k",), max_body_bytes=200) as server, server.client() as client:
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


def test_a_dialect_is_served_only_if_it_is_named(installed):
    with serving() as server, server.client() as client:
        assert client.post(ROUTE, json={"prompt": "hi"}).status_code == 404
    assert "ollama_dialect" not in sys.modules


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
def test_a_dialect_that_cannot_be_used_is_refused_at_the_start(installed, name, fault):
    with pytest.raises(ConfigError, match=re.escape(fault)), serving(dialect=(name,)):
        pass


@contextmanager
def served(folder, *flags):
    """`gapless serve` on the demo model, with the packages of this folder."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PAGE.parents[2]), str(folder)])}
    command = [sys.executable, "-m", "gapless", "serve", "--port", "0", "--device", "cpu", *flags]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = next(line for line in process.stdout if " at http" in line)
            yield re.search(r" at (http://\S+?),", line)[1]
        finally:
            process.terminate()


@pytest.mark.process
def test_gapless_serve_answers_in_the_dialect_of_the_page(tmp_path):
    assert f"```python\n{TOY.read_text()}```" in PAGE.read_text()
    install(tmp_path, ollama="ollama_dialect:DIALECT")
    with served(tmp_path, "--dialect", "ollama") as url:
        asked = {"prompt": "12 + 30 =", "options": {"num_predict": 8, "temperature": 0}}
        *parts, end = lines_of(httpx.post(url + ROUTE, json=asked, timeout=60))
        whole = httpx.post(url + ROUTE, json={**asked, "stream": False}, timeout=60).json()
    assert end["done"] and "".join(part["response"] for part in parts) == whole["response"] != ""
