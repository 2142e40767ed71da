"""Loads the model that an EngineConfig names onto a device."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from gapless.base.config import DEMO_MODEL, EngineConfig
from gapless.base.errors import CheckpointError, ConfigError
from gapless.base.progress import announce
from gapless.base.share import Share
from gapless.comm.alone import ONE_RANK
from gapless.comm.seam import Group
from gapless.device.facts import HOST
from gapless.kernels import plain
from gapless.kernels.kv import KVFormat
from gapless.kernels.seam import Kernels
from gapless.model.adapters import AdapterTables, lines_below
from gapless.model.config import ModelConfig, model_length, read_asked_config, read_draft_config, resolve_model_dir
from gapless.model.decoder import Decoder, KVPlace
from gapless.model.drafting.draft_model import DraftModel, PageShare
from gapless.model.drafting.eagle import EagleLayer, HeadConfig, load_params
from gapless.model.drafting.heads import RecurrentHead
from gapless.model.drafting.mtp import MtpLayer, load_mtp, of_mtp_layers
from gapless.model.dummy import fill_dummy
from gapless.model.families import family_of
from gapless.model.formats.of_model import format_of, layouts_of
from gapless.model.formats.rounded import RoundedFormat
from gapless.model.kv_memory import store_kv
from gapless.model.native_check import check_native
from gapless.model.params import Params, allocate
from gapless.model.registry import Impl
from gapless.model.seam import LoadedModel
from gapless.model.shares import check_share
from gapless.model.slots import slots
from gapless.model.weights import load_weights, own_head, tensor_names, warn_of_strays


def dtype_of(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    """Return the dtype that the engine computes in: `config.dtype`, or the checkpoint's own."""
    dtype: torch.dtype = getattr(torch, model.dtype if config.dtype == "auto" else config.dtype)
    return dtype


def load_model(
    config: EngineConfig, device: torch.device, kernels: Kernels = plain.KERNELS, group: Group = ONE_RANK
) -> LoadedModel:
    """Build a rank's share of the model of `config.model` on `device`, in `config.dtype`: a `Decoder`, or a
    `TransformersModel`.

    Raises ConfigError for no such directory, or max_model_len beyond the model; CheckpointError naming the file that is
    wrong, and its field or tensor.
    """
    directory = resolve_model_dir(config.model)
    model = read_asked_config(config)
    length = model_length(config, model)
    refuse_shares(config, model, group.share.world)
    if model.impl == Impl.TRANSFORMERS:
        return _by_transformers(config, directory, model, device, kernels)
    if config.check and group.share.leads:
        check_native(directory, kernels if device == HOST else plain.KERNELS)
    model = _with_own_head(config, directory, model, dtype_of(config, model))
    spare = _spare_layers(config, model, group.share)
    adapted, count, rank = bool(config.lora_modules or config.lora_dir), config.max_loras, config.max_lora_rank
    joins = adapted and any(way.adapts for way in kernels.ways) and model.quantization is None
    joins = joins and model.spec.plain
    below = lines_below(model, count, rank) if joins else 0
    dtype = dtype_of(config, model)
    params = _filled(allocate(model, dtype, device, below, group.share), config, directory, model)
    for (_, why), many in layouts_of(model).items():
        if why:
            announce(f"{many} products are multiplied out to {dtype}: {why}")
    announce("arranging weights for the kernels")
    tables = AdapterTables(model, count, rank, params, below > 0) if adapted else None
    make = family_of(model.architecture).model or Decoder
    made: Decoder = make(model, params, length, kernels, tables, KVPlace(spare), group)
    store_kv(made, KVFormat(config.kv_cache_dtype), config.block_size, params.kv_scales)
    for layout, kind in sorted(made.layouts):
        if kind is not layout.kind:
            announce(f"weights in {layout} are multiplied out to {made.dtype}: {kernels.name} kernels have no product")
    return made


def refuse_shares(config: EngineConfig, model: ModelConfig, world: int) -> None:
    """Raise ConfigError, naming the mend, unless `world` ranks can share the model and all that is asked of it."""
    if world == 1:
        return
    if model.impl == Impl.TRANSFORMERS:
        raise ConfigError(
            f"tensor_parallel_size: {model.architecture} is computed by the Transformers backend, which has one rank: "
            "leave it out"
        )
    check_share(model, world)
    if (drafts := config.speculation) and drafts.method == "draft_model":
        check_share(read_draft_config(drafts.model, model), world, "speculative_config.model")
    elif drafts and drafts.in_pages and drafts.method != "mtp":
        head = HeadConfig.read(_head_dir(config.model, drafts.model), model)
        check_share(head.layer, world, "speculative_config.model")


