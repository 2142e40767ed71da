"""A plain checkpoint whose layers are rounded at load: `--quantization`."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch
from adapter_files import write_adapter
from safetensors.torch import load_file, save_file

from gapless import LLM, SamplingParams
from gapless.base.errors import ConfigError
from gapless.base.files import SINGLE
from gapless.demo import weights_dir
from gapless.kernels.kinds import WeightKind
from gapless.kernels.matrix import Matrix, round_to
from gapless.model.config import read_model_config
from gapless.model.dummy import fill_dummy
from gapless.model.formats.rounded import rounded_layout
from gapless.model.params import PRODUCTS, allocate
from gapless.model.quantization import asked_quantization
from gapless.testing.guarded import guarded

PROMPTS = ["One, two,", "A question about pens:", "x"]
KINDS = ["fp8", "int8", "int4"]
OPTIONS = {"device": "cpu", "dtype": "float32", "max_model_len": 128}
SEVERAL = {"device": "cpu", "dtype": "bfloat16", "max_model_len": 128, "max_num_seqs": 4}


def rounded_copy(folder, kind):
    """Write the demo model with the numbers that its layers' weights are rounded to."""
    shutil.copytree(weights_dir(), folder)
    tensors = load_file(folder / SINGLE)
    for name, tensor in tensors.items():
        if ".layers." in name and name.endswith("_proj.weight"):
            layout = rounded_layout(WeightKind(kind), tensor.shape[1])
            tensor = Matrix(round_to(layout, tensor), None, layout).values()
        tensors[name] = tensor.float().contiguous()
    save_file(tensors, folder / SINGLE)
    return str(folder)


def answers(llm, **asked):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False, **asked)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_of_the_rounded_numbers(tmp_path, kind, plain_kernels):
    with LLM("demo", quantization=kind, **OPTIONS) as llm, LLM(rounded_copy(tmp_path / "it", kind), **OPTIONS) as plain:
        assert answers(llm) == answers(plain)


@pytest.fixture
def plain_kernels(monkeypatch):
    """Kernels that multiply quantised weights out: others may round what they multiply by."""
    from gapless.kernels import native, plain

    monkeypatch.setattr(native, "load", lambda: None)
    dense = {WeightKind.DENSE: plain.KERNELS.products[WeightKind.DENSE]}
    monkeypatch.setattr(plain, "KERNELS", plain.KERNELS._replace(products=dense))


def test_another_quantisation_than_the_checkpoints_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"must be one of auto, none, fp8, int8, int4 for a .*, got 'gptq'"):
        LLM("demo", quantization="gptq", **OPTIONS)


@pytest.mark.parametrize("kind", KINDS)
def test_dummy_weights_are_the_plain_ones_rounded(kind):
    config, host = read_model_config(weights_dir()), torch.device("cpu")
    plain = allocate(config, torch.float32, host)
    asked = replace(config, quantization=asked_quantization(kind, None))
    rounded = allocate(asked, torch.float32, host)
    for params in (plain, rounded):
        fill_dummy(params, 3, config)
    assert rounded.embedding.equal(plain.embedding)
    for one, other in zip(rounded.layers, plain.layers, strict=True):
        for name in PRODUCTS:
            matrix = getattr(one, name)
            wanted = round_to(matrix.layout, getattr(other, name).tensors[0])
            assert matrix.layout.kind == kind
            assert all(tensor.equal(found) for tensor, found in zip(matrix.tensors, wanted, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_new_weights_are_rounded_too(tmp_path, kind):
    shutil.copytree(weights_dir(), tmp_path / "new")
    tensors = load_file(tmp_path / "new" / SINGLE)
    save_file({name: tensor * 1.1 if ".layers." in name else tensor for name, tensor in tensors.items()},
              tmp_path / "new" / SINGLE)  # fmt: skip
    with LLM(str(tmp_path / "new"), quantization=kind, **OPTIONS) as llm:
        wanted = answers(llm)
    with LLM("demo", quantization=kind, **OPTIONS) as llm:
        before = answers(llm)
        llm.update_weights(str(tmp_path / "new"))
        assert answers(llm) == wanted != before


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_do_not_depend_on_depth_or_chunks(kind):
    """With the products of this processor. Pages are few, so that rows are preempted and prefixes found again."""
    found = []
    for depth in (1, 4, 8):
        with LLM("demo", quantization=kind, depth=depth, max_num_batched_tokens=16, num_gpu_blocks_override=14,
                 **SEVERAL) as llm:  # fmt: skip
            found.append(answers(llm))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_for_no_device(kind):
    with guarded() as checked, LLM("demo", quantization=kind, **SEVERAL) as llm:
        answers(llm)
    assert checked.launched > 10 and checked.trouble() == []


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_adds_to_the_rounded_weights(tmp_path, kind, plain_kernels):
    adapter = write_adapter(tmp_path / "adapter", read_model_config(weights_dir()), 1, size=0.2)
    lora = {"lora_modules": (f"it={adapter}",), "max_loras": 1}
    with (
        LLM("demo", quantization=kind, **lora, **OPTIONS) as llm,
        LLM(rounded_copy(tmp_path / "copy", kind), **lora, **OPTIONS) as plain,
    ):
        without, found, wanted = answers(llm), answers(llm, adapter="it"), answers(plain, adapter="it")
    assert found == wanted != without


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_of_an_eagle_head_change_no_token(kind):
    with LLM("demo", quantization=kind, **SEVERAL) as llm:
        wanted = answers(llm)
    config = {"method": "eagle3", "num_speculative_tokens": 3}
    with LLM("demo", quantization=kind, speculative_config=config, **SEVERAL) as llm:
        assert answers(llm) == wanted


def test_the_start_says_which_weights_are_multiplied_out(caplog, plain_kernels):
    caplog.set_level("INFO", "gapless.start")
    with LLM("demo", quantization="int8", **OPTIONS):
        pass
    assert "weights in int8 are multiplied out to torch.float32: torch kernels have no product" in caplog.text
