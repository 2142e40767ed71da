"""Compares what a native family computes with its class in transformers, which is imported then.

A large checkpoint is represented by its first layers, as many as it takes to have one of every kind, in float32 on the
host; windows are cut to the few tokens that are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gapless.base.errors import CheckpointError, ConfigError
from gapless.base.progress import announce
from gapless.device.facts import HOST
from gapless.kernels import plain
from gapless.kernels.kinds import Reach, WeightKind
from gapless.kernels.seam import Kernels
from gapless.model.config import ModelConfig, read_model_config
from gapless.model.decoder import Decoder
from gapless.model.drafting.mtp import of_mtp_layers
from gapless.model.families import family_of
from gapless.model.fields import Fields
from gapless.model.formats.of_model import format_of
from gapless.model.params import allocate
from gapless.model.self_check import SMALL_WINDOW, TOKENS, check
from gapless.model.slots import slots
from gapless.model.spec import LayerSpec
from gapless.model.transformers_weights import wide_tensors
from gapless.model.weights import load_weights, own_head, tensor_names


def check_native(directory: Path, kernels: Kernels = plain.KERNELS) -> None:
    """Compare a few tokens' logits. `kernels` run on the host.

    Raises CheckpointError naming the file if they differ, or transformers has no such class; ConfigError without
    transformers.
    """
    if find_spec("transformers") is None:
        raise ConfigError("check: compares with transformers, which is not here: pip install 'gapless[transformers]'")
    announce("checking the model against transformers")
    path = directory / "config.json"
    model = own_head(directory, read_model_config(directory), torch.float32)
    small = _cut(model)
    rest = _rest(model, len(small.spec.layers), tensors := tensor_names(directory)) | of_mtp_layers(tensors)
    params = allocate(small, torch.float32, HOST)
    load_weights(directory, slots(small, params), rest, small.names)
    make = family_of(small.architecture).model or Decoder
    # Quantised weights are multiplied out: products by them may round their inputs.
    exact = kernels._replace(products={WeightKind.DENSE: kernels.products[WeightKind.DENSE]})
    check(_reference(directory, model, small, rest), make(small, params, TOKENS, exact), HOST, str(path))


def _cut(model: ModelConfig) -> ModelConfig:
    """Return the model with its first layers of every kind, and small windows."""
    layers = model.spec.layers
    kinds = [replace(layer, group=0) for layer in layers]
    count = max(kinds.index(kind) for kind in kinds) + 1
    return replace(model, spec=replace(model.spec, layers=tuple(_narrowed(layer) for layer in layers[:count])))


def _narrowed(layer: LayerSpec) -> LayerSpec:
    at = layer.attention
    size = at.size if at.reach is Reach.CAUSAL else min(at.size, SMALL_WINDOW)
    return replace(layer, attention=replace(at, size=size))


def _rest(model: ModelConfig, count: int, tensors: Collection[str]) -> frozenset[str]:
    """Return the tensors of a checkpoint that the model's first `count` layers do not have, which are other layers'."""
    prefix, _, end = model.names.layer.removeprefix(model.names.base).partition("{}")
    assert not end
    known = tuple(f"{prefix}{layer}." for layer in range(count))
    names = {name: name.removeprefix(model.names.base) for name in tensors}
    return frozenset(name for name, own in names.items() if own.startswith(prefix) and not own.startswith(known))


def _reference(
    directory: Path, model: ModelConfig, small: ModelConfig, rest: Collection[str]
) -> Callable[[Tensor], Tensor]:
    """Return the logits [T, vocab] of ids [T] by the class of transformers, eager and without a cache."""
    from gapless.model.transformers_config import class_of, has_class, shrink, silent

    if not has_class(model.architecture):
        raise ConfigError(f"check: transformers has no {model.architecture} to compare with: start without --check")

    fields = Fields.of_file(directory / "config.json")
    made, config = class_of(fields)
    shrink(config, len(model.spec.layers), len(small.spec.layers), SMALL_WINDOW)
    config.tie_word_embeddings = model.spec.tied
    config._attn_implementation = "eager"
    found = wide_tensors(directory, format_of(model), torch.float32).tensors
    tensors = {name: tensor for name, tensor in found.items() if name not in rest}
    with silent(), torch.no_grad():
        net, found = made.from_pretrained(
            None, config=config, state_dict=tensors, dtype=torch.float32, local_files_only=True,
            output_loading_info=True,
        )  # fmt: skip
    if found["missing_keys"]:
        raise CheckpointError(f"{directory}: {min(found['missing_keys'])!r} is missing, as transformers reads it")

    def logits(ids: Tensor) -> Tensor:
        got: Any = net(ids[None], use_cache=False).logits[0]
        return torch.as_tensor(got)

    return logits
