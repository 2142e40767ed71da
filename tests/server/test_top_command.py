"""`gapless top` against a server."""

import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
from server_harness import MODEL, serving
from terminal import shown_on_terminal

from gapless.cli import top
from gapless.cli.flags import KEY_VARIABLES
from gapless.cli.main import main
from gapless.server.config import ServerConfig

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def answers(server):
    """Whether there is one more answer, each time that a test asks: the server has one request after the other."""
    stop, answered = threading.Event(), threading.Semaphore(0)

    def ask():
        with server.client() as client:
            while not stop.is_set():
                client.post("/v1/completions", json={"prompt": "a~", "max_tokens": 20, "ignore_eos": True})
                answered.release()

    asking = threading.Thread(target=ask)
    asking.start()
    yield answered
    stop.set()
    asking.join(20)


@pytest.fixture(scope="module")
def busy(server, answers):
    """The URL of that server."""
    return server.url


def test_top_once_prints_one_view_and_ends(busy, answers, capsys, monkeypatch):
    def wait_for_answers(seconds):
        while answers.acquire(blocking=False):
            pass
        assert all(answers.acquire(timeout=20) for _ in range(3))

    # Two looks at 0 and 0.4 s, with whole requests between them however busy the machine is.
    looks = (0.4 * look for look in count())
    clock = SimpleNamespace(sleep=wait_for_answers, monotonic=lambda: next(looks), strftime=time.strftime)
    monkeypatch.setattr(top, "time", clock)
    assert main(["top", busy, "--once", "--interval", "0.4"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{busy}   {MODEL}   the last 0.4 s")
    rate = float(re.search(r"([\d.,]+) generated", shown)[1].replace(",", ""))
    assert 2 * 20 / 0.4 <= rate < 10_000
    assert re.search(r"^TTFT +p50 +[\d.]+ ms", shown, re.M) and re.search(r"^ITL +p50 +[\d.]+ ms", shown, re.M)
    assert "KV cache" in shown and re.search(r"^HTTP +.*\d+ 2xx", shown, re.M)
    assert "\x1b" not in shown


@pytest.mark.process
def test_lines_where_there_is_no_terminal_and_an_interrupt_ends_them(busy):
    command = [sys.executable, "-m", "gapless", "top", busy + "/metrics", "--interval", "0.1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        lines = [running.stdout.readline() for _ in range(2)]
        running.send_signal(signal.SIGINT)
        assert running.wait(20) == 0
        assert running.stderr.read() == ""
    assert all(re.match(r"\d\d:\d\d:\d\d \| running [01] waiting 0 \| tokens/s ", text) for text in lines)


@pytest.mark.process
def test_a_screen_where_there_is_one(busy):
    command = [sys.executable, "-m", "gapless", "top", busy, "--interval", "0.2"]
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"}
    # The last of them: an interrupt may cut off what of a screen has not been read.
    shown = shown_on_terminal(command, b"KV cache", signal.SIGINT, cwd=ROOT, env=environment)
    assert "\x1b[?1049h" in shown and "\x1b[?1049l" in shown  # a screen of its own, given back
    for word in ("Requests", "KV cache", "ITL", "generated"):
        assert word in shown
    assert "Traceback" not in shown


def test_a_server_that_goes_away_is_reported_once_and_waited_for(capsys, monkeypatch):
    with socket.socket() as place:
        # Nothing else gets the port while the server is away: a socket that does not listen refuses connections.
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(("127.0.0.1", 0))
        config = ServerConfig(port=place.getsockname()[1], disable_uvicorn_access_log=True)
        with serving(config) as server:
            watching = top.Server(server.url, None)
            watching.look()
        looks = top.looks(watching, 0.01)
        for _ in range(2):
            assert str(next(looks)).startswith(f"{server.url}: cannot connect")
        with serving(config):
            assert next(looks).running == 0

    seen = iter([top.ServerError("away"), top.ServerError("away"), KeyboardInterrupt()])

    def script(*_):
        for item in seen:
            if isinstance(item, KeyboardInterrupt):
                raise item
            yield item

    monkeypatch.setattr(top, "looks", script)
    with pytest.raises(KeyboardInterrupt):
        top.print_lines(watching, 1.0)
    assert capsys.readouterr().out.count("away") == 1


def test_trouble_is_on_the_screen():
    from rich.console import Console

    console = Console(file=io.StringIO(), width=60)
    console.print(
        top.screen(["heading"], [top.TopRow("KV cache", "██··", "50 %"), top.TopRow("HTTP", "", "1 5xx", "bad")], "oh")
    )
    assert console.file.getvalue().split() == ["heading", "oh", "KV", "cache", "██··", "50", "%", "HTTP", "1", "5xx"]


def test_top_without_the_key_is_refused(capsys, monkeypatch):
    for name in KEY_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with serving(api_key=("k",)) as server:
        assert main(["top", server.url, "--once"]) == 1
        assert "401" in capsys.readouterr().err
        assert main(["top", "--base-url", server.url, "--once", "--interval", "0.1", "--api-key", "k"]) == 0
        for name in KEY_VARIABLES:
            with monkeypatch.context() as variable:
                variable.setenv(name, "k")
                assert main(["top", "--url", server.url, "--once", "--interval", "0.1"]) == 0
        assert main(["top", server.url, "--url", "http://other:1"]) == 2
        assert f"two servers are named: {server.url} and http://other:1" in capsys.readouterr().err


def test_a_server_of_another_kind_is_named_as_such(server, capsys):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        absent = f"http://127.0.0.1:{probe.getsockname()[1]}"
    for url, code, text in (
        (absent, 1, f"{absent}: cannot connect"),
        (server.url + "/v1/nowhere", 1, "404"),
        ("ftp://x", 2, "must look like"),
    ):
        assert main(["top", url, "--once"]) == code
        assert text in capsys.readouterr().err
    assert main(["top", server.url, "--interval", "0"]) == 2
    monkey = top.Page
    top.Page = lambda text: monkey("up 1\n")
    try:
        assert main(["top", server.url]) == 1
        assert "none of vLLM's series" in capsys.readouterr().err
        top.Page = lambda text: monkey("<html>")
        assert main(["top", server.url]) == 1
        assert "is not in Prometheus' text format" in capsys.readouterr().err
    finally:
        top.Page = monkey
