"""A name on the hub where users give it: LLM, serve, doctor, bench."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hub.loopback import folder_files
from server.server_harness import VOCAB

from gapless import LLM, AsyncLLM, SamplingParams
from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError
from gapless.cli import bench_offline, checks
from gapless.cli.bench_flags import BenchFlags
from gapless.cli.bench_serve import make_plan
from gapless.cli.main import main
from gapless.demo import weights_dir

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
from gapless.base.config import EngineConfig
from gapless.server.config import ServerConfig
from gapless.server.run import serve
worker = ("gapless.testing.worker", sys.argv[2], "0")
sys.exit(serve(EngineConfig(model=sys.argv[1]), ServerConfig(port=0), worker=worker))
"""


def test_a_model_of_the_hub_answers_as_from_its_directory(hub):
    hub.add("org/demo", folder_files(weights_dir()))
    options: dict[str, Any] = {"device": "cpu", "enforce_eager": True, "max_num_seqs": 1, "max_model_len": 64}
    asked = "Question: What is 17 + 25?\nAnswer:", SamplingParams(temperature=0, max_tokens=12)
    answers = []
    for model in ("org/demo", str(weights_dir())):
        with LLM(model, **options) as llm:
            answers.append(llm.generate(*asked)[0].outputs[0].token_ids)
    assert answers[0] == answers[1] and len(answers[0]) == 12


async def test_async_llm_has_the_files_and_the_commit(hub, tiny):
    commit = hub.add("org/tiny", tiny)
    llm = AsyncLLM.from_engine_args({"model": "org/tiny", "revision": "main"})
    assert llm.front.commit == commit and llm.tokenizer.encode("abc")
    assert llm.config == EngineConfig(model="org/tiny", revision="main")
    await llm.close()


@contextmanager
def serve(model: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`gapless serve` with an engine that plays a script; yields it with its address, empty when it does not start."""
    command = [sys.executable, "-c", PROGRAM, model, str(VOCAB)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as server:
        assert server.stdout is not None
        first = server.stdout.readline()
        try:
            yield server, first.rpartition(" at ")[2].partition(",")[0]
        finally:
            server.terminate()


def said(server: subprocess.Popen[str]) -> str:
    server.terminate()
    return server.communicate(timeout=60)[1]


@pytest.mark.process
def test_serve_takes_a_name_of_the_hub(hub, tiny):
    commit = hub.add("org/tiny", tiny)
    hub.add("org/other", tiny)
    with serve("org/tiny") as (server, url):

        def post(model: str) -> Any:
            body = json.dumps({"model": model, "prompt": "hi", "max_tokens": 3}).encode()
            request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
            return json.load(urllib.request.urlopen(request, timeout=20))

        with urllib.request.urlopen(f"{url}/server_info", timeout=20) as answer:
            reply = json.load(answer)
        assert (reply["info"]["model"], reply["info"]["commit"]) == ("org/tiny", commit)
        assert reply["changed"]["model"] == reply["engine"]["model"] == "org/tiny"
        assert post("org/tiny")["model"] == "org/tiny"
        hub.asked.clear()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            post("org/other")
        assert hub.asked == []  # a request fetches nothing
        log = said(server)
    assert f"gapless.hub: org/tiny is commit {commit} of {hub.url}" in log
    assert "HTTP Request" not in log  # the address of a large file may hold its signature


@pytest.mark.process
def test_serve_refuses_a_model_that_is_not_there(hub):
    with serve("org/none") as (server, url):
        assert server.wait(60) == 2 and url == ""
        assert "gapless: error: model: 'org/none' is no directory here, and http" in said(server)


def test_run_refuses_a_model_that_is_not_there(hub, capsys):
    assert main(["run", "--model", "org/none", "hi"]) == 2
    assert capsys.readouterr().err.startswith("gapless: error: model: 'org/none' is no directory here")


def test_doctor_shows_the_hub_and_its_cache(hub, tiny, cache):
    commit = hub.add("org/tiny", tiny)
    (check,) = checks.hub()
    assert check.status == "ok" and check.detail.startswith(f"{hub.url} (no token), cache {cache} (")
    config = EngineConfig(model="org/tiny")
    check, *others = checks.model(config)
    fields = [one for one in others if one.name.endswith(".json")]
    text = f"org/tiny: Qwen3ForCausalLM, float32, 1,024 tokens, a chat template, commit {commit}"
    assert check == ("model", "ok", f"{text}; 1 MB of weights are still to be fetched")
    assert {one.status for one in fields} == {"ok"}
    assert {one.name for one in fields} == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert ("computed by", "ok", "native: it has a native family") in others
    check, *others = checks.model(EngineConfig())
    fields = [one for one in others if one.name.endswith(".json") or one.name == "weights"]
    assert check.detail == "demo: Qwen3ForCausalLM, float32, 2,048 tokens, a chat template"
    assert [one.status for one in fields] == ["ok"] * len(fields) and fields[-1].name == "weights"
    assert "read: architectures = ['Qwen3ForCausalLM'], " in fields[0].detail
    with pytest.raises(ConfigError, match="no directory here"):
        list(checks.model(EngineConfig(model="org/none")))


def test_doctor_takes_a_model(monkeypatch, capsys):
    seen: list[EngineConfig | None] = []
    monkeypatch.setattr(checks, "run_checks", lambda port, config: seen.append(config) or [])
    for words in ([], ["org/tiny", "--revision", "v1", "--download-dir", "/disk"]):
        assert main(["doctor", *words]) == 0
    assert seen == [None, EngineConfig(model="org/tiny", revision="v1", download_dir="/disk")]
    assert main(["doctor", "--depth", "3"]) == 2
    assert "unknown flag --depth" in capsys.readouterr().err


def test_bench_serve_takes_a_tokenizer_by_its_name(hub, tiny):
    hub.add("org/tiny", tiny)
    plan = make_plan(BenchFlags(tokenizer="org/tiny"))
    assert plan.tokenizer_id == "org/tiny" and plan.tokenizer is not None
    assert set(folder_files(Path(plan.tokenizer))) == {"tokenizer.json", "tokenizer_config.json"}
    plan = make_plan(BenchFlags(tokenizer="/some/where"))
    assert plan.tokenizer_id == plan.tokenizer == "/some/where"


def test_bench_startup_measures_no_fetch(hub, tiny, monkeypatch):
    commit = hub.add("org/tiny", tiny)
    seen: list[dict[str, Any]] = []

    def measure(options: dict[str, Any], *_: object) -> list[Any]:
        seen.append(options)
        return [bench_offline.startup.Start((("other", 1.0),), 1.0)]

    monkeypatch.setattr(bench_offline.startup, "measure_starts", measure)
    assert main(["bench", "startup", "org/tiny", "--depth", "2"]) == 0
    (options,) = seen
    there = Path(options.pop("model"))
    assert there.name == commit and set(tiny) == set(folder_files(there))
    assert EngineConfig(**options) == EngineConfig(depth="2")
