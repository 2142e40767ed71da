"""Checkpoints that are wrong beside their config.json: one line each, with the file and what helps."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from hub.loopback import folder_files
from safetensors.torch import load, save

from gapless.base.config import EngineConfig
from gapless.base.errors import UserError
from gapless.demo import weights_dir
from gapless.engine.frontdoor import locate, open_assets
from gapless.model.loader import load_model

NORM = "model.layers.1.input_layernorm.weight"
Files = dict[str, bytes]


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Files], None]:
    def changed(files: Files) -> None:
        found = load(files["model.safetensors"])
        change(found)
        files["model.safetensors"] = save(found)

    return changed


def config(**changes: object) -> Callable[[Files], None]:
    def changed(files: Files) -> None:
        files["config.json"] = json.dumps(json.loads(files["config.json"]) | changes).encode()

    return changed


def renamed(old: str, *new: str) -> Callable[[Files], None]:
    def changed(files: Files) -> None:
        data = files.pop(old)
        files.update(dict.fromkeys(new, data))

    return changed


BAD = (
    (config(hidden_size=96), ["model.safetensors: tensor", "has shape", "by config.json it must be"]),
    (config(num_hidden_layers=7), ["model.layers.6.", "is missing", "config.json"]),
    (config(num_hidden_layers=5), ["model.safetensors: unexpected tensor 'model.layers.5."]),
    (tensors(lambda found: found.pop(NORM)), [f"tensor {NORM!r} is missing"]),
    (tensors(lambda found: found.update({NORM: torch.ones(7)})), [f"tensor {NORM!r} has shape [7]"]),
    (renamed("tokenizer.json", "tokenizer.model", "vocab.json"), ["tokenizer.json", "--tokenizer"]),
    (renamed("model.safetensors", "model-q4.gguf"), ["it holds model-q4.gguf, which are not read", "save_pretrained"]),
    (renamed("model.safetensors", "pytorch_model.bin"), ["pytorch_model.bin", "Pickles are never fetched"]),
    (renamed("config.json", "params.json"), ["config.json"]),
)


@pytest.mark.parametrize(("change", "parts"), BAD)
def test_a_wrong_file_of_a_checkpoint_is_one_line_with_what_helps(hub, change, parts):
    files = folder_files(weights_dir())
    change(files)
    hub.add("org/bad", files)
    with pytest.raises(UserError) as caught:
        located = locate(EngineConfig(model="org/bad", device="cpu"))
        open_assets(located.config)
        load_model(located.config, torch.device("cpu"))
    text = str(caught.value)
    assert "\n" not in text and [part for part in parts if part not in text] == [], text


def test_a_gguf_file_that_is_not_there_is_refused():
    with pytest.raises(UserError, match=r"no directory 'model-q4\.gguf'; give that of a checkpoint, a GGUF file"):
        locate(EngineConfig(model="model-q4.gguf"))
