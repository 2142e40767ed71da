"""A model family from outside the package: the tokens of transformers, in this process and from a server."""

from __future__ import annotations

import json
import os
import shutil
import urllib.request

import pytest
import torch
import transformers
from extending.installed import TOYS, install
from served import Server

from gapless import LLM, SamplingParams
from gapless.base.errors import CheckpointError, ConfigError
from gapless.demo import weights_dir
from gapless.model.config import read_model_config

SIZES = {
    "vocab_size": 2048, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 24, "initializer_range": 0.2, "max_position_embeddings": 256,
}  # fmt: skip
PROMPTS = [[5, 17, 91, 200], [3], list(range(40, 75))]
COUNT = 24


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    installed = tmp_path / "installed"
    installed.mkdir()
    install(installed, "gapless.models", ArceeForCausalLM="family:FAMILY", BrokenForCausalLM="no_such_module:FAMILY")
    for path in (TOYS, installed):
        monkeypatch.syspath_prepend(str(path))
    return os.pathsep.join([str(TOYS), str(installed)])


def random_arcee(folder, seed=0):
    """A checkpoint of random weights, and the model of transformers that wrote it."""
    torch.manual_seed(seed)
    theirs = transformers.ArceeForCausalLM(transformers.ArceeConfig(**SIZES)).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("norm.weight"):
                parameter.normal_(0, 0.3)
    theirs.save_pretrained(folder)
    shutil.copy(f"{weights_dir()}/tokenizer.json", folder)
    return theirs


def wanted(theirs):
    found = []
    for prompt in PROMPTS:
        ids = theirs.generate(torch.tensor([prompt]), max_new_tokens=COUNT, do_sample=False, eos_token_id=None)
        found.append(ids[0, len(prompt) :].tolist())
    return found


@pytest.mark.parametrize("depth", ["1", "4"])
def test_a_family_from_outside_gives_the_tokens_of_transformers(tmp_path, depth):
    model = tmp_path / "model"
    theirs = random_arcee(model)
    other = random_arcee(tmp_path / "other", seed=1)
    asked = SamplingParams(temperature=0, max_tokens=COUNT, ignore_eos=True)
    with LLM(str(model), device="cpu", dtype="float32", max_model_len=128, depth=depth) as llm:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = llm.generate(prompts, asked, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == wanted(theirs)
        llm.update_weights(str(tmp_path / "other"))
        outputs = llm.generate(prompts, asked, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == wanted(other)


def test_a_family_that_is_not_there_or_cannot_be_imported_is_refused(tmp_path):
    random_arcee(tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    for name, error, message in (
        ("MambaForCausalLM", CheckpointError, "architectures must be one of .*LlamaFor.*, ArceeForCausalLM"),
        ("BrokenForCausalLM", ConfigError, r"architectures: BrokenForCausalLM \(no_such_module:FAMILY\) cannot be"),
    ):
        path.write_text(json.dumps(config | {"architectures": [name]}))
        with pytest.raises(error, match=message):
            read_model_config(tmp_path / "model")
    path.write_text(json.dumps(config | {"hidden_act": "snake"}))
    with pytest.raises(CheckpointError, match=r"hidden_act must be one of .*, got .snake."):
        read_model_config(tmp_path / "model")


@pytest.mark.process
def test_a_server_of_a_family_from_outside_gives_the_tokens_of_transformers(tmp_path, package, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")])))
    theirs = random_arcee(tmp_path / "model")
    server = Server("--model", str(tmp_path / "model"), "--dtype", "float32", "--max-model-len", "128")
    try:
        asked = {"prompt": PROMPTS, "temperature": 0, "max_tokens": COUNT, "ignore_eos": True, "return_token_ids": True}
        request = urllib.request.Request(
            server.base + "/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            choices = json.load(answer)["choices"]
    finally:
        assert server.stop() == 0
    assert [choice["token_ids"] for choice in choices] == wanted(theirs)
