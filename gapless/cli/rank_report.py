"""The report of `gapless doctor MODEL --tensor-parallel-size N`: the share of each rank, from config.json alone."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

import torch

from gapless.base import host
from gapless.base.config import NEEDS_ONE_RANK, EngineConfig
from gapless.base.errors import ConfigError
from gapless.base.progress import in_bytes
from gapless.base.share import Share
from gapless.cli.model_report import ITEM_BYTES, kv_bytes
from gapless.comm.shared import library
from gapless.device import device_class, gpus, reaches
from gapless.engine.capabilities import refuse_lacking
from gapless.kernels.kv import KVFormat
from gapless.model.config import ModelConfig
from gapless.model.loader import refuse_shares
from gapless.model.params import allocate

Line = tuple[str, str, str]
"""Name, status and text"""


def rank_rows(config: EngineConfig, model: ModelConfig) -> Iterator[Line]:
    """Yield the lines about the ranks that share a model, and about the links of their devices."""
    world = config.tensor_parallel_size
    try:
        refuse_shares(config, model, world)
    except ConfigError as error:
        yield "ranks", "fail", f"refused: {error}"
        return
    found = device_class(config.device)
    try:
        refuse_lacking(config, found.kind, found.caps)
        library()
    except ConfigError as error:
        yield "ranks", "fail", f"refused: {error}"
        return
    for rank in range(world):
        yield f"rank {rank}", "ok", share_text(config, model, Share(rank, world))
    yield "refused", "ok", "with several ranks: " + "; ".join(f"{name}, {why}" for name, _, why in NEEDS_ONE_RANK)
    yield from _gpu_rows(config.devices[:world]) if found.caps.own_memory else _cpu_rows(world)


def engine_rows(config: EngineConfig) -> Iterator[Line]:
    """Yield the lines about the engines of one server, each with the part of the devices or cores that it gets."""
    ranks, engines = config.tensor_parallel_size, config.data_parallel_size
    if not device_class(config.device).caps.own_memory:
        cores = host.usable_cores()
        text = f"{engines} engines share the host's memory, and its {cores} usable cores"
        few = "; with fewer cores than engines, each waits until the others have had their turn"
        yield "engines", "ok" if cores >= ranks * engines else "warn", text + few * (cores < ranks * engines)
        return
    found, devices = len(gpus()), config.devices
    for number in range(engines):
        own = devices[number * ranks :][:ranks]
        lacking = [one for one in own if one >= found]
        text = (
            f"there is no CUDA device {lacking[0]}, torch sees {found}: name others by --device-ids" if lacking else ""
        )
        yield f"engine {number}", "fail" if lacking else "ok", text or f"CUDA devices {', '.join(map(str, own))}"


def share_text(config: EngineConfig, model: ModelConfig, share: Share) -> str:
    """Return the parts of a native model that a rank has."""
    spec, at, width = model.spec, model.spec.layer.attention, model.spec.layer.mlp.width
    made = allocate(model, getattr(torch, model.dtype), torch.device("meta"), share=share)
    weights = [made.embedding, made.positions, *(tensor for layer in made.layers for tensor in layer.tensors())]
    nbytes = sum(tensor.nbytes for tensor in [*weights, None if spec.tied else made.head] if tensor is not None)
    page = kv_bytes(spec.shared(share))[KVFormat.AUTO] * ITEM_BYTES[model.dtype] * config.block_size
    parts = (
        f"heads {_span(share.part(at.heads), at.heads)}",
        f"heads of keys and values {_span(at.own_keys(share), at.kv_heads)}",
        f"MLP units {_span(share.part(width), width)}",
        f"tokens {_span(spec.own_tokens(share), spec.vocab_size)}",
    )
    sizes = f"{in_bytes(nbytes)} of weights in {model.dtype}, {page:,} bytes a page of {config.block_size} tokens"
    return f"{', '.join(parts)}; {sizes}"


def _span(part: tuple[int, int], count: int) -> str:
    first, end = part
    return f"{first:,} to {end - 1:,} of {count:,}" if end - first > 1 else f"{first:,} of {count:,}"


def _cpu_rows(world: int) -> Iterator[Line]:
    cores = host.usable_cores()
    text = f"{world} ranks share the host's memory, and its {cores} usable cores"
    few = "; with fewer cores than ranks, each waits until the others have had their turn"
    yield "links", "ok" if cores >= world else "warn", text + few * (cores < world)


def _gpu_rows(numbers: tuple[int, ...]) -> Iterator[Line]:
    found = len(gpus())
    if lacking := [number for number in numbers if number >= found]:
        yield "links", "fail", f"there is no CUDA device {lacking[0]}, torch sees {found}: name others by --device-ids"
        return
    if len(set(numbers)) < len(numbers):
        yield "links", "warn", "ranks that share a device take turns, unless NVIDIA's MPS runs"
    for one, other in combinations(dict.fromkeys(numbers), 2):
        if not (reaches(one, other) and reaches(other, one)):
            yield "links", "fail", f"CUDA devices {one} and {other} do not reach each other's memory"
            return
    yield "links", "ok", "the devices reach each other's memory"
