"""Who A and B are, and servers that are started from flags and stopped again."""

from __future__ import annotations

import itertools
import os
import sys
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest

from gapless.base.errors import ConfigError, ServerError
from gapless.lab import arms
from gapless.lab.arms import Arm, ArmError, arms_from_flags, arms_from_urls, live, shown_flags, split_arms


def test_words_between_dashes_are_split_into_arms():
    assert split_arms([]) == []
    assert split_arms(["--", "--depth", "1", "--"]) == [["--depth", "1"], []]
    assert split_arms(["--", "x", "--", "a", "--", "b"]) == [["x"], ["a"], ["b"]]
    for words in (["--", "a"], ["--"] * 4):
        with pytest.raises(ConfigError, match="FLAGS OF A"):
            split_arms(words)


def test_flags_of_an_arm_come_last_and_name_it():
    a, b = arms_from_flags(["--model", "demo"], ["--depth", "1"], [])
    assert a.flags == ("--model", "demo", "--depth", "1") and a.own == ("--depth", "1")
    assert (a.name, b.name) == ("--depth 1", "(defaults)")
    same, again = arms_from_flags([], ["--depth", "1"], ["--depth", "1"])
    assert same.name != again.name
    with pytest.raises(ConfigError, match="--port is chosen by ab"):
        arms_from_flags([], ["--port=1"], [])


def test_values_of_keys_are_not_shown():
    words = ["--api-key", "a", "b", "--depth", "1", "--api-key=c"]
    assert shown_flags(words) == ["--api-key", "***", "***", "--depth", "1", "--api-key=***"]


def test_a_url_without_a_server_is_refused():
    a, _ = arms_from_urls("http://127.0.0.1:9", "http://127.0.0.1:9")
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9"), live(a):
        pass


def test_a_server_of_gapless_names_its_settings():
    info = {"changed": {"port": 1, "depth": "2"}, "info": {"device": "cpu", "dtype": "float32", "pages": 3}}
    assert arms.engine_settings(info) == {"settings": {"depth": "2"}, "device": "cpu", "dtype": "float32"}
    for other in ({}, {"vllm_config": "..."}, {"changed": 1}):
        assert arms.engine_settings(other) == {}


def fake_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str) -> Arm:
    """An arm whose `gapless serve` is `program`."""
    package = tmp_path / "gapless"
    package.mkdir()
    (package / "__main__.py").write_text(program)
    monkeypatch.setattr(arms.sys, "executable", sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return Arm("A", "fake", flags=("--depth", "1"))


def test_a_server_that_does_not_start_says_why(monkeypatch, tmp_path):
    arm = fake_server(monkeypatch, tmp_path, "raise SystemExit('gapless: error: no such flag\\n')")
    with pytest.raises(ArmError, match=r"arm A .* no such flag"), live(arm):
        pass


def test_a_server_that_never_gets_ready_is_stopped(monkeypatch, tmp_path):
    os.mkfifo(tmp_path / "pid")
    pids: list[int] = []
    program = "import os, signal\nopen('pid', 'w').write(str(os.getpid()))\nsignal.pause()"
    arm = fake_server(monkeypatch, tmp_path, program)
    clock = itertools.count()

    def until_started(_: float) -> None:
        pids[:] = pids or [int((tmp_path / "pid").read_text())]

    monkeypatch.setattr(arms, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=until_started))
    with pytest.raises(ArmError, match="not ready"), live(arm, start_seconds=3):
        pass
    (pid,) = pids
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_ends_in_between_is_reported(monkeypatch, tmp_path):
    program = """
import http.server, json, sys, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/fail":
            print("error: out of memory", flush=True)
            return threading.Thread(target=server.shutdown).start()
        body = json.dumps({"version": "9", "data": [{"id": "m", "max_model_len": 5}]}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(f"gapless 9 serves m ({sys.argv[1:]}) at http://127.0.0.1:{server.server_port}, ready after 0 s", flush=True)
server.serve_forever()
"""
    arm = fake_server(monkeypatch, tmp_path, program)
    with pytest.raises(ArmError, match=r"ended during the runs: .*out of memory"), live(arm) as server:
        assert server.facts["version"] == "9" and server.facts["id"] == "m" and server.facts["max_model_len"] == 5
        assert "'--depth', '1', '--host', '127.0.0.1', '--port', '0'" in server.facts["started"]
        with pytest.raises(OSError):
            urllib.request.urlopen(f"{server.url}/fail", timeout=60)
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
