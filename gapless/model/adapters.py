"""Low-rank adapters: the tables that hold them on the device, and the files of peft that they come from."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from hashlib import sha256
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple, Self

import torch
from torch import Tensor

from gapless.base.errors import CheckpointError
from gapless.base.files import read_json
from gapless.base.progress import warn
from gapless.base.share import WHOLE_SHARE, Share
from gapless.kernels.adapt import AdapterPart
from gapless.model.config import ModelConfig
from gapless.model.fields import UNUSED, Fields, warn_of
from gapless.model.known_fields import ADAPTER
from gapless.model.params import PRODUCTS, Params
from gapless.model.shares import module_cuts
from gapless.model.slots import rope_rows
from gapless.model.spec import LayerSpec, ProductSpec
from gapless.model.weights import read_tensors

ADAPTER_CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LEAST_RANK = 16
"""Tables have this rank at least: tensor cores multiply nothing narrower."""
_REFUSED = {
    "use_dora": "DoRA scales whole weights: train it without use_dora, or merge it into the model",
    "modules_to_save": "whole modules replace those of the model: merge the adapter into the model",
    "lora_bias": "an adapter's own biases are not supported: train it without lora_bias",
    "trainable_token_indices": "trained embeddings are not supported: merge the adapter into the model",
    "target_parameters": "adapters of bare parameters are not supported: name modules instead",
    "rank_pattern": "ranks that differ by module are not supported: train it with one rank",
    "alpha_pattern": "scales that differ by module are not supported: train it with one lora_alpha",
}
_VARIANTS = (
    "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication", "monteclora_config", "use_bdlora",
    "use_qalora", "velora_config",
)  # fmt: skip
_REFUSED |= dict.fromkeys(_VARIANTS, "this variant computes something else than LoRA: train it without")
"""Fields of adapter_config.json that must be empty, and what to do otherwise"""
_BEGINNINGS = (None, True, False, "eva", "gaussian", "mica", "orthogonal")
"""Values of init_lora_weights that leave the model's own weights unchanged in peft"""


class AdapterLayer(NamedTuple):
    """The tables of a decoder layer, one for each of its products, named as in `params.Layer`."""

    qkv: AdapterPart
    output: AdapterPart
    gate_up: AdapterPart
    down: AdapterPart


class AdapterTables:
    """Memory for a share of `count` adapters of up to `rank`, all zeros.

    `down` is cut by the inputs of a product, and `up` by its outputs: the terms of inputs that ranks share are summed
    with the products.
    """

    def __init__(self, config: ModelConfig, count: int, rank: int, params: Params, below: bool = False) -> None:
        """`below`: the memory of the matrices of `params` extends by `lines_below` and holds each `down`."""
        self.count, self.rank, self.below, self.share = count, padded(rank), below, params.share
        self.layers: list[AdapterLayer] = []
        for kind, layer in zip(config.spec.shared(self.share).layers, params.layers, strict=True):
            sizes = kind.products(config.spec.hidden_size)
            parts = (self._part(sizes[name], getattr(layer, name).tensors[0], params.embedding) for name in PRODUCTS)
            self.layers.append(AdapterLayer(*parts))

    def _part(self, size: ProductSpec, matrix: Tensor, like: Tensor) -> AdapterPart:
        width, columns, _ = size
        ends, shape = tuple(accumulate(columns)), (self.count + 1, len(columns) * self.rank, width)
        if self.below:
            strides, end = (shape[1] * width, width, 1), matrix.storage_offset() + matrix.numel()
            down = matrix.as_strided(shape, strides, end).zero_()
        else:
            down = like.new_zeros(shape)
        return AdapterPart(down, like.new_zeros(self.count + 1, self.rank, ends[-1]), ends)

    def slot(self, slot: int) -> list[Tensor]:
        """Return the parts of one slot, contiguous each."""
        return [table[slot] for layer in self.layers for part in layer for table in (part.down, part.up)]


def module_sizes(config: ModelConfig, layer: LayerSpec) -> dict[str, tuple[int, tuple[int, ...]]]:
    """Return the inputs of each product of a layer, and the outputs of each of its modules."""
    hidden = config.spec.hidden_size
    products = layer.products(hidden)
    return {name: (products[name].inputs, config.names.outputs(name, layer, hidden)) for name in PRODUCTS}


def _targets(config: ModelConfig) -> list[str]:
    """Return the last parts of the names of modules that adapters may have."""
    return [module.rpartition(".")[2] for name in PRODUCTS for module in config.names.modules(name)]


def padded(rank: int) -> int:
    """Return the rank that the tables have room for."""
    return max(LEAST_RANK, 1 << (rank - 1).bit_length())


