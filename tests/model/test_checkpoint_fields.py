"""What the files of a checkpoint say is read, known to change nothing, refused by name, or warned of by name."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
import transformers
from model_harness import EVERY, SIZES, reference
from paging_driver import load
from sharpest import sharpest
from tiny_models import tiny_config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from gapless.base.config import EngineConfig
from gapless.base.errors import CheckpointError, ConfigError
from gapless.demo import head_dir, weights_dir
from gapless.engine.frontdoor import locate
from gapless.model.config import model_length, read_model_config
from gapless.model.drafting.eagle import HeadConfig
from gapless.model.fields import UNUSED
from gapless.model.rope import frequencies_of
from gapless.model.spec import QKNorm

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}


def write(directory, generation=None, **changes):
    (directory / "config.json").write_text(json.dumps(tiny_config(**changes)))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def warnings(directory):
    """The fields that are not used, by file and name."""
    heard = read_model_config(directory).heard
    return {(one.path.name, one.name): one.why for one in heard if one.use == UNUSED}


# What comes from elsewhere without a fault

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 1e6}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
SAVED = {
    "yarn": {"rope_parameters": YARN},
    "llama3": {"rope_parameters": {**LLAMA3, "original_max_position_embeddings": 256}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "labels": {"id2label": {0: "a", 1: "b"}, "name_or_path": "org/x", "use_cache": False, "pad_token_id": 0},
}


OTHER_ROPES = ("gpt2", "gemma3", "olmo3", "phi3")
"""Families without a rope, with two, and with longrope alone"""
WINDOWS_OFF = {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1}


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("changes", sharpest(SAVED, 2))
def test_a_config_that_transformers_saves_has_no_warning(tmp_path, family, changes):
    windows = WINDOWS_OFF if family.startswith("qwen") else {}
    saved = SAVED["labels" if family.startswith(OTHER_ROPES) else changes]
    reference(family, **windows, **saved).save_pretrained(tmp_path)
    assert (tmp_path / "generation_config.json").exists()
    assert warnings(tmp_path) == {}


@pytest.mark.parametrize("family", ("Llama", "Qwen2", "Qwen3"))
def test_a_config_with_every_field_has_no_warning(tmp_path, family):
    config = getattr(transformers, f"{family}Config")(**SIZES)
    values = config.to_dict() | {"architectures": [f"{family}ForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(values, default=str))
    sampling = transformers.GenerationConfig(temperature=0.7, top_k=20, eos_token_id=2, pad_token_id=0)
    (tmp_path / "generation_config.json").write_text(json.dumps(sampling.to_dict() | {"do_sample": True}, default=str))
    assert warnings(tmp_path) == {}


def test_a_mimo_config_is_read_without_its_code_and_a_warning(tmp_path):
    reference("qwen2").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    code = {"AutoConfig": "configuration_mimo.MiMoConfig", "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM"}
    changes = {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes | {"auto_map": code}))
    config = read_model_config(tmp_path)
    attention = config.spec.layer.attention
    assert (attention.bias, attention.output_bias, attention.qk_norm) == (True, False, QKNorm.NONE)
    assert warnings(tmp_path) == {}


def test_the_demo_and_its_head_start_without_a_warning(caplog):
    locate(EngineConfig())
    HeadConfig.read(head_dir(), read_model_config(weights_dir()))
    assert caplog.records == []


# What a config says beyond that

STRANGE = {
    "num_heads": 3,
    "n_kv_heads": 1,
    "norm_eps": 1e-3,
    "layer_norm_epsilon": 0,
    "rotary_base": 5e5,
    "max_sequence_length": 16_384,
    "attention_dropout_rate": 0.1,
    "use_mrope": True,
    "mlp_bias": True,  # that of another family
    "sparse": {"every": 2},
    "repetition_penalty": 1.3,
    "original_max_position_embeddings": 512,
}


@pytest.mark.parametrize("name", STRANGE)
def test_an_unknown_field_is_warned_of_by_file_field_and_value(tmp_path, caplog, name):
    write(tmp_path, generation={}, **{name: STRANGE[name]})
    locate(EngineConfig(model=str(tmp_path), load_format="dummy"))
    (record,) = caplog.records
    assert record.getMessage() == f"{tmp_path}/config.json: {name} = {STRANGE[name]!r} is not used"
    assert record.fields == {"file": f"{tmp_path}/config.json", "field": name, "value": STRANGE[name]}


UNHEARD = "initializer_range", "num_labels", "pretraining_tp", "_name_or_path", "unsloth_version", "attention_dropout"
SILENT: list[dict[str, Any]] = [
    *({name: 0.5} for name in UNHEARD), *({"whatever": value} for value in (None, False, "", [], {})),
    {"hidden_act": "swish"}, {"logit_scale": 1.0}, {"num_experts": 0}, {"is_causal": True}, {"qk_norm": False},
]  # fmt: skip


@pytest.mark.parametrize("changes", SILENT)
def test_a_field_that_changes_nothing_has_no_warning(tmp_path, changes):
    assert warnings(write(tmp_path, **changes)) == {}


OTHERS = {
    "final_logit_softcapping": 30.0,
    "logit_scale": 0.0625,
    "num_local_experts": 8,
    "embedding_multiplier": 12.0,
    "no_rope_layers": [1, 0],
    "use_qk_norm": True,
    "per_layer_config": {"0": {"num_attention_heads": 2}},
    "is_causal": False,
    "rotary_pct": 0.25,
    "quantization": {"bits": 4},
    "model_type": "mistral",
    "layer_types": ["sliding_attention"] * 2,
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("family", ({}, LLAMA), ids=("qwen3", "llama"))
def test_a_field_that_changes_the_forward_pass_is_refused(tmp_path, name, family):
    write(tmp_path, **{**family, name: OTHERS[name]})
    with pytest.raises(CheckpointError, match=rf"config\.json: {name} .*, got ") as caught:
        read_model_config(tmp_path)
    assert repr(OTHERS[name]) in str(caught.value)


# Two spellings of one setting

DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
SHORT_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
TWO_SPELLINGS: list[tuple[dict[str, Any], set[str]]] = [
    ({"rope_parameters": DEFAULT, "rope_scaling": SHORT_YARN}, {"rope_parameters"}),
    ({"rope_parameters": {**SHORT_YARN, "rope_theta": 1e4}, "rope_scaling": SHORT_YARN}, set()),
    ({"rope_parameters": {**SHORT_YARN, "factor": 8.0}, "rope_scaling": SHORT_YARN}, {"rope_parameters"}),
    ({"rope_parameters": SHORT_YARN, "rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_parameters"}),
    ({"rope_parameters": SHORT_YARN, "rope_scaling": {}}, set()),
    ({"rope_parameters": {**DEFAULT, "rope_theta": 5e5}}, {"rope_theta"}),
    ({"rope_parameters": {**DEFAULT, "rope_theta": 5e5}, "rope_theta": 5e5}, set()),
    ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 7e4}, set()),
    ({"rope_parameters": {"rope_theta": 3e4}, "rope_scaling": {**SHORT_YARN, "rope_theta": 2e4}},
     {"rope_parameters", "rope_theta"}),
    ({"rope_scaling": {"type": "linear", "rope_type": "yarn", "factor": 4.0}}, {"rope_scaling.type"}),
    ({"rope_scaling": {"type": "dynamic", "rope_type": "linear", "factor": 3.0}}, {"rope_scaling.type"}),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0, "finetuned": True}}, set()),
    ({"rope_scaling": SHORT_YARN, "original_max_position_embeddings": 128},
     {"rope_scaling.original_max_position_embeddings"}),
    ({"rope_scaling": SHORT_YARN, "original_max_position_embeddings": 64}, set()),
    ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}, "original_max_position_embeddings": 32},
     {"rope_scaling.original_max_position_embeddings", "rope_theta"}),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, "original_max_position_embeddings": 64}},
     {"rope_scaling.original_max_position_embeddings"}),
    ({"rope_scaling": {"type": "dynamic", "factor": 2.0}, "rope_theta": 5e3}, set()),
    ({"rope_scaling": {"type": "default", "factor": 2.0}}, {"rope_scaling.factor"}),
    ({"rope_scaling": {**SHORT_YARN, "beta_fast": 16, "mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False}}, set()),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "unused"), TWO_SPELLINGS)
def test_two_spellings_of_a_rope_give_what_transformers_gives(tmp_path, changes, unused):
    write(tmp_path, **LLAMA, **changes)
    config = read_model_config(tmp_path)
    theirs = LlamaRotaryEmbedding(transformers.AutoConfig.from_pretrained(tmp_path))
    frequencies, scale = frequencies_of(
        config.spec.ropes[0], config.spec.layer.attention.head_dim, *[config.max_position_embeddings] * 2
    )
    torch.testing.assert_close(frequencies, theirs.inv_freq, rtol=1e-6, atol=0)
    assert scale == pytest.approx(theirs.attention_scaling)
    assert {name for _, name in warnings(tmp_path)} == unused


@pytest.mark.parametrize(
    "other", ({"rope_theta": 5e5}, {**DEFAULT, "rope_theta": 5e5}, {"type": "yarn", "rope_theta": 1})
)
def test_a_base_that_only_the_spelling_has_which_does_not_count_is_refused(tmp_path, other):
    write(tmp_path, rope_parameters=other, rope_scaling=SHORT_YARN)
    with pytest.raises(CheckpointError, match=r"rope_parameters\.rope_theta .* write it as rope_scaling\.rope_theta"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("dtypes", "read", "unused"),
    [
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16", {"torch_dtype"}),
        ({"dtype": "bfloat16", "torch_dtype": "torch.bfloat16"}, "bfloat16", set()),
        ({"dtype": None, "torch_dtype": "float16"}, "float16", set()),
        ({"dtype": "float32"}, "float32", set()),
        ({"dtype": "torch.float16", "torch_dtype": "float32"}, "float16", {"torch_dtype"}),
    ],
)
def test_the_newer_spelling_of_a_dtype_counts(tmp_path, dtypes, read, unused):
    write(tmp_path, **dtypes)
    assert read_model_config(tmp_path).dtype == read
    assert {name for _, name in warnings(tmp_path)} == unused


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"type": "linear", "factor": 4.0}, 512),
        ({"rope_type": "linear", "factor": 2.5}, 320),
        ({"rope_type": "linear", "factor": 0.5}, 128),
        ({"type": "dynamic", "factor": 2.0}, 256),
        ({**SHORT_YARN, "factor": 8.0}, 512),
        ({**LLAMA3, "original_max_position_embeddings": 64}, 128),
        (None, 128),
    ],
)
def test_a_stretched_rope_lengthens_the_longest_context_and_not_the_default(tmp_path, rope, longest):
    config = read_model_config(write(tmp_path, max_position_embeddings=128, rope_scaling=rope))
    assert model_length(EngineConfig(), config) == 128
    assert model_length(EngineConfig(max_model_len=longest), config) == longest
    assert model_length(EngineConfig(max_model_len=100), config) == 100
    says = rf"max_model_len \({longest + 1}\).*position_embeddings is .*: ask for {longest} or less"
    with pytest.raises(ConfigError, match=says):
        model_length(EngineConfig(max_model_len=longest + 1), config)


# generation_config.json

RECOMMENDED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
    ({"presence_penalty": 0.5, "frequency_penalty": -0.5}, {"presence_penalty": 0.5, "frequency_penalty": -0.5}),
    ({"max_new_tokens": 2048}, {"max_tokens": 2048}),
    ({"stop_strings": "###"}, {"stop": ("###",)}),
    ({"stop_strings": ["a", "b"]}, {"stop": ("a", "b")}),
    ({"top_k": -1}, {"top_k": 0}),
    ({"top_k": 50.0}, {"top_k": 50}),
    ({"top_k": 0, "top_p": 1, "temperature": 1, "do_sample": True}, {"top_k": 0, "top_p": 1, "temperature": 1}),
    ({"do_sample": False, "repetition_penalty": 1.2}, {"temperature": 0.0, "repetition_penalty": 1.2}),
    ({"do_sample": False, "temperature": 0.0}, {"temperature": 0.0}),
    ({"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "use_cache": False, "max_length": 4096}, {}),
    (
        {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "min_p": 0},
        {"temperature": 0.6, "top_p": 0.95, "min_p": 0},
    ),
    ({"do_sample": False, "top_p": 0.95, "top_k": 20}, {"temperature": 0.0, "top_p": 0.95, "top_k": 20}),
    ({"bad_words_ids": None, "suppress_tokens": [], "watermarking_config": {}}, {}),
]


@pytest.mark.parametrize(("generation", "sampling"), RECOMMENDED)
def test_every_default_that_can_be_honoured_is(tmp_path, generation, sampling):
    write(tmp_path, generation=generation)
    assert read_model_config(tmp_path).default_sampling == sampling
    assert warnings(tmp_path) == {}


@pytest.mark.parametrize("generation", [generation for generation, _ in RECOMMENDED])
def test_defaults_of_an_old_checkpoint_are_read_from_its_config(tmp_path, generation):
    write(tmp_path, **generation)
    old = read_model_config(tmp_path).default_sampling
    assert warnings(tmp_path) == {}
    assert old == read_model_config(write(tmp_path, generation=generation)).default_sampling


NOT_HONOURED: dict[str, Any] = {
    "num_beams": 4,
    "bad_words_ids": [[5]],
    "suppress_tokens": [1, 2],
    "begin_suppress_tokens": [220],
    "no_repeat_ngram_size": 3,
    "typical_p": 0.9,
    "epsilon_cutoff": 1e-4,
    "min_new_tokens": 5,
    "forced_eos_token_id": 2,
    "num_return_sequences": 2,
    "guidance_scale": 1.5,
    "penalty_alpha": 0.6,
    "max_length": 100,
    "watermarking_config": {"bias": 2.0},
    "sequence_bias": [[[1], 2.0]],
    "chat_format": "chatml",
}


@pytest.mark.parametrize("name", NOT_HONOURED)
def test_a_default_that_is_not_honoured_is_warned_of(tmp_path, caplog, name):
    write(tmp_path, generation={name: NOT_HONOURED[name]})
    locate(EngineConfig(model=str(tmp_path), load_format="dummy"))
    (record,) = caplog.records
    said = f"{tmp_path}/generation_config.json: {name} = {NOT_HONOURED[name]!r} is not used"
    assert record.getMessage().startswith(said)


def test_a_temperature_beside_greedy_is_warned_of(tmp_path):
    write(tmp_path, generation={"do_sample": False, "temperature": 0.6})
    assert warnings(tmp_path) == {("generation_config.json", "temperature"): "do_sample is false"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 0),
        ("max_new_tokens", 0),
        ("stop_strings", [""]),
        ("stop_strings", [1]),
        ("top_k", -2),
        ("presence_penalty", 3),
        ("frequency_penalty", "0"),
        ("do_sample", "no"),
        ("temperature", -1),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", 2.5),
        ("min_p", "0"),
    ],
)
def test_a_default_that_no_request_may_have_is_refused_by_name(tmp_path, name, value):
    write(tmp_path, generation={name: value})
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {name}"):
        read_model_config(tmp_path)


EVERY = ("config.json", "eos_token_id"), ("generation_config.json", "eos_token_id")


@pytest.mark.parametrize(
    ("config", "generation", "ends", "unused"),
    [
        (2, 2, (2,), ()),
        (2, [2, 3, 2], (2, 3), ()),
        (2, None, (2,), ()),
        (2, 3, (3,), EVERY[:1]),
        (2, -1, (2,), EVERY[1:]),
        (2, [97, 5], (5,), EVERY),
        (200, None, (), EVERY[:1]),
        ([1, -1], None, (1,), EVERY[:1]),
        (-1, 4, (4,), EVERY[:1]),
        (None, None, (), ()),
    ],
)
def test_end_tokens_outside_of_the_vocabulary_are_left_out(tmp_path, config, generation, ends, unused):
    write(tmp_path, generation={} if generation is None else {"eos_token_id": generation}, eos_token_id=config)
    assert read_model_config(tmp_path).eos_token_ids == ends
    assert set(warnings(tmp_path)) == set(unused)


def test_a_checkpoint_with_strange_fields_still_loads(tmp_path):
    reference("llama").save_pretrained(tmp_path)
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({"top_k": -1, "eos_token_id": -1, "num_beams": 2}))
    assert load(tmp_path).config.eos_token_ids == (2,)


def test_a_head_with_an_unknown_field_is_warned_of(tmp_path, caplog):
    shutil.copytree(head_dir(), tmp_path / "head")
    path = tmp_path / "head" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"parallel_drafts": 2}))
    demo = read_model_config(weights_dir())
    HeadConfig.read(tmp_path / "head", demo)
    assert f"{path}: parallel_drafts = 2 is not used" in caplog.text
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eagle_config": {"use_aux_hidden_state": False}}))
    with pytest.raises(CheckpointError, match=r"eagle_config\.use_aux_hidden_state must be true"):
        HeadConfig.read(tmp_path / "head", demo)
