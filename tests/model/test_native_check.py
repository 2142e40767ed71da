"""The comparison of native families with transformers: it passes, and sees every change of a computation."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from model_harness import EVERY, FAMILIES, reference
from paging_driver import VOCAB, load

from gapless.base.errors import CheckpointError, ConfigError
from gapless.kernels.kinds import Activation
from gapless.model import native_check
from gapless.model.config import read_model_config
from gapless.model.native_check import check_native
from gapless.model.spec import ModelSpec


@pytest.mark.parametrize("family", EVERY)
def test_a_family_passes_with_more_layers_than_are_computed(tmp_path, family):
    more = {} if "layer_types" in FAMILIES[family][1] else {"num_hidden_layers": 6}
    reference(family, **more).save_pretrained(tmp_path)
    check_native(tmp_path)


def test_a_model_is_checked_when_it_is_loaded(tmp_path):
    reference("gpt2").save_pretrained(tmp_path)
    assert load(tmp_path, check=True).vocab_size == VOCAB
    with pytest.raises(ConfigError, match="load_format dummy has none"):
        load(tmp_path, check=True, load_format="dummy")


def layers(**changes):
    return lambda spec: replace(spec, layers=tuple(replace(layer, **changes) for layer in spec.layers))


def attention(**changes):
    def change(spec: ModelSpec) -> ModelSpec:
        each = (replace(layer, attention=replace(layer.attention, **changes)) for layer in spec.layers)
        return replace(spec, layers=tuple(each))

    return change


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gpt2", lambda spec: replace(spec, norm=replace(spec.norm, eps=0.1))),
        ("gpt2", lambda spec: replace(spec, layers=tuple(
            replace(layer, mlp=replace(layer.mlp, activation=Activation.RELU)) for layer in spec.layers))),
        ("olmo2", attention(scale=1.0)),
        ("olmo2", layers(residual=0.5)),
        ("cohere", lambda spec: replace(spec, logits_factor=1.0)),
        ("cohere", lambda spec: replace(spec, ropes=(replace(spec.ropes[0], interleaved=False),))),
    ],
)  # fmt: skip
def test_another_computation_is_refused_by_name(tmp_path, monkeypatch, family, change):
    reference(family).save_pretrained(tmp_path)
    config = read_model_config(tmp_path)
    monkeypatch.setattr(native_check, "read_model_config", lambda _: replace(config, spec=change(config.spec)))
    with pytest.raises(CheckpointError, match=r"config\.json: .* logits differ"):
        check_native(tmp_path)


def test_transformers_that_is_missing_is_named_with_its_extra(tmp_path, monkeypatch):
    monkeypatch.setattr(native_check, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"gapless\[transformers\]"):
        check_native(tmp_path)


def test_a_family_that_transformers_lacks_is_named(tmp_path):
    reference("qwen2").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    mimo = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "auto_map": {"AutoConfig": "x.Y"}}
    path.write_text(json.dumps(json.loads(path.read_text()) | mimo))
    with pytest.raises(ConfigError, match="no MiMoForCausalLM to compare with: start without --check"):
        check_native(tmp_path)


def test_a_checkpoint_that_names_code_is_compared_when_a_family_replaces_it(tmp_path):
    reference("phi3").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoConfig": "configuration_phi3.X"}}))
    check_native(tmp_path)
