"""Writes a checkpoint of the compressed-tensors format from a plain one, by rounding to nearest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gapless.base.errors import CheckpointError, ConfigError
from gapless.base.files import INDEX, SINGLE, read_json
from gapless.base.progress import announce
from gapless.kernels.kinds import BLOCK, WeightKind, WeightLayout
from gapless.kernels.matrix import halves, round_to
from gapless.model.config import ModelConfig, read_model_config
from gapless.model.params import PRODUCTS
from gapless.model.quantization import ROUNDED
from gapless.model.registry import Impl
from gapless.model.weights import opened, save_tensors, weight_files

_FORMATS = {WeightKind.FP8: "float-quantized", WeightKind.INT8: "int-quantized", WeightKind.INT4: "pack-quantized"}
_TYPES = {WeightKind.FP8: ("float", 8), WeightKind.INT8: ("int", 8), WeightKind.INT4: ("int", 4)}
_OFFSET = 8
"""Least number of 4 bits, negated: packed numbers are stored from 0 on"""


def quantize_checkpoint(directory: Path, output: Path, kind: WeightKind) -> WeightLayout:
    """Write a checkpoint whose layers' weights are rounded to `kind`; embedding, head and norms stay as they are.

    Raises CheckpointError naming the file and field, ConfigError for a model or a folder that this cannot be done
    with.
    """
    config = read_model_config(directory)
    layout = _layout(directory, config, kind)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"output: {output} is there and not an empty folder: name another")
    output.mkdir(parents=True, exist_ok=True)
    modules, written = _modules(config), dict[str, str]()
    names = [*weight_files(directory)]
    count = announce(f"rounding weights to {layout}", sum((directory / name).stat().st_size for name in names), "bytes")
    for name in names:
        tensors = _rounded_file(directory / name, modules, layout)
        save_tensors(tensors, output / name)
        written |= dict.fromkeys(tensors, name)
        count((directory / name).stat().st_size)
    _copy_rest(directory, output, names)
    if names != [SINGLE]:
        (output / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": written}, indent=1))
    values = read_json(directory / "config.json") or {}
    plain = sorted({name.removesuffix(".weight") for name in written if name.endswith(".weight")} - modules)
    values["quantization_config"] = _described(layout, plain)
    (output / "config.json").write_text(json.dumps(values, indent=2) + "\n")
    return layout


def _layout(directory: Path, config: ModelConfig, kind: WeightKind) -> WeightLayout:
    """Return the layout of all layers. Raises ConfigError for a model that cannot have it."""
    if config.quantization is not None:
        raise CheckpointError(f"{directory}/config.json: its weights are {config.quantization.method} already")
    if config.impl != Impl.NATIVE or config.names.transposed:
        raise ConfigError(f"model: {config.architecture} cannot be quantised here: name a model of a native family "
                          "whose weights are [outputs, inputs]")  # fmt: skip
    hidden, most = config.spec.hidden_size, ROUNDED[kind]
    inputs = {product.inputs for layer in config.spec.layers for product in layer.products(hidden).values()}
    if not most:
        return WeightLayout(kind)
    for size in (most, most // 2, BLOCK):
        if not any(width % size for width in inputs):
            return WeightLayout(kind, size)
    raise ConfigError(f"format: int4 stores blocks of {BLOCK} inputs, and the layers have {sorted(inputs)}: use int8")


def _modules(config: ModelConfig) -> frozenset[str]:
    """Return the names of the modules of all layers, with and without the prefix that base models lack."""
    names = config.names
    whole = {
        f"{names.layer.format(i)}.{module}"
        for i in range(len(config.spec.layers))
        for product in PRODUCTS
        for module in names.modules(product)
    }
    return frozenset(whole | {module.removeprefix(names.base) for module in whole})


def _rounded_file(path: Path, modules: frozenset[str], layout: WeightLayout) -> dict[str, Tensor]:
    """Return the tensors of a file of weights, the ones of these modules rounded."""
    found: dict[str, Tensor] = {}
    with opened(path) as file:
        for name in file.keys():  # noqa: SIM118  # it cannot be iterated
            tensor, module = file.get_tensor(name), name.removesuffix(".weight")
            if module in modules:
                found |= {f"{module}.{part}": value for part, value in stored_tensors(tensor, layout).items()}
            else:
                found[name] = tensor
    return found


def stored_tensors(weight: Tensor, layout: WeightLayout) -> dict[str, Tensor]:
    """Return the tensors that hold a rounded weight [N, K]."""
    numbers, scale, *zero = round_to(layout, weight)
    if layout.kind is not WeightKind.INT4:
        return {"weight": numbers, "weight_scale": scale}
    return {
        "weight_packed": _words(halves(numbers)),
        "weight_scale": scale.to(weight.dtype),
        "weight_zero_point": _words(zero[0].mT).mT.contiguous(),
        "weight_shape": torch.tensor(weight.shape),
    }


def _words(numbers: Tensor) -> Tensor:
    """Pack numbers from 0 to 15 [M, K] into int32 [M, K / 8], the first in the lowest bits."""
    numbers = torch.nn.functional.pad(numbers.to(torch.int64), (0, -numbers.shape[1] % 8), value=_OFFSET)
    places = torch.arange(8) * 4
    words = (numbers.view(len(numbers), -1, 8) << places).sum(2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _copy_rest(directory: Path, output: Path, weights: list[str]) -> None:
    """Copy the files beside the weights: tokenizer, templates, defaults."""
    for path in sorted(directory.iterdir()):
        if path.is_file() and path.name not in (*weights, INDEX, "config.json") and path.suffix != ".safetensors":
            shutil.copyfile(path, output / path.name)


def _described(layout: WeightLayout, plain: list[str]) -> dict[str, Any]:
    """Return the quantization_config of a checkpoint in this layout; `plain` modules are in none."""
    kind, bits = _TYPES[layout.kind]
    numbers = {"num_bits": bits, "type": kind, "dynamic": False}
    whole = layout.kind is not WeightKind.INT4
    weights = numbers | (
        {"strategy": "channel", "symmetric": True, "group_size": None}
        if whole
        else {"strategy": "group", "symmetric": False, "group_size": layout.group}
    )
    inputs = {**numbers, "strategy": "token", "symmetric": True, "dynamic": True, "group_size": None} if whole else None
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[layout.kind],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": plain,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
