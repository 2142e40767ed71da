"""Adapters: what they add to the model, against weights that they are merged into, and the files that are refused."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from adapter_files import additions, random_weights, write_adapter
from model_harness import EVERY, reference, reference_logits
from paging_driver import CPU, Driver, Sequence, prompt, relative_error
from specs import resized

from gapless.base.config import EngineConfig
from gapless.base.errors import CheckpointError, ConfigError
from gapless.model import adapters
from gapless.model.adapters import ADAPTER_CONFIG, WEIGHTS, Adapter, AdapterTables, lines_below
from gapless.model.config import read_model_config, resolve_model_dir
from gapless.model.dummy import fill_dummy
from gapless.model.loader import load_model
from gapless.model.params import allocate

TOLERANCE = 1e-5
KINDS = {
    1: {"rank": 8},
    2: {"rank": 16, "use_rslora": True, "size": 0.05},
    3: {"rank": 3, "modules": ["q_proj", "v_proj", "down_proj"]},
}
MODULES = {
    "gpt2": (["c_attn", "c_proj", "c_fc"], ["c_attn", "mlp.c_proj"]),
    "phi3": (["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], ["qkv_proj", "down_proj"]),
}
"""All modules of families with other names, and those of the third kind"""


class AdaptedDriver(Driver):
    """Runs steps in which each row has an adapter's slot."""

    slots: list[int] | None = None

    def batch(self, decode=(), chunks=(), inert=0, slack=0):
        shape, inputs = super().batch(decode, chunks, inert, slack)
        if self.slots is None:
            return shape, inputs
        sizes = [1] * shape.decode + [count for _, count in shape.chunks]
        tokens = torch.tensor(self.slots).repeat_interleave(torch.tensor(sizes))
        return shape, inputs._replace(adapters=tokens)


@pytest.fixture(scope="module", params=EVERY)
def family(request, tmp_path_factory):
    """Our model with adapters in its slots, and those of transformers that they are merged into."""
    theirs, directory = reference(request.param), tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(directory)
    config = EngineConfig(model=str(directory), lora_modules=("x=y",), max_loras=4)
    model = load_model(config, CPU)
    merged = {0: theirs}
    for slot, kind in KINDS.items():
        if named := MODULES.get(request.param.partition("-")[0]):
            kind = kind | {"modules": named["modules" in kind]}
        path = write_adapter(directory / str(slot), model.config, slot, **kind)
        Adapter.read(path, model.config, 16).fill(model.adapters.slot(slot), model.config, model.adapters.rank)
        merged[slot] = copy.deepcopy(theirs)
        with torch.no_grad():
            for name, added in additions(path).items():
                turned = model.config.names.transposed
                merged[slot].get_parameter(name).add_(added.mT if turned else added)
    return model, merged


def test_a_batch_of_several_adapters_equals_merged_weights(family):
    model, merged = family
    driver = AdaptedDriver(model)
    driver.slots = [0, 1, 2, 3, 1]
    prompts = [prompt(length, seed) for seed, length in enumerate((5, 17, 1, 70, 33))]
    rows = [Sequence() for _ in prompts]
    found = driver.step(chunks=list(zip(rows, prompts, strict=True)))
    for slot, tokens, logits in zip(driver.slots, prompts, found, strict=True):
        assert relative_error(logits, reference_logits(merged[slot], tokens)) < TOLERANCE
    for step in range(3):
        found = driver.step(decode=[(row, 7 + step) for row in rows])
        for slot, row, logits in zip(driver.slots, rows, found, strict=True):
            assert relative_error(logits[0], reference_logits(merged[slot], row.tokens)[-1]) < TOLERANCE