MOST_BELOW = 1 / 8
"""The share of a layer's matrices that tables below them may have: products read all of them"""


def lines_below(config: ModelConfig, count: int, rank: int) -> int:
    """Return the lines that tables of `count` adapters take below each projection of a matrix, 0 for too many."""
    lines, sizes = (count + 1) * padded(rank), [*config.spec.layer.products(config.spec.hidden_size).values()]
    matrices = sum(width * sum(columns) for width, columns, _ in sizes)
    return lines if lines * sum(width * len(columns) for width, columns, _ in sizes) <= MOST_BELOW * matrices else 0


class Adapter(NamedTuple):
    """An adapter as read from its files."""

    rank: int
    scale: float
    weights: Mapping[tuple[int, str, str], Tensor]
    """(layer, module such as self_attn.q_proj, kind) -> the tensor; kind A is [rank, in], kind B [out, rank]"""
    digest: str
    """SHA-256 of its files"""

    @classmethod
    def read(cls, directory: Path, config: ModelConfig, max_rank: int) -> Self:
        """Read an adapter that peft saved.

        Raises:
            CheckpointError: naming the file, the field or tensor, and the mend.
        """
        path = directory / ADAPTER_CONFIG
        values = read_json(path)
        if values is None:
            raise CheckpointError(
                f"{directory}: no adapter: {ADAPTER_CONFIG} is not there (save_pretrained of peft writes it)"
            )
        settings = Fields(path, values, known=ADAPTER)
        rank, scale = _settings(settings, _targets(config), max_rank)
        weights = directory / WEIGHTS
        if not weights.is_file():
            raise CheckpointError(f"{weights}: no such file; adapters are read from safetensors, and from nothing else")
        tensors = dict(_checked(weights, read_tensors(weights), config, rank))
        _check_pairs(weights, tensors)
        _check_targets(settings, tensors, config.names.layer)
        _check_rest(settings)
        for path in sorted(directory.glob("*.safetensors")):
            if path != weights:
                warn(f"{path}: is not read: {WEIGHTS} counts", file=str(path))
        digest = sha256(settings.path.read_bytes() + weights.read_bytes()).hexdigest()
        return cls(rank, scale, tensors, digest)

    def fill(self, parts: list[Tensor], config: ModelConfig, rank: int, share: Share = WHOLE_SHARE) -> None:
        """Write a share of the adapter to the parts of a slot of this rank, which are zeros."""
        places, hidden = iter(parts), config.spec.hidden_size
        for layer, kind in enumerate(config.spec.layers):
            own = kind.shared(share)
            for name, product in own.products(hidden).items():
                down, up, begin = next(places), next(places), 0
                modules, count = config.names.modules(name), len(product.outputs)
                sizes, cuts = (
                    config.names.outputs(name, own, hidden),
                    module_cuts(name, kind, hidden, share, len(modules)),
                )
                for number, (module, size, cut) in enumerate(zip(modules, sizes, cuts, strict=True)):
                    if (layer, module, "A") in self.weights:
                        a = cut.of_columns.of(self.weights[layer, module, "A"])
                        # A module of all projections has a rank in each: kernels read as many.
                        for projection in range(count) if len(modules) < count else (number,):
                            down[projection * rank :][: self.rank].copy_(a)
                        rows = rope_rows(config.spec, own, config.names, name, number)
                        b = cut.of_rows.of(self.weights[layer, module, "B"])
                        b = b if rows is None else b[rows]
                        up[: self.rank, begin : begin + size].copy_(b.float().mT * self.scale)
                    begin += size


def _settings(settings: Fields, known: list[str], max_rank: int) -> tuple[int, float]:
    """Return rank and scale."""
    path = settings.path
    if (settings.get("peft_type") or "LORA") != "LORA":
        raise CheckpointError(f"{path}: peft_type is {settings.get('peft_type')!r}; only LORA is supported")
    for field, mend in _REFUSED.items():
        if settings.get(field):
            raise CheckpointError(f"{path}: {field} is set; {mend}")
    if (settings.get("bias") or "none") != "none":
        raise CheckpointError(f"{path}: bias is {settings.get('bias')!r}; only 'none' is supported")
    begun = settings.get("init_lora_weights")
    if (begun.lower() if isinstance(begun, str) else begun) not in _BEGINNINGS or type(begun) in (int, float):
        raise CheckpointError(
            f"{path}: init_lora_weights is {begun!r}, with which peft may change the model's own weights: have it "
            "converted (save_pretrained with path_initial_model_for_weight_conversion), or merge it into the model"
        )
    targets = settings.get("target_modules") or []
    for name in targets if isinstance(targets, list) else ():
        if str(name).rpartition(".")[2] not in known:
            raise CheckpointError(f"{path}: target_modules names {name!r}; supported are {', '.join(known)}")
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    if type(rank) is not int or rank < 1:
        raise CheckpointError(f"{path}: r must be a whole number from 1, got {rank!r}")
    if rank > max_rank:
        raise CheckpointError(f"{path}: r is {rank}, above the limit of {max_rank}: raise --max-lora-rank")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not math.isfinite(alpha):
        raise CheckpointError(f"{path}: lora_alpha must be a number, got {alpha!r}")
    return rank, alpha / (math.sqrt(rank) if settings.flag("use_rslora", False) else rank)


