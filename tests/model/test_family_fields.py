"""Fields of config.json that families read for themselves: transformers' defaults, old names, and refusals."""

from __future__ import annotations

import json

import pytest
import torch
from model_harness import FAMILIES, SIZES, reference, reference_logits
from paging_driver import Driver, Sequence, load, prompt, relative_error
from safetensors.torch import load_file, save_file

from gapless.base.errors import CheckpointError, ConfigError, ForeignModelError
from gapless.base.files import SINGLE
from gapless.kernels.kinds import Activation, Reach
from gapless.model.config import read_model_config

NEW = [family for family in FAMILIES if family.startswith(("gpt2", "olmo", "cohere"))]


def rewrite(directory, change):
    path = directory / "config.json"
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


@pytest.mark.parametrize("family", NEW)
def test_fields_that_a_config_lacks_have_the_defaults_of_transformers(tmp_path, family):
    theirs = reference(family)
    theirs.save_pretrained(tmp_path)
    defaults = type(theirs.config)(**SIZES).to_dict()
    kept = ("architectures", "model_type", *SIZES)
    bare = type(theirs.config)().to_dict()

    def change(values):
        for name in [
            name for name in values if name not in kept and values[name] == bare.get(name, defaults.get(name))
        ]:
            del values[name]

    rewrite(tmp_path, change)
    tokens = prompt(30)
    [got] = Driver(load(tmp_path)).step(chunks=[(Sequence(), tokens)])
    assert relative_error(got, reference_logits(theirs, tokens)) < 1e-5


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx must be false"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn must be false"),
        ("gpt2", {"activation_function": "tanh"}, "activation_function must be one of silu"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention"),
        ("gpt2", {"hidden_size": 64}, r"hidden_size must be n_embd \(32\)"),
        ("gpt2", {"n_head": 5}, r"n_head must divide n_embd \(32\), got 5"),
        ("gpt2", {"n_embd": 36, "n_head": 12}, "n_head must give heads an even width"),
        ("olmo2", {"clip_qkv": None, "hidden_act": "tanh"}, "hidden_act must be one of silu"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm"),
        ("cohere", {"logit_scale": "1"}, "logit_scale must be a number"),
    ],
)
def test_a_value_that_a_family_does_not_compute_is_named(tmp_path, family, changes, says):
    reference(family).save_pretrained(tmp_path)
    rewrite(tmp_path, lambda values: values.update(changes))
    with pytest.raises(CheckpointError, match=says) as error:
        read_model_config(tmp_path)
    if "must be one of" in says or "must be false" in says or (family == "cohere" and "use_qk_norm" in says):
        assert isinstance(error.value, ForeignModelError), "another implementation may compute it"


def test_gpt2_reads_unscaled_attention_and_sizes_by_their_general_names(tmp_path):
    theirs = reference("gpt2", scale_attn_weights=False)
    theirs.save_pretrained(tmp_path)
    rewrite(tmp_path, lambda values: values.update(num_attention_heads=values.pop("n_head")))
    tokens = prompt(30)
    [got] = Driver(load(tmp_path)).step(chunks=[(Sequence(), tokens)])
    assert relative_error(got, reference_logits(theirs, tokens)) < 1e-5


def test_a_gpt2_of_the_hub_lacks_the_prefix_and_holds_masks(tmp_path):
    theirs = reference("gpt2")
    theirs.save_pretrained(tmp_path)
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(tmp_path / SINGLE).items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 2048, 2048).tril().bool() for layer in range(2)}
    save_file(tensors | masks | {"h.0.attn.masked_bias": torch.tensor(-1e4)}, tmp_path / SINGLE)
    rewrite(tmp_path, lambda values: values.update(n_ctx=2048, dtype=None))
    tokens = prompt(30)
    [got] = Driver(load(tmp_path)).step(chunks=[(Sequence(), tokens)])
    assert relative_error(got, reference_logits(theirs, tokens)) < 1e-5


def test_gpt2_runs_to_its_last_position_and_is_refused_beyond(tmp_path):
    theirs = reference("gpt2", max_position_embeddings=40)
    theirs.save_pretrained(tmp_path)
    tokens, driver, sequence = prompt(40), Driver(load(tmp_path)), Sequence()
    driver.step(chunks=[(sequence, tokens[:39])])
    [got] = driver.step(decode=[(sequence, tokens[39])], inert=1)
    assert relative_error(got, reference_logits(theirs, tokens)[-1:]) < 1e-5
    with pytest.raises(ConfigError, match=r"max_model_len \(41\) .* it has 40 positions: ask for 40 or less$"):
        load(tmp_path, max_model_len=41)


