"""New weights for a model that is loaded: read into memory of the host, then copied to where the old ones are.

Everything is read and checked before the first copy, so that whatever is wrong with a checkpoint changes nothing. The
copies go to the memory that captured graphs read. What drafts for the model keeps its own weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gapless.base.errors import CheckpointError
from gapless.base.share import WHOLE_SHARE, Share
from gapless.device.facts import HOST
from gapless.kernels.matrix import dense, refill
from gapless.kernels.views import NormWeights
from gapless.model.config import ModelConfig, read_model_config
from gapless.model.decoder import Decoder
from gapless.model.fingerprint import digest_of
from gapless.model.kv_memory import renew_scales
from gapless.model.loader import read_params
from gapless.model.params import NORMS, PRODUCTS, Params, allocate
from gapless.model.registry import Impl
from gapless.model.seam import LoadedModel
from gapless.model.weights import own_head

OF_THE_START = ("dtype", "eos_token_ids", "default_sampling", "impl_reason", "files", "path", "values")
"""Fields of a config that may differ: these stay as they were at the start."""


class NewWeights(NamedTuple):
    """A checkpoint in memory of the host."""

    params: Params
    digest: str


def read_weights(directory: Path, known: ModelConfig, dtype: torch.dtype, share: Share = WHOLE_SHARE) -> NewWeights:
    """Read a rank's share of a checkpoint of the same architecture and shapes. Raises CheckpointError naming the file,
    and the field or tensor."""
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: is no directory: give one that holds config.json and safetensors files")
    if known.impl == Impl.TRANSFORMERS:
        raise CheckpointError(f"{directory}: new weights need a native model, and {known.architecture} is computed by "
                              "the Transformers backend: start an engine with them")  # fmt: skip
    config = own_head(directory, _alike(directory, known), dtype)
    for name, new, old in _differences("", config, known):
        raise CheckpointError(
            f"{directory}/config.json: {name} is {new}, and the engine runs a model with {old}: only weights of "
            "the same architecture can take its place; start an engine with this one"
        )
    digest = digest_of(directory)
    params = allocate(config, dtype, HOST, share=share)
    _check_layouts(directory, params, allocate(known, dtype, torch.device("meta")))
    params = read_params(params, directory, config)
    if digest_of(directory) != digest:
        raise CheckpointError(f"{directory}: its files changed while they were read: write them elsewhere, and rename")
    return NewWeights(params, digest)


def _alike(directory: Path, known: ModelConfig) -> ModelConfig:
    """Read a config, with the quantisation at load that the engine's model has. Raises CheckpointError."""
    found, asked = read_model_config(directory, impl=known.impl), known.quantization
    return replace(found, quantization=asked) if asked and asked.at_load and not found.quantization else found


def _check_layouts(directory: Path, new: Params, old: Params) -> None:
    """Raise CheckpointError unless all weights are in the layouts of the engine's."""
    for number, layers in enumerate(zip(new.layers, old.layers, strict=True)):
        for name in PRODUCTS:
            one, other = (getattr(layer, name).layout for layer in layers)
            if one != other:
                raise CheckpointError(
                    f"{directory}/config.json: quantization_config: {name} of layer {number} is {one}, and the engine "
                    f"runs a model with {other}: start an engine with this one"
                )


def _differences(name: str, new: Any, old: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield the innermost fields that differ: their names and both values, or lengths."""
    if is_dataclass(new) and type(new) is type(old):
        for field in fields(new):
            if field.name not in OF_THE_START:
                yield from _differences(field.name, getattr(new, field.name), getattr(old, field.name))
    elif isinstance(new, tuple) and isinstance(old, tuple):
        if len(new) != len(old):
            yield name, len(new), len(old)
        for one, other in zip(new, old, strict=False):
            yield from _differences(name, one, other)
    elif new != old:
        yield name, new, old


def put_weights(model: LoadedModel, params: Params) -> Iterator[bool]:
    """Copy the weights over the model's own, a layer at each step, and return True.

    Nothing else may run meanwhile.
    """
    assert isinstance(model, Decoder), "weights of other models are not read"
    for block, layer in zip(model.blocks, params.layers, strict=True):
        for name in PRODUCTS:
            refill(getattr(block, name).linear, getattr(layer, name))
        for name in NORMS:
            _copy_norm(getattr(block, name), getattr(layer, name))
        if block.qk_norm is not None and layer.qk_norm is not None:
            block.qk_norm.copy_(layer.qk_norm)
        yield True
    _copy_norm(model.last_norm, params.norm)
    refill(model.head, dense(params.head))
    for own, new in ((model.embedding, params.embedding), (model.positions, params.positions)):
        if own is not None and new is not None:
            own.copy_(new)
    renew_scales(model, params.kv_scales)
    yield True


def _copy_norm(own: NormWeights | None, new: NormWeights | None) -> None:
    for to, tensor in zip(own or (), new or (), strict=True):
        if to is not None and tensor is not None:
            to.copy_(tensor)