def _check_targets(settings: Fields, tensors: Mapping[tuple[int, str, str], Tensor], prefix: str) -> None:
    """Refuse tensors that peft would leave out, and warn of modules that have none."""
    keys = {f"{prefix.format(layer)}.{module}" for layer, module, _ in tensors}
    targets, excluded = settings.get("target_modules"), settings.get("exclude_modules")
    chosen, pattern = settings.get("layers_to_transform"), settings.get("layers_pattern")
    layers = chosen if isinstance(chosen, list) else [] if chosen is None else [chosen]
    patterns = pattern if isinstance(pattern, list) else [pattern] if pattern else [prefix.split(".")[-2]]
    for layer, module, _ in tensors:
        key = f"{prefix.format(layer)}.{module}"
        everywhere = not layers or targets is None or key in targets or isinstance(targets, str)
        if targets is not None and not _names(settings, "target_modules", key):
            why = "target_modules does not name it"
        elif not everywhere and not (layer in layers and prefix.split(".")[-2] in patterns):
            why = "layers_to_transform does not have its layer"
        elif excluded and _names(settings, "exclude_modules", key):
            why = "exclude_modules names it"
        else:
            continue
        raise CheckpointError(f"{settings.path}: the adapter has tensors of {key}, but {why}: one of them is wrong")
    for name in targets if isinstance(targets, list) and not excluded else ():
        if not any(key == name or key.endswith(f".{name}") for key in keys):
            warn(f"{settings.path}: target_modules names {name!r}, of which the adapter has no tensor")


def _names(settings: Fields, field: str, key: str) -> bool:
    """Return whether a field of peft names this module: by a pattern, or by ends of names."""
    value = settings.get(field)
    if value == "all-linear" and field == "target_modules":
        return True
    try:
        if isinstance(value, str):
            return re.fullmatch(value, key) is not None
        return any(key == name or key.endswith(f".{name}") for name in value)
    except (re.error, TypeError) as error:
        raise settings.error(field, "must be a list of names or a regular expression") from error


def _check_rest(settings: Fields) -> None:
    """Warn of unknown fields; refuse fields that switch something on."""
    for one in settings.heard():
        if one.use == UNUSED and not (isinstance(one.value, (int, float, str)) and one.value is not True):
            raise settings.error(one.name, "is not known, and may change what the adapter computes: train it without")
    warn_of(settings.heard())


def _checked(
    path: Path, tensors: Mapping[str, Tensor], config: ModelConfig, rank: int
) -> Iterator[tuple[tuple[int, str, str], Tensor]]:
    known = {
        f"base_model.model.{config.names.layer.format(number)}.{module}.lora_{kind}.weight": (
            (number, module, kind),
            shape,
        )
        for number, layer in enumerate(config.spec.layers)
        for name, (inputs, sizes) in module_sizes(config, layer).items()
        for module, outputs in zip(config.names.modules(name), sizes, strict=True)
        for kind, shape in (("A", (rank, inputs)), ("B", (outputs, rank)))
    }
    for name, tensor in tensors.items():
        if name not in known:
            raise CheckpointError(
                f"{path}: unexpected tensor {name!r}: adapters of {', '.join(_targets(config))} in the layers 0 to "
                f"{len(config.spec.layers) - 1} are supported; was it trained on this model?"
            )
        key, wanted = known[name]
        if tuple(tensor.shape) != wanted:
            raise CheckpointError(
                f"{path}: tensor {name!r} has shape {list(tensor.shape)}, but by r and the model's config.json it must "
                f"be {list(wanted)}; was it trained on this model?"
            )
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{path}: tensor {name!r} holds numbers that are not finite; train it again")
        yield key, tensor


def _check_pairs(path: Path, tensors: Mapping[tuple[int, str, str], Tensor]) -> None:
    if not tensors:
        raise CheckpointError(f"{path}: holds no tensor; save the adapter again")
    for layer, module, kind in tensors:
        other = "B" if kind == "A" else "A"
        if (layer, module, other) not in tensors:
            raise CheckpointError(
                f"{path}: layer {layer} has lora_{kind} of {module} and no lora_{other}; save it again"
            )