def _by_transformers(
    config: EngineConfig, directory: Path, model: ModelConfig, device: torch.device, kernels: Kernels
) -> LoadedModel:
    """Make the model by the Transformers backend. Raises as `load_model`."""
    in_pages = config.speculation and config.speculation.in_pages
    for name, asked, why in (
        ("lora_modules", config.lora_modules or config.lora_dir, "it applies no adapters"),
        ("batch_invariant", config.batch_invariant, "its operations may depend on their batch"),
        ("speculative_config", in_pages, "only drafts from histories work with it: ngram or suffix"),
    ):
        if asked:
            raise ConfigError(f"{name}: {model.architecture} is computed by the Transformers backend; {why}")
    from gapless.model.transformers_load import load  # imports transformers, which native models do not need

    stored = model.quantization
    form = RoundedFormat(stored, "") if stored and stored.at_load else format_of(model)
    dummy = config.base_seed if config.load_format == "dummy" else None
    made = load(directory, dtype_of(config, model), device, kernels, model_length(config, model), dummy, form)
    made.config = model
    store_kv(made, KVFormat(config.kv_cache_dtype), config.block_size)
    return made


def _with_own_head(config: EngineConfig, directory: Path, model: ModelConfig, dtype: torch.dtype) -> ModelConfig:
    if config.load_format == "dummy":
        return model
    warn_of_strays(directory)
    return own_head(directory, model, dtype)


def _filled(params: Params, config: EngineConfig, directory: Path, model: ModelConfig) -> Params:
    if config.load_format == "dummy":
        announce("making dummy weights")
        fill_dummy(params, config.base_seed, model)
        params = params._replace(kv_scales=None)
    else:
        params = read_params(params, directory, model)
    return params


def read_params(params: Params, directory: Path, model: ModelConfig) -> Params:
    """Fill `params` from a checkpoint, and return them. Raises CheckpointError naming the file and the tensor."""
    load_weights(directory, slots(model, params), of_mtp_layers(tensor_names(directory)), model.names)
    return params._replace(kv_scales=_given_scales(params, directory))


def _given_scales(params: Params, directory: Path) -> Tensor | None:
    """Return the scales of keys and values that a checkpoint has. Raises CheckpointError."""
    scales = params.kv_scales
    if scales is None or not scales.any():
        return None
    if not bool((scales > 0).all() and scales.isfinite().all()):
        layer = int((~((scales > 0) & scales.isfinite())).any(1).nonzero()[0])
        pair = scales[layer].tolist()
        raise CheckpointError(f"{directory}: k_scale and v_scale of layer {layer} must be numbers above 0, got {pair}")
    return scales


def _spare_layers(config: EngineConfig, model: ModelConfig, share: Share) -> int:
    """Return how many layers of its KV memory a rank's model leaves to what drafts for it."""
    if config.speculation is None or not config.speculation.in_pages:
        return 0
    if config.speculation.method == "draft_model":
        draft = read_draft_config(config.speculation.model, model)
        kind = KVFormat(config.kv_cache_dtype)
        return PageShare.of(model.spec.shared(share), draft.spec.shared(share), kind).spare
    return 1


def load_drafter(config: EngineConfig, model: LoadedModel, rows: int) -> RecurrentHead | DraftModel:
    """Build the drafter of `config.speculative_config` for `rows` rows of `model`, which left it layers of KV.

    Raises as `load_model`, and ConfigError where the vocabularies differ.
    """
    asked = config.speculation
    assert asked is not None and isinstance(model, Decoder), "the backend refuses what drafts in its pages"
    device = model.device
    if asked.method == "draft_model":
        return _load_draft_model(config, asked.model, model)
    if asked.method == "mtp":
        mtp = MtpLayer(load_mtp(resolve_model_dir(config.model), model), model)
        return RecurrentHead(mtp, model, rows, asked.num_speculative_tokens)
    directory = _head_dir(config.model, asked.model)
    head = HeadConfig.read(directory, model.config)
    layer = EagleLayer(head, load_params(directory, head, model.dtype, device, model.group.share), model)
    return RecurrentHead(layer, model, rows, asked.num_speculative_tokens)


def _load_draft_model(config: EngineConfig, name: str, model: Decoder) -> DraftModel:
    directory, device = resolve_model_dir(name), model.device
    small = _with_own_head(config, directory, read_draft_config(name, model.config), model.dtype)
    group = model.group
    params = _filled(allocate(small, model.dtype, device, share=group.share), config, directory, small)
    if small.spec.positions and small.spec.positions < model.max_model_len:
        raise ConfigError(
            f"speculative_config.model: {name!r} has {small.spec.positions} positions, fewer than max_model_len: lower "
            f"--max-model-len from {model.max_model_len}, or choose another draft model"
        )
    share = PageShare.of(model.spec, small.spec.shared(group.share), model.kv.format)
    make = family_of(small.architecture).model or Decoder
    place = KVPlace(share.unused, share.first)
    draft = make(small, params, model.max_model_len, model.kernels, place=place, group=group)
    store_kv(draft, model.kv.format, config.block_size, params.kv_scales)
    return DraftModel(draft, model, model.kernels, partial(share.view, scales=draft.kv_scales), group)


def _head_dir(model: str, head: str) -> Path:
    if not head and model == DEMO_MODEL:
        from gapless.demo import head_dir  # as in `resolve_model_dir`

        return Path(head_dir())
    directory = Path(head).expanduser()
    if not head or not directory.is_dir():
        raise ConfigError(f"speculative_config.model must be the directory of an EAGLE-3 head, got {head!r}")
    return directory
