"""Quantised weights under the Transformers backend: multiplied out for the class, and kept for our products.

The class, its experts too, computes with the numbers of the checkpoint in the model's dtype, and so does the check of
it. Its linear layers then become products by the weights as they are stored.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gapless.base.errors import CheckpointError
from gapless.base.progress import announce, warn
from gapless.kernels.kinds import DENSE
from gapless.kernels.matrix import Matrix, round_to
from gapless.model.formats.mxfp4 import Mxfp4Format
from gapless.model.formats.seam import Stored, WeightFormat
from gapless.model.weights import mapped_tensors

KV_SCALES = (".k_scale", ".v_scale", ".output_scale")
_ROUTERS = ("gate", "router")
"""Last parts of the names of small modules that choose experts, which are not rounded"""


class WideTensors(NamedTuple):
    """A checkpoint as its class reads it."""

    tensors: dict[str, Tensor]
    """Plain ones, by name"""
    homes: dict[str, Path]
    """Their files"""
    kept: dict[str, Matrix]
    """Quantised weights as they are stored, by module"""


def wide_tensors(directory: Path, form: WeightFormat | None, dtype: torch.dtype) -> WideTensors:
    """Read every tensor of a checkpoint, its quantised weights multiplied out. Raises CheckpointError."""
    found = WideTensors({}, {}, {})
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for path, name, tensor in mapped_tensors(directory):
        if form is not None and name.endswith(KV_SCALES):
            warn(f"{path}: tensor {name!r} is not used: the Transformers backend measures scales", file=str(path))
            continue
        found.homes[name], found.tensors[name] = path, tensor.clone()  # the file may change
        module, _, part = name.rpartition(".")
        parts[module][part] = found.tensors[name]
    if isinstance(form, Mxfp4Format):
        _widen_experts(found, form, dtype)
    elif form is not None:
        for module, read in parts.items():
            _widen(found, form, module, read, dtype)
    return found


def _widen(found: WideTensors, form: WeightFormat, module: str, read: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Replace the tensors of a module by its weight, if they are a quantised one's."""
    bias = read.pop("bias", None)
    if read.keys() == {"weight"} and read["weight"].is_floating_point() and read["weight"].itemsize > 1:
        return
    sizes = sizes_of(read)
    stored = form.weight(module, *sizes) if sizes else None
    if stored is None:
        return
    path = found.homes[f"{module}.{next(iter(read))}"]
    for name, asked in stored.tensors.items():
        if name in read:
            _check(f"{path}: tensor '{module}.{name}'", read[name], asked)
        elif not asked.optional:
            raise CheckpointError(f"{path}: tensor '{module}.{name}' is missing, beside {sorted(read)}")
    if more := sorted(read.keys() - stored.tensors.keys()):
        raise CheckpointError(f"{path}: unexpected tensor '{module}.{more[0]}' beside a quantised weight")
    try:
        matrix = Matrix(stored.read(read), None, stored.layout, dtype)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
    for name in read:
        del found.tensors[f"{module}.{name}"]
    if bias is not None and "bias" in stored.tensors and not bias.any():
        del found.tensors[f"{module}.bias"]  # zeros that a format's programs write for modules without one
    found.homes[f"{module}.weight"] = path
    found.tensors[f"{module}.weight"] = matrix.multiplied_out().tensors[0].to(dtype)
    if stored.layout != DENSE:
        found.kept[module] = matrix


def _check(what: str, tensor: Tensor, asked: Stored) -> None:
    if tuple(tensor.shape) not in (asked.shape, *asked.others):
        raise CheckpointError(f"{what} has shape {list(tensor.shape)}, but by config.json must be {list(asked.shape)}")


def sizes_of(read: Mapping[str, Tensor]) -> tuple[int, int] | None:
    """Return the outputs and inputs of a weight by its stored tensors; None if they have none."""
    shapes = {name: tuple(tensor.shape) for name, tensor in read.items() if tensor.ndim == 2}
    if {"qweight", "scales", "qzeros"} <= shapes.keys():
        (words, wide), outputs = shapes["qweight"], shapes["scales"][1]
        each = -(-outputs // shapes["qzeros"][1])
        return outputs, len(read["g_idx"]) if "g_idx" in read else words if wide != outputs else words * each
    if "weight_shape" in read:
        outputs, inputs = read["weight_shape"].tolist()
        return outputs, inputs
    name, each = ("weight", 1) if "weight" in shapes else ("weight_packed", 2)
    return (shapes[name][0], each * shapes[name][1]) if name in shapes else None


def _widen_experts(found: WideTensors, form: Mxfp4Format, dtype: torch.dtype) -> None:
    """Replace blocks and scales of experts by their weights."""
    ends = form.parts
    for name in [name for name in found.tensors if name.endswith(ends[0])]:
        module = name.removesuffix(ends[0])
        if f"{module}{ends[1]}" not in found.tensors:
            raise CheckpointError(f"{found.homes[name]}: tensor '{module}{ends[1]}' is missing, beside {name!r}")
        read = {end: found.tensors.pop(module + end) for end in ends}
        found.homes[module], found.tensors[module] = found.homes[name], form.experts(read).to(dtype)


def matched(net: nn.Module, kept: Mapping[str, Matrix]) -> dict[nn.Module, Matrix]:
    """Return the linear layers of a class that have these weights; a class may rename or change others."""
    found: dict[nn.Module, Matrix] = {}
    for name, module in _linears(net):
        matrix = next((kept[one] for one in (name, name.removeprefix("model."), f"model.{name}") if one in kept), None)
        if matrix is not None and module.weight.equal(matrix.multiplied_out().tensors[0]):
            found[module] = matrix
    return found


def rounded(net: nn.Module, base: nn.Module, form: WeightFormat) -> dict[nn.Module, Matrix]:
    """Round the linear layers of a decoder, `base`, to the layouts of a format, and return their
    weights."""
    found, inside = dict[nn.Module, Matrix](), {*base.modules()}
    for name, module in _linears(net):
        if module not in inside or name.endswith(_ROUTERS):
            continue
        stored = form.weight(name, module.out_features, module.in_features)
        if stored is None or stored.layout == DENSE:
            continue
        weight = module.weight.data
        matrix = Matrix(round_to(stored.layout, weight), None, stored.layout, weight.dtype)
        weight.copy_(matrix.multiplied_out().tensors[0])
        found[module] = matrix
    return found


def _linears(net: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers that become our products, with their names."""
    for name, module in net.named_modules():
        if type(module) is nn.Linear:
            yield name, module


def release(kept: Mapping[nn.Module, Matrix]) -> None:
    """Let go of the plain weights of modules that are quantised, and announce their layouts."""
    counts: dict[str, int] = defaultdict(int)
    for module, matrix in kept.items():
        counts[str(matrix.layout)] += 1
        assert isinstance(module, nn.Linear)
        module.weight.data = module.weight.data.new_empty(0)
    for layout, count in counts.items():
        announce(f"{count} linear layers in {layout}; all else of the class in the model's dtype")
