"""The KV memory of a model: its format, its pages, and the scales of formats of fewer bits.

Scales that no checkpoint gives are measured when weights are loaded, and again when they are replaced: a forward of
fixed tokens, with the reference's attention over a memory of the model's dtype, gives the largest key and value of each
layer. The scales are powers of two, so that dividing by them loses nothing, and leave room for numbers twice as large.
"""

from __future__ import annotations

from copy import copy
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

from gapless.base.errors import ConfigError
from gapless.comm.alone import ONE_RANK
from gapless.comm.seam import Group
from gapless.kernels import plain
from gapless.kernels.arch import stores_e4m3
from gapless.kernels.kv import KVFormat, KVLayout, scales_of
from gapless.model.seam import BatchShape, KVCache, StepInputs
from gapless.model.self_check import tokens

MEASURED_TOKENS = 128
"""Tokens of the forward that measures scales"""
_PAGE = 16


class PagedModel:
    """The part of a model that makes its KV memory."""

    kv: KVLayout
    """Each layer's part of the memory"""
    kv_scales: Tensor | None = None
    """float32 [layers, 2], spare layers too: see `views.KV`"""
    kv_measured = False
    """Whether the scales are measured, and not a checkpoint's"""
    kv_origin = "auto"
    """Words of the format and its scales, equal for equal ones"""
    cache_layers: int
    """Layers of the KV memory, spare ones too"""
    group: Group = ONE_RANK
    """The ranks that share the model"""

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one KV page of all layers."""
        return self.cache_layers * self.kv.layer_bytes(page_size)

    def new_cache(self, pages: int, page_size: int, device: torch.device) -> KVCache:
        """A zeroed cache of `pages` pages, the null page included."""
        shape = self.kv.shape(pages, self.cache_layers, page_size)
        return KVCache.of(shape, self.kv.stored, device, self.kv_scales)


def store_kv(model: Any, kind: KVFormat, page_size: int, scales: Tensor | None = None) -> None:
    """Have a `PagedModel` store its KV in a format, with these scales, float32 [own layers, 2], or measured ones. Spare
    layers and layers before its own get 1.

    Raises ConfigError if the format has no such pages, or the device cannot convert.
    """
    if kind is KVFormat.AUTO:
        return
    if model.kernels.name == "triton" and not stores_e4m3(model.device):
        raise ConfigError(
            f"kv_cache_dtype: {kind} needs an NVIDIA GPU of compute capability 8.9 or later, or one of AMD's, which "
            "this one is not: take auto"
        )
    model.kv._replace(format=kind).layer_bytes(page_size)
    model.kv_measured = scales is None
    own = measured(model) if scales is None else scales.to(model.device)
    first = first_layer(model)
    model.kv_scales = own.new_ones(first + model.cache_layers, 2)
    model.kv_scales[first : first + len(own)] = own
    model.kv = model.kv._replace(format=kind)
    model.kv_origin = _origin(model)


def renew_scales(model: Any, scales: Tensor | None) -> None:
    """Replace the scales of a model whose weights are new, in place, by these or by measured ones."""
    if model.kv_scales is not None:
        own, first = measured(model) if scales is None else scales, first_layer(model)
        model.kv_measured = scales is None
        model.kv_scales[first : first + len(own)] = own
        model.kv_origin = _origin(model)


def _origin(model: Any) -> str:
    """Return words for a model's format and scales. Waits for the device."""
    return f"{model.kv.format} {sha256(model.kv_scales.cpu().numpy().tobytes()).hexdigest()[:16]}"


def first_layer(model: Any) -> int:
    """Return a model's first layer in the memory."""
    first: int = getattr(model, "first_layer", 0)
    return first


def measured(model: Any) -> Tensor:
    """Return scales float32 [own layers, 2] of a model's keys and values. Waits for no device."""
    exact = copy(model)
    exact.kernels = model.kernels._replace(
        rope_and_write=plain.KERNELS.rope_and_write, decode_attention=plain.KERNELS.decode_attention,
        prefill_attention=plain.KERNELS.prefill_attention, chunk_attention=plain.KERNELS.chunk_attention,
    )  # fmt: skip
    exact.first_layer, exact.ways = 0, []
    layers, count = model.cache_layers - model.spare_layers, min(MEASURED_TOKENS, model.max_model_len)
    pages, device = -(-count // _PAGE), model.device
    cache = KVCache.of(
        model.kv._replace(format=KVFormat.AUTO).shape(pages + 1, layers, _PAGE), model.kv.dtype, device
    )  # fmt: skip
    position = torch.arange(count, device=device)
    table = torch.arange(1, pages + 1, dtype=torch.int32, device=device)[None]
    one = torch.zeros(1, dtype=torch.int64, device=device)
    inputs = StepInputs(
        tokens(model.vocab_size, device, count), position, position + _PAGE, one + count, one, table, pages,
        torch.cat((one, one + count)),
    )  # fmt: skip
    shape = BatchShape(0, ((0, count),), 1)
    with torch.no_grad():
        exact.forward(inputs, exact.plan(shape), cache)
        found = cache.data.abs().amax((0, 3, 4, 5))
        parts = found.new_zeros(model.group.share.world, *found.shape)
        parts[model.group.share.rank] = found
        return scales_of(model.group.add(parts).amax(0))  # equal on all ranks, and on one that has all heads
