"""Quantised checkpoints through the real loop: the tokens of the plain checkpoint of the same numbers."""

from __future__ import annotations

import shutil

import pytest
import torch
from model.format_cases import BY_NAME, CASES, write_checkpoints
from safetensors.torch import load_file, save_file
from sharpest import sharpest

from gapless import LLM, SamplingParams
from gapless.base.config import EngineConfig
from gapless.base.errors import RequestError
from gapless.base.files import SINGLE
from gapless.demo import weights_dir
from gapless.kernels import native, plain
from gapless.kernels.kinds import WeightKind
from gapless.model.loader import load_model
from gapless.model.update import put_weights, read_weights

PROMPTS = [[1, 2, 3], [7, 5, 9, 11, 60, 3, 8], [42]]
COHERE = {"architectures": ["CohereForCausalLM"], "model_type": "cohere", "layer_norm_eps": 1e-5, "logit_scale": 1.0}


@pytest.fixture(autouse=True)
def dense_products(monkeypatch):
    """Kernels that multiply quantised weights out: others may round what they multiply by."""
    monkeypatch.setattr(native, "load", lambda: None)
    products = {WeightKind.DENSE: plain.KERNELS.products[WeightKind.DENSE]}
    monkeypatch.setattr(plain, "KERNELS", plain.KERNELS._replace(products=products))


def served(folder, depth="4", **options):
    return LLM(str(folder), device="cpu", tokenizer=str(weights_dir()), max_model_len=64, depth=depth, **options)


def answers(llm):
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


NAMES = sharpest(["fp8_128", "ct_int4_zeros", *(case.name for case in CASES if case.name not in
                                                ("fp8_128", "ct_int4_zeros"))], keep=2)  # fmt: skip


@pytest.mark.parametrize("changes", sharpest([{}, COHERE], whole=True), ids=["qwen3", "cohere"])
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_of_the_plain_numbers_at_every_depth(tmp_path, name, changes):
    packed, plain_one = write_checkpoints(tmp_path, BY_NAME[name], **changes)
    with served(plain_one) as llm:
        wanted = answers(llm)
    for depth in ("1", "4", "8"):
        with served(packed, depth) as llm:
            assert answers(llm) == wanted, depth


def test_new_weights_are_of_the_same_format_and_layouts(tmp_path):
    packed, _ = write_checkpoints(tmp_path / "one", BY_NAME["gptq_sym"])
    others, plain_one = write_checkpoints(tmp_path / "other", BY_NAME["gptq_sym"], seed=1)
    finer, _ = write_checkpoints(tmp_path / "finer", BY_NAME["gptq_asym"])
    fp8, _ = write_checkpoints(tmp_path / "fp8", BY_NAME["fp8_128"])
    with served(plain_one) as llm:
        wanted = answers(llm)
    with served(packed) as llm:
        before = answers(llm)
        for folder, text in ((finer, "qkv of layer 0 is int4 by 32, and the engine runs a model with int4 by 64"),
                             (fp8, "method is fp8, and the engine runs a model with gptq"),
                             (plain_one, "quantization is None, and the engine runs a model with gptq")):  # fmt: skip
            with pytest.raises(RequestError, match=text):
                llm.update_weights(str(folder))
        assert answers(llm) == before
        llm.update_weights(str(others))
        assert answers(llm) == wanted != before


def test_scales_of_keys_and_values_are_the_checkpoints(tmp_path):
    """By a spy on what the memory is made with; new weights bring theirs, or are measured if they have none."""
    packed, _ = write_checkpoints(tmp_path, BY_NAME["fp8_static"])
    shutil.copytree(packed, tmp_path / "without")
    scales = torch.tensor([[0.25, 0.5], [0.125, 2.0]])
    pairs = {f"model.layers.{i}.self_attn.{name}": scales[i, j].clone()
             for i in range(2) for j, name in enumerate(("k_scale", "v_scale"))}  # fmt: skip
    save_file(load_file(packed / SINGLE) | pairs, packed / SINGLE)
    model = load_model(EngineConfig(model=str(packed), kv_cache_dtype="fp8", max_model_len=64), torch.device("cpu"))
    assert model.kv_scales.equal(scales) and not model.kv_measured
    for folder, own in ((tmp_path / "without", False), (packed, True)):
        for _ in put_weights(model, read_weights(folder, model.config, model.dtype).params):
            pass
        assert model.kv_scales.equal(scales) == own and model.kv_measured != own


def test_a_quantised_draft_model_drafts_for_a_plain_one(tmp_path):
    packed, plain_one = write_checkpoints(tmp_path, BY_NAME["gptq_sym"])
    asked = {"method": "draft_model", "model": str(packed), "num_speculative_tokens": 2}
    with served(plain_one) as llm:
        wanted = answers(llm)
    with served(plain_one, speculative_config=asked) as llm:
        assert answers(llm) == wanted
        assert sum(llm.stats().drafts.accepted) > 0
