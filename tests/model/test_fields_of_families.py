"""Fields of config.json that families read for themselves: defaults of transformers, old names, and refusals."""

from __future__ import annotations

import json

import pytest
from model_harness import SIZES, reference
from paging_driver import load

from gapless.base.errors import CheckpointError, ForeignModelError
from gapless.kernels.kinds import Activation, Reach
from gapless.model.config import read_model_config


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
