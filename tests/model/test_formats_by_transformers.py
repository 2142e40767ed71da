"""Quantised checkpoints by the Transformers backend: the logits of the same numbers, by products that keep them."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
import transformers
from model.format_cases import BY_NAME, write_checkpoints
from model.transformers_rows import SERVED, make
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from gapless.base.config import EngineConfig
from gapless.base.errors import CheckpointError
from gapless.base.files import SINGLE
from gapless.kernels.kinds import WeightKind
from gapless.kernels.plain import KERNELS
from gapless.model.loader import load_model
from gapless.model.self_check import paged_logits, tokens
from gapless.model.transformers_backend import OurProduct

CPU = torch.device("cpu")
DENSE_ONLY = KERNELS._replace(products={WeightKind.DENSE: KERNELS.products[WeightKind.DENSE]})
"""Others may round what they multiply by"""
NAMES = ("fp8_128", "fp8_static", "ct_int4_zeros", "ct_int8_channel", "ct_mxfp4", "gptq_asym", "gptq_order", "awq")


def logits(folder, kernels=DENSE_ONLY, **options):
    config = EngineConfig(model=str(folder), model_impl="transformers", max_model_len=64, **options)
    model = load_model(config, CPU, kernels)
    with torch.no_grad():
        return model, paged_logits(model, tokens(model.vocab_size, CPU))


class Kept:
    """A product that keeps the matrix that it is made of."""

    def __init__(self, matrix):
        self.matrix, self.kind = matrix, matrix.layout.kind

    @classmethod
    def of(cls, matrix):
        return cls(matrix)

    def __call__(self, x, out=None):
        return torch.nn.functional.linear(x, self.matrix.multiplied_out().tensors[0], self.matrix.bias)


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_plain_numbers_if_weights_are_kept(tmp_path, name):
    packed, plain = write_checkpoints(tmp_path, BY_NAME[name])
    _, wanted = logits(plain)
    keeping = DENSE_ONLY._replace(products=dict.fromkeys(WeightKind, Kept))
    model, got = logits(packed, keeping)
    assert logits(packed)[1].equal(wanted)
    assert (got - wanted).abs().max() < 1e-5 * wanted.abs().max()
    layouts = [part.product.matrix.layout for part in model.base.modules() if isinstance(part, OurProduct)]
    assert layouts == [BY_NAME[name].layout] * 14


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"load_format": "dummy"}], ids=str)
def test_weights_are_rounded_at_load_if_asked_or_random(tmp_path, options):
    packed, plain = write_checkpoints(tmp_path, BY_NAME["ct_int8_channel"])
    keeping = DENSE_ONLY._replace(products=dict.fromkeys(WeightKind, Kept))
    model, got = logits(packed if "load_format" in options else plain, keeping, **options)
    kinds = {part.product.matrix.layout.kind for part in model.base.modules() if isinstance(part, OurProduct)}
    assert kinds == {WeightKind.INT8} and bool(got.isfinite().all())


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    packed, _ = write_checkpoints(tmp_path, BY_NAME["awq"])
    tensors = load_file(packed / SINGLE)
    tensors["model.layers.1.mlp.up_proj.qzeros"] = tensors["model.layers.1.mlp.up_proj.qzeros"][:1].clone()
    save_file(tensors, packed / SINGLE)
    with pytest.raises(CheckpointError, match=r"mlp.up_proj.qzeros' has shape \[1, 40\], .*must be \[3, 40\]"):
        logits(packed)


def test_experts_of_gpt_oss_are_what_transformers_reads(tmp_path):
    config = transformers.GptOssConfig(
        vocab_size=97, hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    torch.manual_seed(0)
    net = transformers.GptOssForCausalLM(config)
    state, packed = {name: tensor.clone() for name, tensor in net.state_dict().items()}, {}
    for name, tensor in list(state.items()):
        if name.endswith("experts.gate_up_proj") or name.endswith("experts.down_proj"):
            experts, inputs, outputs = tensor.shape
            blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 123, (experts, outputs, inputs // 32), dtype=torch.uint8)
            state[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            packed[name] = tensor
    values = json.loads(config.to_json_string(use_diff=False)) | {"architectures": ["GptOssForCausalLM"]}
    values["dtype"] = "float32"
    quantised = values | {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    for folder, tensors, one in (("packed", packed, quantised), ("plain", state, values)):
        (tmp_path / folder).mkdir()
        save_file(tensors, tmp_path / folder / SINGLE)
        (tmp_path / folder / "config.json").write_text(json.dumps(one))
    assert logits(tmp_path / "packed")[1].equal(logits(tmp_path / "plain")[1])


def test_experts_that_a_class_joins_are_multiplied_out(tmp_path):
    make(SERVED["qwen3-moe"]).save_pretrained(tmp_path / "plain")
    shutil.copytree(tmp_path / "plain", tmp_path / "packed")
    plain, packed = load_file(tmp_path / "plain" / SINGLE), {}
    for name, tensor in list(plain.items()):
        if name.endswith("_proj.weight"):
            written, wide = BY_NAME["fp8_64_32"].write(tensor.float().numpy())
            packed |= {f"{name.removesuffix('weight')}{part}": found for part, found in written.items()}
            plain[name] = torch.from_numpy(wide)
        else:
            packed[name] = tensor
    assert sum(".experts." in name for name in packed) > 8
    for folder, tensors in (("plain", plain), ("packed", packed)):
        save_file(tensors, tmp_path / folder / SINGLE)
    file = tmp_path / "packed" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": BY_NAME["fp8_64_32"].config}))
    assert logits(tmp_path / "packed")[1].equal(logits(tmp_path / "plain")[1])
