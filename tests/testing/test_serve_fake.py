"""`gapless serve --device fake`, as a user starts it: streams, an abort, health, metrics, and a clean end."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_accelerator import child_environment
from served import Server
from waiting import until

from gapless.testing.fake import SEED_VARIABLE

pytestmark = pytest.mark.process
PROMPT = "Mia has 17 pens. She buys 25 more. How many pens does she have?"


def stream(server: Server, most: int) -> Iterator[str]:
    body = {"model": "demo", "prompt": PROMPT, "max_tokens": most, "temperature": 0, "stream": True, "ignore_eos": True}
    asked = urllib.request.Request(
        server.base + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=120) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])["choices"][0]["text"]


def test_a_server_on_the_fake_serves_and_ends_cleanly(findings_of_children: Path):
    env = child_environment(**{SEED_VARIABLE: "7"})
    server = Server("demo", "--device", "fake", "--max-num-seqs", "4", "--max-model-len", "512", env=env)
    try:
        server.get("/health")
        whole = "".join(stream(server, 24))
        begun = stream(server, 400)
        assert whole.startswith(next(begun))
        begun.close()
        until(lambda: server.metric("vllm:num_requests_running") == 0)
        assert "".join(stream(server, 24)) == whole
        assert server.metric("gapless:device_allocations_total") == 0
        assert server.metric("gapless:launches_total") > 24
    finally:
        code = server.stop()
    assert code == 0, "".join(server.lines)


def test_the_fake_without_a_compiler_is_refused_in_one_line(tmp_path: Path):
    env = child_environment(PATH="/nonexistent", XDG_CACHE_HOME=str(tmp_path), CXX="", GAPLESS_PREBUILT="0")
    command = [sys.executable, "-m", "gapless", "run", "--model", "demo", "--device", "fake", "hi"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    lines = [line for line in done.stderr.splitlines() if "C++" in line]
    wanted = "device: fake is C++ that cannot be built here: there is no C++ compiler (g++ or clang++)"
    assert (done.returncode, lines) == (2, [f"gapless: error: {wanted}"]), done.stderr
