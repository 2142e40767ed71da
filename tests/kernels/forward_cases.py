"""Whole decode steps of small models with random weights, and their logits by plain torch in float32 on the CPU."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from paged import LAYERS, Heads, paged
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gapless.kernels import plain
from gapless.kernels.matrix import Matrix
from gapless.kernels.seam import Kernels
from gapless.kernels.views import NormWeights
from gapless.model.adapters import AdapterTables, lines_below
from gapless.model.config import read_model_config
from gapless.model.decoder import Decoder
from gapless.model.params import Params, allocate
from gapless.model.seam import BatchShape, KVCache, StepInputs

VOCAB = 512
LONGEST = 4096
LENGTHS = (700, 2, 16, 17, 255, 1100, 40, 90, 33, 5)


class Family(NamedTuple):
    """How models differ, as far as kernels can tell."""

    architecture: str
    hidden: int
    middle: int
    heads: Heads
    biased: bool = False
    """Whether every matrix has a bias"""


FAMILIES = {
    "qwen3": Family("Qwen3ForCausalLM", 1024, 3072, Heads(16, 8, 128)),
    "llama": Family("LlamaForCausalLM", 768, 2176, Heads(16, 4, 128), biased=True),
    "qwen2": Family("Qwen2ForCausalLM", 896, 2432, Heads(14, 2, 64)),
}
"""Heads are normed; all matrices have a bias, four heads a group; qkv has a bias, seven heads a group."""


def models(
    family: Family, kernels: Kernels, folder: Path, device: str, dtype: torch.dtype = torch.bfloat16, adapters: int = 0
) -> tuple[Decoder, Decoder]:
    """The model on `device`, and with the same weights in float32 on the CPU in plain torch. Both have room for as many
    `adapters` of rank 16."""
    values = {
        "architectures": [family.architecture], "vocab_size": VOCAB, "hidden_size": family.hidden,
        "intermediate_size": family.middle, "num_hidden_layers": LAYERS, "num_attention_heads": family.heads.query,
        "num_key_value_heads": family.heads.kv, "head_dim": family.heads.dim, "max_position_embeddings": LONGEST,
        "attention_bias": family.biased, "mlp_bias": family.biased,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(values))
    config = read_model_config(folder)
    params = allocate(config, torch.bfloat16, torch.device("cpu"))
    random = torch.Generator().manual_seed(0)
    for name, tensor in _named(params):
        _fill(name, tensor, random)

    def built(dtype: torch.dtype, device: str, kernels: Kernels) -> Decoder:
        below = lines_below(config, adapters, 16) if adapters and kernels.ways else 0
        own = allocate(config, dtype, torch.device(device), below)
        for (_, ours), (_, given) in zip(_named(own), _named(params), strict=True):
            ours.copy_(given)
        tables = AdapterTables(config, adapters, 16, own, below > 0) if adapters else None
        return Decoder(config, own, LONGEST, kernels, tables)

    return built(dtype, device, kernels), built(torch.float32, "cpu", plain.KERNELS)


def _named(params: Params) -> Iterator[tuple[str, Tensor]]:
    yield from (("embedding", params.embedding), ("norm", params.norm.weight), ("head", params.head))
    for layer in params.layers:
        for name, part in layer._asdict().items():
            tensors = (*part.tensors, part.bias) if isinstance(part, Matrix) else (part,)
            tensors = part if isinstance(part, NormWeights) else tensors
            yield from ((name, tensor) for tensor in tensors if tensor is not None)


def _fill(name: str, tensor: Tensor, random: torch.Generator) -> None:
    """Products of normed rows are about one in size."""
    values = torch.randn(tensor.shape, generator=random)
    if "norm" in name:
        values = 1 + 0.3 * values
    elif tensor.dim() == 2:
        values *= tensor.shape[1] ** -0.5
    tensor.copy_(values.bfloat16())  # norms too, as most checkpoints have them


class Batch(NamedTuple):
    """A decode step whose rows' last entries are not in the cache yet: NaN is in their place."""

    shape: BatchShape
    inputs: StepInputs
    cache: KVCache
    real: int
    """Rows before the inert one, the last of three or more"""

    def moved(self, dtype: torch.dtype, device: str) -> Batch:
        """A copy of it all."""
        tensors = [part.to(device, copy=True) if isinstance(part, Tensor) else part for part in self.inputs]
        return self._replace(inputs=StepInputs(*tensors), cache=KVCache(self.cache.data.to(device, dtype, copy=True)))

    def rows(self, first: int, end: int) -> Batch:
        """Rows first .. end of it, over the same cache."""
        ids, positions, slots, lens, rows, *rest = self.inputs
        inputs = StepInputs(*(part[first:end] for part in (ids, positions, slots, lens, rows)), *rest)
        return self._replace(shape=self.shape._replace(decode=end - first), inputs=inputs)


def batch_of(heads: Heads, lengths: list[int]) -> Batch:
    """Rows of `lengths` in bfloat16 on the CPU; one of length 1, which is the last, is inert."""
    made = paged(heads, lengths, dtype=torch.bfloat16)
    size, position = made.cache.shape[3], made.kv_lens - 1
    page = made.page_table[made.rows, position // size].long()
    real = len(lengths) - (lengths[-1] == 1)
    made.cache[page[:real], :, :, position[:real] % size] = torch.nan
    ids = torch.randint(VOCAB, (len(lengths),), generator=torch.Generator().manual_seed(1))
    # An inert row's position means nothing.
    at = torch.where(made.kv_lens == 1, 10**6, position)
    columns = made.page_table.shape[1]
    inputs = StepInputs(ids, at, page * size + position % size, made.kv_lens, made.rows, made.page_table, columns)
    return Batch(BatchShape(len(lengths), (), max(lengths)), inputs, KVCache(made.cache), real)


def ragged(rows: int) -> list[int]:
    """The lengths of `rows` rows; of three or more the last is inert."""
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(rows)]
    return [*lengths[:-1], 1] if rows >= 3 else lengths


class Launched(TorchDispatchMode):
    """Counts our operators that run, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "gapless":
            self.names[func.overloadpacket.__name__.removeprefix("triton_")] += 1
        return func(*args, **(kwargs or {}))


def run(model: Decoder, batch: Batch) -> tuple[Tensor, Tensor]:
    """Hidden states and logits of a step; its keys and values are in the batch's cache then."""
    with torch.no_grad():
        hidden = model.forward(batch.inputs, model.plan(batch.shape), batch.cache)
        return hidden, model.logits(hidden)


def error(found: Tensor, wanted: Tensor) -> float:
    """The worst row's difference, as a root of a mean square, by that of all that is wanted."""
    assert found.shape == wanted.shape and found.isfinite().all()
    apart, size = found.double().cpu() - wanted.double(), wanted.double().square().mean().sqrt()
    return float(apart.flatten(1).square().mean(1).max().sqrt() / size)


def written(batch: Batch) -> tuple[Tensor, Tensor]:
    """What the step put into the cache [rows, ...], in float32 on the CPU; and the rest, whose place there is zeros."""
    size = batch.cache.data.shape[3]
    slots, cache = batch.inputs.slots[: batch.real].cpu(), batch.cache.data.cpu()
    put = cache[slots // size, :, :, slots % size].float()
    cache[slots // size, :, :, slots % size] = 0
    cache[0] = 0  # the inert row's
    return put, cache
