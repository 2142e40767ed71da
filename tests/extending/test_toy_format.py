"""A format of weights from outside the package: the tokens of the same numbers in float32."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from extending.installed import TOYS, install
from safetensors.torch import load_file, save_file

from gapless import LLM, SamplingParams
from gapless.base.errors import CheckpointError
from gapless.base.files import SINGLE
from gapless.demo import weights_dir
from gapless.model.config import read_model_config

PROMPTS = ["One, two,", "A question about pens:", "x"]


@pytest.fixture(autouse=True)
def package(tmp_path, monkeypatch):
    installed = tmp_path / "installed"
    installed.mkdir()
    install(installed, "gapless.formats", **{"byte-rows": "format:ByteRows"})
    for path in (TOYS, installed):
        monkeypatch.syspath_prepend(str(path))


def checkpoints(folder, factor=1.0):
    """The demo model with its layers' weights in bytes, and the same numbers in float32."""
    packed, plain = {}, {}
    for name, tensor in load_file(f"{weights_dir()}/{SINGLE}").items():
        wide = tensor.float()
        if ".layers." in name and name.endswith("_proj.weight"):
            wide = wide * factor
            scale = wide.abs().amax(1, keepdim=True) / 127
            whole = (wide / scale).round()
            packed |= {name: whole.to(torch.int8), f"{name}_scale": scale}
            wide = whole * scale
        else:
            packed[name] = wide
        plain[name] = wide.contiguous()
    config = json.loads((weights_dir() / "config.json").read_text())
    quantised = config | {"quantization_config": {"quant_method": "byte-rows"}}
    for kind, tensors, values in (("packed", packed, quantised), ("plain", plain, config)):
        shutil.copytree(weights_dir(), folder / kind)
        save_file(tensors, folder / kind / SINGLE)
        (folder / kind / "config.json").write_text(json.dumps(values))
    return folder / "packed", folder / "plain"


def answers(llm):
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_weights_of_a_format_from_outside_give_the_tokens_of_the_same_numbers(tmp_path):
    options = {"device": "cpu", "dtype": "float32", "max_model_len": 128}
    packed, plain = checkpoints(tmp_path)
    others = checkpoints(tmp_path / "others", factor=1.2)
    with LLM(str(packed), **options) as llm, LLM(str(plain), **options) as dense:
        assert answers(llm) == answers(dense)
        first = answers(llm)
        llm.update_weights(str(others[0]))
        dense.update_weights(str(others[1]))
        assert answers(llm) == answers(dense) != first


def test_a_format_that_is_not_there_is_refused(tmp_path):
    packed, _ = checkpoints(tmp_path)
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "bitnet"}}))
    with pytest.raises(CheckpointError, match=r"quant_method must be one of .*byte-rows, got 'bitnet'"):
        read_model_config(packed)