@pytest.mark.parametrize("family", [family for family in NEW if "-" not in family])
def test_tensors_that_are_missing_or_left_over_are_named(tmp_path, family):
    reference(family).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / SINGLE)
    for name, tensor in tensors.items():
        save_file({other: value for other, value in tensors.items() if other != name}, tmp_path / SINGLE)
        with pytest.raises(CheckpointError, match=rf"'{name}' is missing"):
            load(tmp_path)
        save_file(tensors | {f"{name}.more": tensor.clone()}, tmp_path / SINGLE)
        with pytest.raises(CheckpointError, match=rf"unexpected tensor '{name}\.more'"):
            load(tmp_path)


def read(directory, kind, **changes):
    names = {"gemma3_text": "Gemma3"}
    values = SIZES | {"model_type": kind, "architectures": [f"{names.get(kind, kind.title())}ForCausalLM"]} | changes
    (directory / "config.json").write_text(json.dumps(values))
    return read_model_config(directory).spec


def test_fields_that_are_missing_have_the_defaults_of_transformers(tmp_path):
    gemma2, gemma3 = read(tmp_path, "gemma2"), read(tmp_path, "gemma3_text", num_hidden_layers=6)
    attention = gemma2.layer.attention
    assert (attention.head_dim, attention.scale, attention.softcap, gemma2.logits_cap) == (256, 1 / 16, 50.0, 30.0)
    assert [layer.attention.size for layer in gemma2.layers] == [4096, 0] and gemma2.tied
    assert [layer.attention.size for layer in gemma3.layers] == [4096] * 5 + [0]
    assert [layer.attention.rope for layer in gemma3.layers] == [1] * 5 + [0]
    assert [rope.theta for rope in gemma3.ropes] == [1e6, 1e4] and not gemma3.logits_cap
    assert read(tmp_path, "mistral").layer.attention.size == 4096
    assert read(tmp_path, "phi3").norm.eps == 1e-5
    granite = read(tmp_path, "granite")
    assert (granite.layer.attention.scale, granite.layer.residual, granite.logits_factor) == (1.0, 1.0, 1.0)


def test_old_names_of_the_two_ropes_of_gemma_3_count(tmp_path):
    old = {"rope_theta": 5e5, "rope_local_base_freq": 300.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    full, local = read(tmp_path, "gemma3_text", **old).ropes
    assert (full.theta, full.type, full.factor, local.theta, local.type) == (5e5, "linear", 8.0, 300.0, "default")


def test_gelu_of_the_first_gemma_is_the_approximate_one(tmp_path):
    for changes in ({}, {"hidden_act": "gelu"}, {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}):
        assert read(tmp_path, "gemma", **changes).layer.mlp.activation is Activation.GELU_TANH


@pytest.mark.parametrize(
    ("kind", "changes", "says"),
    (
        ("gemma", {"hidden_activation": "silu"}, "hidden_activation must be gelu_pytorch_tanh"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention changes what the model"),
        ("gemma2", {"sliding_window": None}, "sliding_window must be a whole number"),
        ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping must be above 0"),
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping changes what the model"),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default"}}, "rope_parameters must have full_attention"),
        ("gemma3_text", {"layer_types": ["chunked_attention"] * 2}, "layer_types must be full_attention or sliding"),
        ("granite", {"logits_scaling": 0}, "logits_scaling must be above 0"),
        ("phi3", {"partial_rotary_factor": 0.4}, r"partial_rotary_factor must rotate an even part of head_dim \(8\)"),
        ("mistral", {"query_pre_attn_scalar": 20}, "query_pre_attn_scalar changes what the model"),
    ),
)
def test_a_field_that_a_family_does_not_compute_is_refused_by_name(tmp_path, kind, changes, says):
    with pytest.raises(CheckpointError, match=says) as caught:
        read(tmp_path, kind, **changes)
    malformed = "above 0" in says
    assert isinstance(caught.value, ForeignModelError) is not malformed


def test_the_first_layers_have_every_kind_and_few_of_each(tmp_path):
    reference("gemma3", num_hidden_layers=9).save_pretrained(tmp_path)
    model = load(tmp_path)
    short = model.first_layers()
    assert {block.spec for block in short.blocks} == {block.spec for block in model.blocks}
    assert [block.spec.attention.size for block in short.blocks] == [6, 6, 0]
    assert len(model.blocks) == 9


def test_windows_as_long_as_every_sequence_are_none(tmp_path):
    reference("mistral").save_pretrained(tmp_path)
    reaches = [load(tmp_path, max_model_len=length).blocks[0].attend.reach for length in (5, 6)]
    assert reaches == [Reach.CAUSAL, Reach.WINDOW]
