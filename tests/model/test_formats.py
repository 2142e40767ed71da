"""Formats of checkpoints: what is read is the numbers that their own rules give, in the layout that is promised."""

from __future__ import annotations

import json

import pytest
import torch
from model.format_cases import BY_NAME, CASES, SIZES, write_checkpoints
from safetensors.torch import load_file, save_file
from tiny_models import tiny_config

from gapless.base.config import EngineConfig
from gapless.base.errors import CheckpointError
from gapless.base.files import SINGLE
from gapless.cli.model_report import rows
from gapless.kernels.kinds import DENSE
from gapless.model.config import read_model_config
from gapless.model.drafting.mtp import load_mtp
from gapless.model.dummy import fill_dummy
from gapless.model.loader import load_model, read_params
from gapless.model.native_check import check_native
from gapless.model.params import PRODUCTS, allocate


def read(folder, dtype=torch.float32):
    config = read_model_config(folder)
    params = allocate(config, dtype, torch.device("cpu"))
    return read_params(params, folder, config)


COHERE = {"architectures": ["CohereForCausalLM"], "model_type": "cohere", "layer_norm_eps": 1e-5, "logit_scale": 1.0}
"""Permutes the rows of queries and keys"""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_weights_are_the_numbers_of_the_formats_own_rules(tmp_path, case, dtype):
    packed, plain = (read(folder, dtype) for folder in write_checkpoints(tmp_path, case))
    for one, other in zip(packed.layers, plain.layers, strict=True):
        for name in PRODUCTS:
            matrix, wanted = getattr(one, name), getattr(other, name)
            assert matrix.layout == case.layout
            assert matrix.multiplied_out().tensors[0].equal(wanted.tensors[0]), name


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("name", ["fp8_128", "ct_int4_zeros", "gptq_order"])
def test_rows_are_permuted_for_rope_with_their_scales(tmp_path, name, head_dim):
    folders = write_checkpoints(tmp_path, BY_NAME[name], **COHERE, head_dim=head_dim, num_hidden_layers=1)
    packed, plain = map(read, folders)
    for product in PRODUCTS:
        matrix, wanted = getattr(packed.layers[0], product), getattr(plain.layers[0], product)
        assert matrix.multiplied_out().tensors[0].equal(wanted.tensors[0])
    assert (packed.layers[0].qkv.layout == DENSE) == (name == "gptq_order")


KV_NAMES = [
    ("self_attn.k_scale", "self_attn.v_scale", ()),
    ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale", (1,)),
    ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale", ()),
]


@pytest.mark.parametrize(("key", "value", "shape"), KV_NAMES)
def test_scales_of_keys_and_values_are_read_by_every_name(tmp_path, key, value, shape):
    packed, _ = write_checkpoints(tmp_path, BY_NAME["fp8_static"])
    tensors, scales = load_file(packed / SINGLE), torch.tensor([[0.25, 0.5], [0.125, 2.0]])
    assert read(packed).kv_scales is None
    pairs = {f"model.layers.{i}.{name}": scales[i, j].reshape(shape).clone()
             for i in range(2) for j, name in enumerate((key, value))}  # fmt: skip
    save_file(tensors | pairs, packed / SINGLE)
    assert read(packed).kv_scales.equal(scales)
    del pairs[f"model.layers.1.{value}"]
    save_file(tensors | pairs, packed / SINGLE)
    with pytest.raises(CheckpointError, match=r"v_scale of layer 1 must be numbers above 0, got \[0.125, 0.0\]"):
        read(packed)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_dummy_weights_are_in_the_layouts_of_a_format_and_are_reported(tmp_path, case):
    values = tiny_config(**SIZES, head_dim=64, quantization_config=case.config)
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = read_model_config(tmp_path)
    params = allocate(config, torch.float32, torch.device("cpu"))
    fill_dummy(params, 0, config)
    for layer in params.layers:
        assert {getattr(layer, name).layout for name in PRODUCTS} == {case.layout}
        assert all(bool(getattr(layer, name).values().any()) for name in PRODUCTS)
    text = dict(rows(config))["weights"]
    assert text.startswith(f"{case.config['quant_method']}: 8 products {case.layout}")
    assert ("(" in text) == (case.layout == DENSE)


@pytest.mark.parametrize("name", ["fp8_128", "ct_int4_zeros", "gptq_asym"])
def test_an_mtp_layer_is_read_in_the_format_of_its_model(tmp_path, name):
    found = []
    for folder in write_checkpoints(tmp_path, BY_NAME[name], mtp=True):
        model = load_model(EngineConfig(model=str(folder), max_model_len=64), torch.device("cpu"))
        found.append(load_mtp(folder, model))
    packed, plain = found
    assert packed.join.equal(plain.join) and packed.norm.equal(plain.norm)
    for product in PRODUCTS:
        matrix, wanted = getattr(packed.layer, product), getattr(plain.layer, product)
        assert matrix.layout == BY_NAME[name].layout
        assert matrix.multiplied_out().tensors[0].equal(wanted.tensors[0])


@pytest.mark.parametrize("name", ["fp8_128", "ct_int4_zeros", "awq"])
def test_the_check_of_a_native_model_reads_its_format(tmp_path, name):
    packed, _ = write_checkpoints(tmp_path, BY_NAME[name])
    check_native(packed)
