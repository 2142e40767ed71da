"""Formats of checkpoints: what is read is the numbers that their own rules give, in the layout that is promised."""

from __future__ import annotations

import pytest
import torch
from model.format_cases import BY_NAME, CASES, write_checkpoints

from gapless.kernels.kinds import DENSE
from gapless.model.config import read_model_config
from gapless.model.loader import read_params
from gapless.model.params import PRODUCTS, allocate


def read(folder, dtype=torch.float32):
    config = read_model_config(folder)
    params = allocate(config, dtype, torch.device("cpu"))
    read_params(params, folder, config)
    return params


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
