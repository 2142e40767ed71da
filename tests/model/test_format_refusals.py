"""Fields and tensors of quantised checkpoints that would change numbers are refused by name, before any is read."""

from __future__ import annotations

import json
import re

import pytest
import torch
from model.format_cases import BY_NAME, write_checkpoints
from model.test_formats import read
from safetensors.torch import load_file, save_file
from tiny_models import tiny_config

from gapless.base.errors import CheckpointError
from gapless.base.files import SINGLE
from gapless.model.config import read_model_config
from gapless.model.formats.of_model import format_of

GPTQ, AWQ, FP8 = (BY_NAME[name].config for name in ("gptq_sym", "awq", "fp8_128"))
GGUF = {"quant_method": "gguf", "types": {}}
INT4, WEIGHTS = BY_NAME["ct_int4_group"].config, BY_NAME["ct_int4_group"].config["config_groups"]["group_0"]["weights"]


def compressed(group=None, **weights):
    """The config of packed weights with changes to its group or its weights."""
    changed = {"targets": ["Linear"], "weights": WEIGHTS | weights} | (group or {})
    return INT4 | {"config_groups": {"group_0": changed}}


REFUSED = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "quant_method must be one of fp8, .*'bitsandbytes'.*use"),
    ({"bits": 4}, "quant_method must be one of fp8"),
    (GPTQ | {"bits": 3}, "bits must be 4 or 8, got 3"),
    ({**GPTQ, "group_size": 0}, "group_size must be a whole number above 0, or -1, got 0"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format must be gptq or gptq_v2.*got 'marlin'"),
    (GPTQ | {"pack_dtype": "int16"}, "pack_dtype must be int32"),
    (GPTQ | {"rotation": "hadamard"}, "rotation is no known field of gptq.*got 'hadamard'"),
    (GPTQ | {"dynamic": {"+:.*down": {"bits": 2}}}, r"bits must be 4 or 8, got 2"),
    (GPTQ | {"dynamic": {"+:.*down": {"adapter": 1}}}, r"dynamic may change bits, .*not 'adapter'"),
    (GPTQ | {"dynamic": {"+:(": {}}}, r"dynamic must be regular expressions .*got '\('"),
    (GPTQ | {"dynamic": {r"-:(([a-z0-9_]+\.?)+)+!": {}}}, "dynamic must not repeat what repeats: it may never end"),
    (GPTQ | {"dynamic": {"-:" + "x" * 301: {}}}, "dynamic must be patterns of at most 300 characters"),
    (GPTQ | {"modules_in_block_to_quantize": 5}, "modules_in_block_to_quantize must be a list of names.*got 5"),
    (GPTQ | {"modules_in_block_to_quantize": [["a"], [3]]}, "modules_in_block_to_quantize must be a list of names"),
    *(
        (GPTQ | {"dynamic": {"+:.*": value}}, rf"dynamic\.\+:\.\* must be an object, got {re.escape(str(value))}")
        for value in (None, 4, [{}])
    ),
    (GPTQ | {"dynamic": {".*": {"bits": [4]}}}, r"dynamic\.\.\*\.bits must be 4 or 8, got \[4\]"),
    (GPTQ | {"dynamic": {".*": {"bits": 4.0}}}, r"bits must be 4 or 8, got 4\.0"),
    (GPTQ | {"dynamic": {".*": {"group_size": [128]}}}, "group_size must be a whole number above 0"),
    (GGUF | {"types": ["Q4_0"]}, "types must be the table that opening a .gguf file writes"),
    (GGUF | {"types": {"lm_head": ["Q4_0"]}}, "types must be the table that opening a .gguf file writes"),
    (GGUF | {"turned": 4}, "turned must be numbers of heads by names of modules, got 4"),
    (GGUF | {"turned": {"self_attn.q_proj": "four"}}, "turned must be numbers of heads by names of modules"),
    (GGUF | {"turned": {"self_attn.q_proj": 0}}, "turned must be numbers of heads by names of modules"),
    (AWQ | {"bits": 8}, "bits must be 4, got 8"),
    (AWQ | {"version": "gemv"}, "version must be gemm.*got 'gemv'"),
    (AWQ | {"zero_point": False}, "zero_point must be true, got False"),
    (FP8 | {"fmt": "e5m2"}, "fmt must be e4m3, got 'e5m2'"),
    (FP8 | {"weight_block_size": [128]}, "weight_block_size must be two whole numbers"),
    (FP8 | {"activation_scheme": "x"}, "activation_scheme must be dynamic or static"),
    (INT4 | {"format": "nvfp4-pack-quantized"}, "format must be one of .*got 'nvfp4-pack-quantized'"),
    (INT4 | {"format": "marlin-24"}, "format must be one of .*got 'marlin-24'"),
    (INT4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config must be dense.*'sparse-24-bitmask'"),
    (INT4 | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config must be empty"),
    (INT4 | {"kv_cache_scheme": {"type": "int", "num_bits": 8}}, "kv_cache_scheme.type must be float, got 'int'"),
    (INT4 | {"config_groups": {}}, "config_groups must have a group"),
    (INT4 | {"config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16 must be an object with targets"),
    (INT4 | {"ignore": ["re:(a{1,40}){2,40}"]}, "ignore must not repeat what repeats"),
    (INT4 | {"ignore": [r"re:(?:(?=\w*?)x)*+"]}, "ignore must not repeat what repeats"),
    (INT4 | {"ignore": ["re:("]}, r"ignore must be regular expressions"),
    (compressed(num_bits=3), "weights.num_bits must be 4 or 8 of pack-quantized, got 3"),
    (compressed(strategy="tensor_group"), "weights.strategy must be tensor, .*got 'tensor_group'"),
    (compressed(group_size=None), "weights.group_size must be a whole number"),
    (compressed(actorder="x"), "weights.actorder must be group, weight or null"),
    (compressed(codebook="x"), "weights.codebook is no known field"),
    (compressed({"targets": ["LlamaAttention"]}), "targets must be names, .*got 'LlamaAttention'"),
    (compressed({"output_activations": {"num_bits": 8}}), "output_activations must be null"),
]


@pytest.mark.parametrize(("config", "text"), REFUSED)
def test_a_field_that_cannot_be_honoured_is_refused_by_name(tmp_path, config, text):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(quantization_config=config)))
    with pytest.raises(CheckpointError, match=f"config.json: quantization_config.*{text}") as caught:
        read_model_config(tmp_path)
    assert "\n" not in str(caught.value)


Q = "model.layers.0.self_attn.q_proj"
TENSORS = [
    ("gptq_sym", "g_idx", lambda x: x.flip(0), "g_idx has inputs in another order: set desc_act"),
    ("gptq_sym", "g_idx", lambda x: x + 9, "g_idx must have groups below 3, got 11"),
    ("gptq_sym", "bias", lambda x: x + 1, "bias is not zero"),
    ("gptq_8", "qzeros", lambda x: x - 1, "zero points other than 128: set sym"),
    ("gptq_sym", "scales", lambda x: x * torch.nan, "the scales of 'model.layers.0.self_attn.q_proj' must be finite"),
    ("fp8_128", "weight_scale_inv", lambda x: x / 0, "the scales of .*q_proj' must be finite"),
    ("awq", "scales", lambda x: x[:1], "has shape .*must be"),
    ("fp8_static", "input_scale", lambda x: -x, "input_scale must be a number above 0"),
    ("fp8_static", "weight", lambda x: x.float(), "is F32; supported are F8_E4M3"),
    ("fp8_static", "weight_scale", None, "has neither of the tensors"),
    ("fp8_128", "weight_scale_inv", None, "weight_scale_inv' is missing"),
    ("ct_int4_group", "weight_shape", lambda x: x + 1, "weight_shape is"),
]


@pytest.mark.parametrize(("name", "tensor", "change", "text"), TENSORS)
def test_a_tensor_that_config_json_does_not_bear_out_is_refused(tmp_path, name, tensor, change, text):
    packed, _ = write_checkpoints(tmp_path, BY_NAME[name], num_hidden_layers=1)
    tensors = load_file(packed / SINGLE)
    old = tensors.pop(f"{Q}.{tensor}")
    if change is not None:
        tensors[f"{Q}.{tensor}"] = change(old).contiguous()
    save_file(tensors, packed / SINGLE)
    with pytest.raises(CheckpointError, match=text):
        read(packed)


def test_a_head_may_be_quantised_or_plain_whatever_the_config_says(tmp_path):
    packed, plain = write_checkpoints(tmp_path, BY_NAME["fp8_128"], num_hidden_layers=1, tie_word_embeddings=False)
    tensors, dense = load_file(packed / SINGLE), load_file(plain / SINGLE)
    written, wide = BY_NAME["fp8_128"].write(dense["model.embed_tokens.weight"].numpy()[::-1].copy())
    stored = {f"lm_head.{name}": tensor for name, tensor in written.items()}
    for head in (stored, {"lm_head.weight": torch.from_numpy(wide)}):
        save_file(tensors | head, packed / SINGLE)
        assert read(packed).head.equal(torch.from_numpy(wide))
    save_file(tensors, packed / SINGLE)
    with pytest.raises(CheckpointError, match="no tensor of 'lm_head' is there"):
        read(packed)
    save_file(tensors | {"lm_head.weight": stored["lm_head.weight"]}, packed / SINGLE)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight_scale_inv' is missing"):
        read(packed)


PARTS = [
    ("gptq_sym", {"dynamic": {"-:.*down_proj": {}}}, "mlp.down_proj"),
    ("gptq_sym", {"modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.up_proj"]]},
     "mlp.down_proj"),
    ("gptq_sym", {"dynamic": {r"-:model\.layers\.\d+\.mlp\.(gate|up|down)_proj$": {}}}, "mlp.down_proj"),
    ("gptq_sym", {"dynamic": {r"-:.*\.(?:\d{1,3}\.)?mlp\.": {}}}, "mlp.down_proj"),
    ("awq", {"modules_to_not_convert": ["down_proj"]}, "mlp.down_proj"),
    ("fp8_128", {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.down_proj"]}, "mlp.down_proj"),
    ("fp8_128", {"ignored_layers": ["mlp.down_proj"]}, "mlp.down_proj"),
    ("ct_int4_group", {"ignore": ["lm_head", "re:.*mlp.down.*"]}, "mlp.down_proj"),
    ("ct_int4_group", {"ignore": ["model.layers.0.mlp.down_proj"]}, "mlp.down_proj"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "module"), PARTS)
def test_a_module_that_a_config_leaves_out_is_plain(tmp_path, name, changes, module):
    packed, _ = write_checkpoints(tmp_path, BY_NAME[name]._replace(config=BY_NAME[name].config | changes))
    found = format_of(read_model_config(packed))
    assert found is not None
    assert found.weight(f"model.layers.0.{module}", 192, 320) is None
    assert found.weight("model.layers.0.self_attn.q_proj", 192, 192) is not None