def test_rows_without_an_adapter_have_equal_logits_beside_rows_with_one(family):
    model, _ = family
    prompts = [prompt(length, length) for length in (9, 30)]
    plain, mixed = AdaptedDriver(model), AdaptedDriver(model)
    mixed.slots = [0, 2]
    found = []
    for driver in (plain, mixed):
        rows = [Sequence(), Sequence()]
        first = driver.step(chunks=list(zip(rows, prompts, strict=True)))
        found.append((first[0], *(driver.step(decode=[(rows[0], 3), (rows[1], 4)])[0] for _ in range(2))))
    assert all(map(torch.equal, *found))


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    reference("qwen3").save_pretrained(directory)
    return read_model_config(directory)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"use_dora": True}, "use_dora is set; DoRA scales whole weights"),
        ({"bias": "all"}, "bias is 'all'; only 'none' is supported"),
        ({"bias": "lora_only"}, "bias is 'lora_only'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is set; .* merge the adapter into the model"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern is set"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern is set"),
        ({"target_modules": ["q_proj", "lm_head"]}, "target_modules names 'lm_head'; supported are q_proj"),
        ({"target_modules": ["embed_tokens"]}, "target_modules names 'embed_tokens'"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices is set"),
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', with which peft may change the model's own"),
        ({"init_lora_weights": "pissa_niter_16"}, "init_lora_weights is 'pissa_niter_16'"),
        ({"init_lora_weights": "OLoRA"}, "init_lora_weights is 'OLoRA'"),
        ({"init_lora_weights": "corda"}, "init_lora_weights is 'corda'"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights is 'loftq'"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights is 'lora_ga'"),
        ({"init_lora_weights": "of next year"}, "init_lora_weights is 'of next year'"),
        ({"init_lora_weights": 1}, "init_lora_weights is 1"),
        ({"use_rslora": "false"}, "use_rslora must be true or false, got 'false'"),
        ({"velora_config": {"scale": 1.0}}, "velora_config is set"),
        ({"use_newlora": True}, "use_newlora is not known, and may change what the adapter computes"),
        ({"newlora_config": {"beta": 1}}, "newlora_config is not known"),
        ({"new_modules": ["q_proj"]}, "new_modules is not known"),
        ({"target_modules": ["q_proj"]}, r"tensors of model\.layers\.0\..*, but target_modules does not name it"),
        ({"target_modules": ".*q_proj"}, "target_modules does not name it"),
        ({"target_modules": "("}, "target_modules must be a list of names or a regular expression"),
        ({"exclude_modules": ["down_proj"]}, r"layers\.0\.mlp\.down_proj, but exclude_modules names it"),
        ({"layers_to_transform": [0]}, r"layers\.1\..*, but layers_to_transform does not have its layer"),
        ({"layers_to_transform": 1}, r"layers\.0\..*, but layers_to_transform does not have its layer"),
        ({"layers_to_transform": [0, 1], "layers_pattern": "h"}, "layers_to_transform does not have its layer"),
        ({"r": 0}, "r must be a whole number from 1, got 0"),
        ({"r": True}, "r must be a whole number from 1, got True"),
        ({"lora_alpha": "many"}, "lora_alpha must be a number, got 'many'"),
        ({"r": 32}, "r is 32, above the limit of 16: raise --max-lora-rank"),
        ({"r": 4}, r"has shape .*, but by r .* must be \[.*\b4\b.*\]"),
    ],
)
def test_settings_that_are_not_supported_are_refused_by_name(config, tmp_path, settings, says):
    directory = write_adapter(tmp_path / "adapter", config, 1, **settings)
    with pytest.raises(CheckpointError, match=says):
        Adapter.read(directory, config, 16)


USUAL = {
    "auto_mapping": None, "base_model_name_or_path": "org/model", "bias": "none", "corda_config": None,
    "ensure_weight_tying": False, "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False,
    "inference_mode": True, "init_lora_weights": True, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_bias": False, "lora_dropout": 0.05, "lora_ga_config": None, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_version": "0.21.2", "qalora_group_size": 16,
    "rank_pattern": {}, "revision": None, "target_parameters": None, "task_type": "CAUSAL_LM", "use_dora": False,
    "use_qalora": False, "use_rslora": False,
}  # fmt: skip
"""Fields that peft writes"""


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"init_lora_weights": False},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "Gaussian"},
        {"init_lora_weights": "orthogonal"},
        {"init_lora_weights": "eva", "eva_config": {"rho": 2.0}},
        {"init_lora_weights": "mica"},
        {"init_lora_weights": None},
        {"target_modules": "all-linear"},
        {"target_modules": r".*\.(q|k|v|o|gate|up|down)_proj"},
        {"layers_to_transform": [0, 1], "layers_pattern": ["layers"]},
        {"layers_to_transform": []},
        {"exclude_modules": ["lm_head"]},
        {"modules": ["q_proj"], "target_modules": ["q_proj", "v_proj"], "exclude_modules": ["v_proj"]},
        {"exclude_modules": r".*\.5\..*"},
        {"fan_in_fan_out": True, "qalora_group_size": 32},
    ],
)
def test_settings_that_leave_the_model_as_it_is_are_taken_without_a_warning(config, tmp_path, caplog, settings):
    directory = write_adapter(tmp_path / "adapter", config, 1, **(USUAL | settings))
    assert Adapter.read(directory, config, 16).rank == 8
    assert caplog.records == []


def test_a_setting_of_an_adapter_that_nothing_reads_is_warned_of(config, tmp_path, caplog):
    settings = {"modules": ["q_proj"], "target_modules": ["q_proj", "v_proj"], "new_number": 3, "new_label": "x"}
    directory = write_adapter(tmp_path / "adapter", config, 1, **settings)
    (directory / "new_embeddings.safetensors").write_bytes(b"")
    Adapter.read(directory, config, 16)
    assert [record.getMessage().removeprefix(f"{tmp_path}/adapter/") for record in caplog.records] == [
        f"{ADAPTER_CONFIG}: target_modules names 'v_proj', of which the adapter has no tensor",
        f"{ADAPTER_CONFIG}: new_number = 3 is not used",
        f"{ADAPTER_CONFIG}: new_label = 'x' is not used",
        f"new_embeddings.safetensors: is not read: {WEIGHTS} counts",
    ]


