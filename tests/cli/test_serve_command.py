"""`gapless serve` hands both records to the server, and takes the flags that people know."""

from __future__ import annotations

from typing import Any

import pytest

import gapless.server.run
from gapless.base.config import EngineConfig
from gapless.cli.main import main
from gapless.cli.spec import specs
from gapless.server.config import ServerConfig


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []

    def serve(engine: EngineConfig, server: ServerConfig) -> int:
        calls.append((engine, server))
        return 7

    monkeypatch.setattr(gapless.server.run, "serve", serve)
    monkeypatch.delenv("GAPLESS_API_KEY", raising=False)
    return calls


def test_without_flags_the_demo_model_is_served(served):
    assert main(["serve"]) == 7
    assert served == [(EngineConfig(), ServerConfig())]


def test_flags_reach_their_record(served, capsys):
    argv = "serve my/model -p 0 --host 0.0.0.0 --api-key a b --alias x y --depth 8 --log-level debug --log_requests"
    assert main([*argv.split(), "--jinja", "--enforce-eager", "--max-num-batched-tokens", "2K"]) == 7
    engine = EngineConfig(model="my/model", depth="8", max_num_batched_tokens=2048, enforce_eager=True)
    server = ServerConfig(
        port=0,
        host="0.0.0.0",
        api_key=("a", "b"),
        served_model_name=("x", "y"),
        log_level="debug",
        enable_log_requests=True,
    )
    assert served == [(engine, server)]
    notes = capsys.readouterr().err
    assert "--jinja changes nothing" in notes and "eager" not in notes


def test_logits_processors_may_be_named_one_by_one_or_together(served):
    paths = ("house.rules:soften", "loud=house.rules:shout")
    assert main(["serve", "--logits-processor", paths[0], "--logits-processor", paths[1]]) == 7
    assert main(["serve", "--logits-processors", *paths]) == 7
    assert served == [(EngineConfig(logits_processors=paths), ServerConfig())] * 2
    assert main(["serve", "--logits-processor", "house.rules"]) == 2


def test_wrong_flags_end_before_the_server(served, capsys):
    assert main(["serve", "--port", "70000"]) == 2
    assert "port must be a whole number from 0 to 65535" in capsys.readouterr().err
    assert main(["serve", "--prt", "1"]) == 2
    assert "did you mean --port?" in capsys.readouterr().err
    assert served == []


def test_no_two_flags_share_a_variable():
    names = [s.env for config in (EngineConfig, ServerConfig) for s in specs(config)]
    assert len(names) == len(set(names))
