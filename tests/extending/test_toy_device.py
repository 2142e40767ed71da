"""A device from outside the package: the contract, and the CPU's tokens, in this process and from a server."""

from __future__ import annotations

import json
import os
import urllib.request

import pytest
from device_contract import Contract
from extending.installed import TOYS, install
from served import Server

from gapless import LLM, SamplingParams
from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError
from gapless.device import open_device

PROMPT = "One, two,"


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    install(tmp_path, "gapless.devices", inline="device:InlineDevice", broken="no_such_module:Device")
    for path in (TOYS, tmp_path):
        monkeypatch.syspath_prepend(str(path))
    return os.pathsep.join([str(TOYS), str(tmp_path)])


@pytest.fixture
def device(package):
    device = open_device("inline")
    yield device
    device.close()


class TestInlineDevice(Contract):
    pass


def tokens(device: str) -> list[int]:
    with LLM("demo", device=device, max_model_len=256) as llm:
        assert llm.info.device == device
        return list(llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))[0].outputs[0].token_ids)


def test_a_device_from_outside_gives_the_tokens_of_the_cpu():
    assert tokens("inline") == tokens("cpu")


def test_a_device_that_is_not_there_is_refused_with_the_names_that_are():
    with pytest.raises(ConfigError, match=r"auto, cpu, cuda, .*broken, (fake, )?inline, got 'tpu'"):
        EngineConfig(device="tpu")
    with pytest.raises(ConfigError, match=r"device: broken \(no_such_module:Device\) cannot be imported"):
        open_device("broken")


@pytest.mark.process
def test_a_server_on_a_device_from_outside_gives_the_tokens_of_the_cpu(package, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])))
    server = Server("--model", "demo", "--device", "inline", "--max-model-len", "256")
    try:
        asked = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 12, "return_token_ids": True}
        request = urllib.request.Request(
            server.base + "/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            (choice,) = json.load(answer)["choices"]
    finally:
        assert server.stop() == 0
    assert choice["token_ids"] == tokens("cpu")
