"""`gapless quantize`: what is written is what the format's own library reads back."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from safetensors.torch import load_file, save_file

from gapless.base.errors import CheckpointError, ConfigError
from gapless.base.files import INDEX, SINGLE
from gapless.cli.main import main
from gapless.demo import head_dir, weights_dir
from gapless.kernels.kinds import WeightKind, WeightLayout
from gapless.kernels.matrix import Matrix, round_to
from gapless.model.config import read_model_config
from gapless.model.drafting.eagle import HeadConfig
from gapless.model.formats.of_model import format_of
from gapless.model.loader import read_params
from gapless.model.params import allocate
from gapless.model.quantize import quantize_checkpoint, stored_tensors

KINDS = [WeightKind.FP8, WeightKind.INT8, WeightKind.INT4]


@pytest.mark.parametrize("kind", KINDS)
def test_the_formats_own_library_reads_the_rounded_numbers(tmp_path, kind):
    layout = quantize_checkpoint(weights_dir(), tmp_path / "out", kind)
    plain, written = load_file(weights_dir() / SINGLE), load_file(tmp_path / "out" / SINGLE)
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    library = BaseCompressor.get_value_from_registry(config["format"])
    rounded = 0
    for name, tensor in plain.items():
        module = name.removesuffix("weight")
        if not name.endswith("_proj.weight"):
            assert written[name].equal(tensor)
            continue
        stored = {key.removeprefix(module): value for key, value in written.items() if key.startswith(module)}
        ours = Matrix(round_to(layout, tensor), None, layout, tensor.dtype)
        assert library.decompress(stored, scheme)["weight"].to(tensor.dtype).equal(ours.multiplied_out().tensors[0])
        rounded += 1
    assert rounded == 7 * json.loads((weights_dir() / "config.json").read_text())["num_hidden_layers"]


def test_all_but_the_weights_is_copied(tmp_path, capsys):
    assert not main(["quantize", "demo", "--format", "int8", "--output", str(tmp_path / "out")])
    there = {path.name for path in weights_dir().iterdir() if path.is_file()}
    assert there == {path.name for path in (tmp_path / "out").iterdir()}
    for name in there - {SINGLE, "config.json"}:
        assert (tmp_path / "out" / name).read_bytes() == (weights_dir() / name).read_bytes()
    assert "weights in int8, " in capsys.readouterr().out


def test_a_folder_with_files_is_refused_as_output(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").touch()
    with pytest.raises(ConfigError, match="not an empty folder"):
        quantize_checkpoint(weights_dir(), tmp_path / "full", WeightKind.INT8)


@pytest.mark.parametrize("rows", [8, 13])
def test_zeros_of_odd_numbers_of_outputs_are_packed(rows):
    layout, weight = WeightLayout(WeightKind.INT4, 64), torch.randn(rows, 64)
    stored = stored_tensors(weight, layout)
    numbers = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": layout.group, "symmetric": False}
    config = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": numbers}}, "format": "pack-quantized"}
    scheme = QuantizationConfig.model_validate(config).config_groups["group_0"]
    rounded = BaseCompressor.get_value_from_registry("pack-quantized").decompress(stored, scheme)["weight"]
    assert rounded.equal(Matrix(round_to(layout, weight), None, layout).values())


def copy_of(folder, **fields):
    """The demo model, with these fields in its config.json."""
    shutil.copytree(weights_dir(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    return folder


def test_one_shard_with_an_index_is_written_with_one(tmp_path):
    folder, shard = copy_of(tmp_path / "in"), "model-00001-of-00001.safetensors"
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).rename(folder / shard)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, shard)}))
    quantize_checkpoint(folder, tmp_path / "out", WeightKind.INT8)
    config = read_model_config(tmp_path / "out")
    params = read_params(allocate(config, torch.float32, torch.device("cpu")), tmp_path / "out", config)
    assert params.layers[0].down.layout.kind is WeightKind.INT8


def test_modules_beside_the_layers_are_named_as_plain(tmp_path):
    folder = copy_of(tmp_path / "in")
    tensors = load_file(folder / SINGLE)
    tensors["mtp.layers.0.mlp.down_proj.weight"] = tensors["model.layers.0.mlp.down_proj.weight"].clone()
    save_file(tensors, folder / SINGLE)
    quantize_checkpoint(folder, tmp_path / "out", WeightKind.INT8)
    form = format_of(read_model_config(tmp_path / "out"))
    shape = tensors["mtp.layers.0.mlp.down_proj.weight"].shape
    assert form.weight("mtp.layers.0.mlp.down_proj", *shape) is None
    assert form.weight("model.layers.0.mlp.down_proj", *shape).layout.kind is WeightKind.INT8


def test_a_quantised_eagle_head_is_refused_by_the_field(tmp_path):
    folder = tmp_path / "head"
    shutil.copytree(head_dir(), folder)
    config = json.loads((folder / "config.json").read_text())
    quantised = json.loads((write_int8(tmp_path) / "config.json").read_text())["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantised}))
    with pytest.raises(CheckpointError, match="quantization_config must not be there: weights of heads are plain"):
        HeadConfig.read(folder, read_model_config(weights_dir()))


def write_int8(folder):
    quantize_checkpoint(weights_dir(), folder / "int8", WeightKind.INT8)
    return folder / "int8"


def test_a_gguf_file_beside_a_checkpoint_is_not_read(tmp_path):
    folder = copy_of(tmp_path / "in")
    (folder / "model.gguf").write_bytes(b"GGUF")
    config = read_model_config(folder)
    read_params(allocate(config, torch.float32, torch.device("cpu")), folder, config)
