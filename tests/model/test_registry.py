"""Which implementation serves a checkpoint, and what each refusal says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gapless.base.errors import CheckpointError, ForeignModelError
from gapless.model import registry
from gapless.model.config import read_model_config

PLAIN = {
    **{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 100, "hidden_size": 32},
    **{"intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8},
    "max_position_embeddings": 512,
}
FALCON = {"architectures": ["FalconForCausalLM"], "model_type": "falcon"}
"""No native family"""


@pytest.fixture(autouse=True)
def with_transformers(monkeypatch):
    monkeypatch.setattr(registry, "has_transformers", lambda: True)


def read(directory, impl="auto", **changes):
    values = {name: value for name, value in {**PLAIN, **changes}.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(values))
    return read_model_config(directory, impl=impl)


SERVED = (
    ("auto", {}, "native", "it has a native family"),
    ("native", {}, "native", "it has a native family"),
    ("transformers", {}, "transformers", "model_impl asks for it"),
    ("auto", FALCON, "transformers", "no native family reads it"),
    ("transformers", FALCON, "transformers", "no native family reads it"),
    ("auto", {"hidden_act": "snake"}, "transformers", "hidden_act must be one of"),
    ("auto", {"num_experts": 8}, "transformers", "num_experts changes what the model computes"),
)


@pytest.mark.parametrize(("asked", "changes", "impl", "reason"), SERVED)
def test_a_model_is_served_by_a_family_or_by_transformers_when_asked(tmp_path, asked, changes, impl, reason):
    found = read(tmp_path, asked, **changes)
    assert (found.impl, found.architecture) == (impl, {**PLAIN, **changes}["architectures"][0])
    assert reason in found.impl_reason
    assert (found.spec.vocab_size, found.max_position_embeddings) == (100, 512)


TEXT = {"model_type": "gemma3_text", "vocab_size": 100}
REFUSED = (
    # changes, and parts of the one line: the field, the value, and what helps
    ({"architectures": None}, ["architectures is missing", "manual's page Models"]),
    ({"architectures": []}, ["architectures must name a model's class", "[]"]),
    ({"architectures": "Qwen3ForCausalLM"}, ["architectures must name", "'Qwen3ForCausalLM'"]),
    (
        {"architectures": ["Qwen33ForCausalLM"]},
        ["architectures", "'Qwen33ForCausalLM'", "did you mean Qwen3ForCausalLM?"],
    ),
    ({"architectures": ["FalkonForCausalLM"]}, ["'FalkonForCausalLM'", "did you mean FalconForCausalLM?"]),
    ({"architectures": ["Nothing"]}, ["architectures", "'Nothing'", "manual's page Models"]),
    ({"model_type": "llama"}, ["model_type must be 'qwen3', as architectures says Qwen3ForCausalLM", "'llama'"]),
    ({**FALCON, "model_type": "gpt2"}, ["model_type must be 'falcon', as architectures says Falcon", "'gpt2'"]),
    ({"auto_map": {"AutoModel": "m.M"}}, ["auto_map", "never run", "remove the field"]),
    ({**FALCON, "auto_map": {"AutoModel": "m.M"}}, ["auto_map", "never run", "remove the field"]),
    ({"architectures": ["Own"], "auto_map": {"AutoModel": "m.M"}}, ["auto_map", "no Own here", "needs no code"]),
    (
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        ["quantization_config.quant_method", "or the bfloat16 one"],
    ),
    ({**FALCON, "quantization_config": {"quant_method": "modelopt"}}, ["quantization_config.quant_method", "bfloat16"]),
    (
        {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": TEXT},
        ["text_config", "'gemma3'", "pictures or sound", "'gemma3_text'", "saved as a checkpoint of its own"],
    ),
    (
        {"architectures": ["OwnVLM"], "model_type": "own", "vision_config": {}},
        ["vision_config", "'own'", "its text model alone"],
    ),
    (
        {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "is_encoder_decoder": True},
        ["is_encoder_decoder must be false", "True"],
    ),
    ({"architectures": ["MambaForCausalLM"], "model_type": "mamba"}, ["model_type keeps a state", "'mamba'"]),
    ({"architectures": ["RwkvForCausalLM"], "model_type": "rwkv"}, ["model_type keeps a state", "'rwkv'"]),
    (
        {**FALCON, "layer_types": ["linear_attention", "full_attention"]},
        ["layer_types has layers with a state", "'linear_attention'", "attention alone"],
    ),
    ({"architectures": ["BloomForCausalLM"], "model_type": "bloom"}, ["model_type adds a bias", "'bloom'", "rotary"]),
    ({**FALCON, "alibi": True}, ["alibi adds a bias", "True", "rotary or learned"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers", "at least 1", "0"]),
    ({**FALCON, "vocab_size": None}, ["vocab_size is missing"]),
    ({**FALCON, "max_position_embeddings": None}, ["max_position_embeddings is missing"]),
    ({**FALCON, "dtype": "float8_e4m3fn"}, ["dtype", "'float8_e4m3fn'", "bfloat16"]),
)


@pytest.mark.parametrize(("changes", "parts"), REFUSED)
def test_a_refusal_is_one_line_with_field_value_and_mend(tmp_path, changes, parts):
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, **changes)
    text = str(caught.value)
    assert text.startswith(f"{tmp_path / 'config.json'}: ") and "\n" not in text
    assert [part for part in parts if part not in text] == [], text


@pytest.mark.parametrize(
    ("changes", "parts"),
    (
        ({"hidden_act": "snake"}, ("hidden_act must be one of", "'snake'")),
        (FALCON, ("architectures has no native family", "FalconForCausalLM")),
        ({"architectures": ["Nothing"]}, ("architectures has no native family", "Nothing")),
    ),
)
def test_a_model_without_a_family_is_refused_with_the_extra_when_transformers_is_missing(
    tmp_path, monkeypatch, changes, parts
):
    monkeypatch.setattr(registry, "has_transformers", lambda: False)
    with pytest.raises(CheckpointError) as caught:
        read(tmp_path, **changes)
    assert all(part in str(caught.value) for part in (*parts, "pip install 'gapless[transformers]'"))
    with pytest.raises(CheckpointError, match="pip install"):
        read(tmp_path, "transformers")


def test_a_foreign_field_is_an_error_when_native_is_asked_for(tmp_path):
    with pytest.raises(ForeignModelError, match="hidden_act"):
        read(tmp_path, "native", hidden_act="snake")
    with pytest.raises(CheckpointError, match=r"architectures must be one of .*Qwen3ForCausalLM"):
        read(tmp_path, "native", **FALCON)


@pytest.mark.parametrize("name", registry.LENGTHS)
def test_the_longest_sequence_is_read_by_any_common_name(tmp_path, name):
    assert read(tmp_path, **{**FALCON, "max_position_embeddings": None, name: 77}).max_position_embeddings == 77


def test_classes_of_transformers_are_those_of_its_own_table():
    found = {}
    for kind, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        for name in names if isinstance(names, tuple) else (names,):
            found.setdefault(name, set()).add(kind)
    assert registry.classes_of_transformers() == found


def test_reading_a_config_imports_neither_torch_nor_transformers(tmp_path):
    for changes in ({}, FALCON):
        read(tmp_path, **changes)
        program = (
            "import sys; from pathlib import Path; from gapless.model import registry, config\n"
            "registry.has_transformers = lambda: True\n"
            f"config.read_model_config(Path({str(tmp_path)!r}), impl='auto')\n"
            "assert not {'torch', 'transformers'} & set(sys.modules)"
        )
        subprocess.run([sys.executable, "-c", program], check=True)
