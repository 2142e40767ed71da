"""Files of EAGLE-3 heads: what is read, and how what does not fit is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gapless.base.config import EngineConfig
from gapless.base.errors import CheckpointError, ConfigError
from gapless.demo import head_dir, weights_dir
from gapless.model.config import read_model_config
from gapless.model.drafting.eagle import HeadConfig, load_params
from gapless.model.loader import load_drafter, load_model

CPU = torch.device("cpu")
DEMO = read_model_config(weights_dir())


@pytest.fixture
def head(tmp_path):
    return Path(shutil.copytree(head_dir(), tmp_path / "head"))


def edit(head, **fields):
    path = head / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def read(head):
    config = HeadConfig.read(head, DEMO)
    return config, load_params(head, config, torch.float32, CPU)


def tensors_of(params):
    return [*params._replace(layer=params.norm), *params.layer.tensors()]


@pytest.mark.parametrize(
    "field, value, says",
    [
        ("hidden_size", 128, "must be 192"),
        ("num_key_value_heads", 3, "must be 2"),
        ("head_dim", 64, "must be 32"),
        ("vocab_size", 4096, "must be 2048"),
        ("num_hidden_layers", 2, "must be 1"),
        ("architectures", ["LlamaForCausalLM"], "LlamaForCausalLMEagle3"),
        ("norm_before_fc", True, "must be false"),
        ("hidden_act", "gelu", "must be silu"),
        ("eagle_config", {"eagle_aux_hidden_state_layer_ids": [2, 4, 7]}, "different layers of the model"),
        ("eagle_config", {"eagle_aux_hidden_state_layer_ids": "all"}, "different layers of the model"),
    ],
)
def test_a_head_of_another_model_is_refused_by_its_field(head, field, value, says):
    edit(head, **{field: value})
    with pytest.raises(
        CheckpointError, match=rf"config\.json: .*{field if field != 'eagle_config' else 'layer_ids'}.*{says}"
    ):
        read(head)


@pytest.mark.parametrize(
    "ids, taps", [([2, 4, 6], (2, 4, 6)), ([1, 3, 5], (2, 4, 6)), (None, None)], ids=("after", "from 0", "default")
)
def test_layers_are_counted_as_the_checkpoint_counts_them(head, ids, taps):
    edit(head, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    if taps is None:  # a model of six layers is too small for what heads without the field mean
        with pytest.raises(CheckpointError, match="different layers"):
            read(head)
    else:
        assert read(head)[0].taps == taps


@pytest.mark.parametrize("change", ["missing", "shape", "ids"])
def test_tensors_of_a_head_that_do_not_fit_are_refused_by_name(head, change):
    tensors = load_file(head / "model.safetensors")
    name = {"missing": "fc.weight", "shape": "midlayer.mlp.up_proj.weight", "ids": "d2t"}[change]
    if change == "missing":
        del tensors[name]
    else:
        tensors[name] = tensors[name] + 2048 if change == "ids" else tensors[name][:-1].contiguous()
    save_file(tensors, head / "model.safetensors")
    with pytest.raises(CheckpointError, match=name):
        read(head)


def test_a_layer_named_by_its_number_is_the_same_head(head):
    _, params = read(head)
    tensors = load_file(head / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    save_file({**renamed, "embed_tokens.weight": torch.zeros(2048, 192)}, head / "model.safetensors")
    assert all(map(torch.equal, tensors_of(params), tensors_of(read(head)[1])))


def test_a_head_without_a_directory_is_refused():
    for model in ("", "/no/such/head"):
        asked = json.dumps({"method": "eagle3", "model": model})
        config = EngineConfig(model=str(weights_dir()), speculative_config=asked)
        with pytest.raises(ConfigError, match=r"speculative_config\.model must be the directory"):
            load_drafter(config, load_model(config, CPU), rows=2)


def test_a_model_leaves_a_layer_of_its_pages_to_the_head():
    with_head = load_model(EngineConfig(model="demo", speculative_config='{"method": "eagle3"}'), CPU)
    alone = load_model(EngineConfig(model="demo"), CPU)
    assert with_head.page_bytes(16) * 6 == alone.page_bytes(16) * 7
    assert with_head.new_cache(2, 16, CPU).data.shape[1] == 7


@pytest.mark.parametrize(
    "config, says",
    [
        ('{"method": "eagle3", "model": 3}', "model must name a head"),
        ('{"method": "ngram", "model": "/heads/a"}', "of no use to ngram"),
        ('{"method": "mtp", "model": "/heads/a"}', "of no use to mtp"),
        ('{"method": "mtp_layers"}', "must be one of ngram"),
        ('{"method": "trees"}', "must be one of ngram, suffix, grammar, eagle3, draft_model, mtp"),
    ],
)
def test_a_wrong_config_of_speculation_is_refused_by_name(config, says):
    with pytest.raises(ConfigError, match=says):
        EngineConfig(model="demo", speculative_config=config)
