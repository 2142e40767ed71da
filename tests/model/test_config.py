"""config.json and generation_config.json: what is read, and what each mistake says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from gapless.base.errors import CheckpointError, ConfigError
from gapless.model.config import read_model_config, resolve_model_dir
from gapless.model.spec import QKNorm

PLAIN = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 7,
}
GONE = object()


def write(directory, generation=None, **changes):
    values = {name: value for name, value in {**PLAIN, **changes}.items() if value is not GONE}
    (directory / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


def test_a_plain_config_is_read_whole(tmp_path):
    config = read_model_config(write(tmp_path))
    spec, at = config.spec, config.spec.layer.attention
    assert (spec.vocab_size, len(spec.layers), at.heads, at.kv_heads, at.head_dim) == (100, 3, 4, 2, 8)
    assert (config.dtype, spec.tied, spec.norm.eps, spec.ropes[0].theta) == ("bfloat16", True, 1e-5, 1e6)
    assert flags_of(config) == (True, False, False, False)
    assert config.eos_token_ids == (7,)
    assert config.default_sampling == {}


def flags_of(config):
    layer = config.spec.layer
    return layer.attention.bias, layer.attention.output_bias, layer.mlp.bias, layer.attention.qk_norm is QKNorm.HEAD


@pytest.mark.parametrize(
    ("architecture", "flags"),
    (
        ("LlamaForCausalLM", (True, True, True, False)),
        ("Qwen2ForCausalLM", (True, False, False, False)),
        ("Qwen3ForCausalLM", (True, True, False, True)),
    ),
)
def test_families_differ_by_flags(tmp_path, architecture, flags):
    changes = {"attention_bias": True, "mlp_bias": True, "head_dim": 8}
    config = read_model_config(write(tmp_path, architectures=[architecture], **changes))
    assert flags_of(config) == flags


def test_a_missing_head_dim_has_its_family_default(tmp_path):
    for architecture, size in (("LlamaForCausalLM", 8), ("Qwen3ForCausalLM", 128)):
        config = read_model_config(write(tmp_path, architectures=[architecture]))
        assert config.spec.layer.attention.head_dim == size


BAD_FIELDS = (
    ("architectures", ["T5ForConditionalGeneration"], "Qwen3ForCausalLM"),
    ("architectures", GONE, "architectures is missing"),
    ("architectures", "LlamaForCausalLM", "architectures"),
    ("auto_map", {"AutoModel": "modeling.Model"}, "asks for code"),
    ("quantization_config", {"bits": 4}, "quant_method must be one of"),
    ("vocab_size", GONE, "vocab_size is missing"),
    ("hidden_size", "32", "whole number"),
    ("hidden_size", True, "whole number"),
    ("num_hidden_layers", 0, "at least 1"),
    ("num_attention_heads", 3.0, "whole number"),
    ("num_key_value_heads", 3, "must divide num_attention_heads"),
    ("max_position_embeddings", GONE, "is missing"),
    ("head_dim", 7, "must be even"),
    ("rms_norm_eps", 0, "above 0"),
    ("rms_norm_eps", float("nan"), "must be a number"),
    ("hidden_act", "snake", "silu"),
    ("tie_word_embeddings", 1, "true or false"),
    ("torch_dtype", "float8_e4m3fn", "bfloat16"),
    ("dtype", 16, "must be a string"),
    ("rope_theta", "1e6", "must be a number"),
    ("rope_theta", -1, "above 0"),
    ("eos_token_id", "2", "0 to 99"),
    ("eos_token_id", [1, "2"], "0 to 99"),
    ("layer_types", ["sliding_attention"] * 3, "full_attention"),
    ("partial_rotary_factor", 0.5, "must be 1"),
)


@pytest.mark.parametrize(("name", "value", "says"), BAD_FIELDS)
def test_a_wrong_field_is_named_with_its_file(tmp_path, name, value, says):
    with pytest.raises(CheckpointError) as caught:
        read_model_config(write(tmp_path, **{name: value}))
    text = str(caught.value)
    assert str(tmp_path / "config.json") in text
    assert name in text
    assert says in text


BAD_ROPES = (
    ({"rope_type": "longrope"}, "short_factor is missing"),
    ({"rope_type": "longrope", "short_factor": [1.0] * 4}, "long_factor is missing"),
    ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 0.0, 1.0]}, "long_factor must be"),
    ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0] * 3}, "long_factor must be a list of 4"),
    ({"type": "unheard-of"}, "rope_type"),
    ({"rope_type": "linear"}, "factor is missing"),
    ({"rope_type": "linear", "factor": 0}, "factor must be above"),
    ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor is missing"),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}, "high_freq_factor"),
    ({"rope_type": "yarn", "factor": "4"}, "factor"),
    ({"rope_type": "yarn", "factor": 4.0, "truncate": "no"}, "truncate"),
    ({"full_attention": {"rope_type": "default"}}, "full_attention"),
    ([1], "must be an object"),
)


@pytest.mark.parametrize(("rope", "says"), BAD_ROPES)
@pytest.mark.parametrize("spelling", ("rope_scaling", "rope_parameters"))
def test_a_wrong_rope_is_named(tmp_path, rope, says, spelling):
    with pytest.raises(CheckpointError) as caught:
        read_model_config(write(tmp_path, **{spelling: rope}))
    text = str(caught.value)
    assert str(tmp_path / "config.json") in text
    assert spelling in text
    assert says in text


def test_sliding_window_only_matters_in_use(tmp_path):
    off = {"sliding_window": 128, "use_sliding_window": False}
    beyond = {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 3}
    used = {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 2}
    kinds = {**used, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    for changes, sizes in ((off, [0, 0, 0]), (beyond, [0, 0, 0]), (used, [0, 0, 128]), (kinds, [128, 0, 128])):
        config = read_model_config(write(tmp_path, **changes))
        assert [layer.attention.size for layer in config.spec.layers] == sizes


@pytest.mark.parametrize(
    ("content", "says"), ((None, "no such file"), ("{", "not valid JSON"), ("[]", "one JSON object"))
)
@pytest.mark.parametrize("name", ("config.json", "generation_config.json"))
def test_a_broken_file_is_named(tmp_path, content, says, name):
    write(tmp_path, generation={})
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    elif name == "generation_config.json":
        assert read_model_config(tmp_path).default_sampling == {}
        return
    with pytest.raises(CheckpointError, match=says) as caught:
        read_model_config(tmp_path)
    assert str(tmp_path / name) in str(caught.value)


def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path):
    assert resolve_model_dir(str(tmp_path)) == tmp_path
    with pytest.raises(ConfigError, match=r"no directory 'Qwen/Qwen3-0\.6B'; give that of a checkpoint"):
        resolve_model_dir("Qwen/Qwen3-0.6B")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"no directory 'm-Q4_K_M\.gguf'; give that of a checkpoint, a GGUF file"):
        resolve_model_dir("m-Q4_K_M.gguf")
    with pytest.raises(ConfigError, match="is a file"):
        resolve_model_dir(str(tmp_path / "file"))


def test_reading_a_config_imports_no_torch():
    code = "import sys, gapless.model.config; assert 'torch' not in sys.modules, 'torch was imported'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