def changed(config, change):
    weights = random_weights(config, 1, 8, ["q_proj"], 0.1)
    change(weights, next(iter(weights)))
    return weights


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda w, one: w.update({"base_model.model.lm_head.lora_A.weight": w[one].clone()}),
            "unexpected tensor .*lm_head",
        ),
        (
            lambda w, one: w.update({one.replace("layers.0", "layers.2"): w[one].clone()}),
            "the layers 0 to 1 are supported",
        ),
        (lambda w, one: w.update({one.replace("q_proj", "z_proj"): w[one].clone()}), "unexpected tensor .*z_proj"),
        (
            lambda w, one: w.update({one.replace("lora_A", "lora_magnitude_vector"): w[one].clone()}),
            "unexpected tensor",
        ),
        (lambda w, one: w.pop(one), "layer 0 has lora_B of self_attn.q_proj and no lora_A"),
        (lambda w, one: w[one].fill_(torch.inf), "holds numbers that are not finite"),
        (lambda w, one: w.update({one: w[one].T.contiguous()}), "was it trained on this model"),
        (lambda w, one: w.update({one: w[one].to(torch.int8)}), "is I8; supported are F32"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(config, tmp_path, change, says):
    directory = write_adapter(tmp_path / "adapter", config, 1, weights=changed(config, change))
    with pytest.raises(CheckpointError, match=says):
        Adapter.read(directory, config, 16)


def test_files_that_are_missing_or_broken_are_named(config, tmp_path):
    directory = write_adapter(tmp_path / "adapter", config, 1)
    (directory / WEIGHTS).write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        Adapter.read(directory, config, 16)
    (directory / WEIGHTS).rename(directory / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="no such file; adapters are read from safetensors"):
        Adapter.read(directory, config, 16)
    (directory / ADAPTER_CONFIG).unlink()
    with pytest.raises(CheckpointError, match=f"no adapter: {ADAPTER_CONFIG} is not there"):
        Adapter.read(directory, config, 16)


def test_adapters_are_told_apart_by_their_content(config, tmp_path):
    paths = [write_adapter(tmp_path / name, config, seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]
    one, same, other = (Adapter.read(path, config, 16).digest for path in paths)
    assert one == same != other


@pytest.mark.parametrize("modules", [("a",), ("a=",), ("=x",), ("a=x", "a=y"), ("a\n=x",)])
def test_a_name_without_a_directory_is_refused(modules):
    with pytest.raises(ConfigError, match="lora_modules must be name=directory, each name once"):
        EngineConfig(lora_modules=modules)


def test_a_list_of_adapters_is_as_good_as_a_tuple():
    config = EngineConfig(lora_modules=["a=x", "b=y=z"])
    assert config.lora_modules == ("a=x", "b=y=z") and config.adapters == {"a": "x", "b": "y=z"}


def test_batch_invariance_with_adapters_is_refused():
    with pytest.raises(ConfigError, match="batch_invariant does not hold for rows with adapters"):
        EngineConfig(lora_modules=("a=b",), batch_invariant=True)


def test_tables_below_matrices_begin_where_these_end_and_share_nothing_with_them(monkeypatch):
    monkeypatch.setattr(adapters, "MOST_BELOW", 100)
    demo = read_model_config(resolve_model_dir("demo"))
    biased = resized(demo, bias=True, output_bias=True)
    layer = replace(biased.spec.layer, mlp=replace(biased.spec.layer.mlp, bias=True))
    config = replace(biased, spec=replace(biased.spec, layers=(layer,) * len(biased.spec.layers)))
    lines = lines_below(config, 3, 8)
    params, same = (allocate(config, torch.float32, CPU, below) for below in (lines, 0))
    fill_dummy(params, 0, config)
    fill_dummy(same, 0, config)
    tables = AdapterTables(config, 3, 8, params, below=True)
    for layer, parts, alone in zip(params.layers, tables.layers, same.layers, strict=True):
        for name, part in parts._asdict().items():
            ((matrix,), bias, *_), size = getattr(layer, name), lines * len(part.ends)
            assert part.down.data_ptr() == matrix.data_ptr() + matrix.nbytes
            assert part.down.shape == (4, len(part.ends) * 16, matrix.shape[1]) and not part.down.any()
            part.down.fill_(7.0)
            other = getattr(alone, name)
            assert matrix.equal(other.tensors[0]) and bias.equal(other.bias)
            assert not bias.as_strided((size,), (1,), len(bias)).any(), "zeros are added to what is not the product's"


def test_tables_go_below_matrices_while_they_are_small_beside_them():
    small = read_model_config(resolve_model_dir("demo"))
    usual = resized(small, hidden=1024, width=3072, heads=16, kv_heads=8, head_dim=128)
    assert lines_below(usual, 8, 16) == 144, "eight adapters over 0.6B"
    large = resized(small, hidden=4096, width=12288, heads=32, kv_heads=8, head_dim=128)
    assert [lines_below(large, *sizes) for sizes in ((4, 16), (8, 9), (4, 64), (1000, 16))] == [80, 144, 320, 0]
    assert lines_below(small, 4, 16) == 0
