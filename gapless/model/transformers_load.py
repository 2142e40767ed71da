"""Loads a decoder of transformers from a checkpoint's directory, and refuses what cannot be computed exactly.

Only classes of the installed package run, never code of a checkpoint or of the hub.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.integrations.moe import _can_use_grouped_mm
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gapless.base import observe
from gapless.base.errors import CaptureError, CheckpointError
from gapless.kernels.seam import Kernels
from gapless.model.config import ModelConfig, RopeConfig
from gapless.model.fields import Fields
from gapless.model.generation import generation_fields, read_end_tokens, read_sampling
from gapless.model.self_check import SMALL_WINDOW, check, in_float32, paged_logits, paged_steps, tokens
from gapless.model.transformers_backend import (
    OURS,
    AttendedLayer,
    TransformersModel,
    base_of,
    first_of_every_kind,
    survey,
    swap,
)
from gapless.model.weights import mapped_tensors

_NO_DECODERS = {
    "alibi": "its attention adds a bias by distance (alibi)",
    "is_encoder_decoder": "it is an encoder and a decoder",
    "vision_config": "it is a model of pictures and text; use a checkpoint of the text model alone",
    "audio_config": "it is a model of sound and text; use a checkpoint of the text model alone",
}
"""Fields of configs that refuse, if set, and why"""
_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Fields of configs that have the longest sequence"""


def class_of(fields: Fields) -> tuple[type[Any], Any]:
    """Return the class and the config of a config.json. Raises CheckpointError for a model that cannot be served, with
    the reason."""

    def refusal(why: str) -> CheckpointError:
        return CheckpointError(f"{fields.path}: the Transformers backend cannot serve this model: {why}")

    names, kind = fields.get("architectures"), fields.get("model_type")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise fields.error("architectures", "must name one class")
    if fields.get("auto_map"):
        raise refusal("auto_map asks for code from the model directory, which is never run; remove the field if the "
                      "class of transformers computes the same")  # fmt: skip
    if fields.get("quantization_config"):
        raise refusal("quantization_config: quantised checkpoints are not supported; use the bfloat16 or float32 one")
    for name, why in _NO_DECODERS.items():
        if fields.get(name):
            raise refusal(f"{name}: {why}")
    if kind not in CONFIG_MAPPING or names[0] not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        raise refusal(f"transformers {transformers.__version__} has no decoder {names[0]} (model_type {kind!r})")
    try:
        config = CONFIG_MAPPING[kind].from_dict(deepcopy(fields.values))
        made = getattr(transformers, names[0])
    except Exception as error:
        raise refusal(f"transformers cannot read its config: {error}") from error
    for name, why in _NO_DECODERS.items():
        if getattr(config, name, None):
            raise refusal(f"{name}: {why}")
    if made._is_stateful:
        raise refusal(f"{names[0]} keeps a state beside keys and values")
    if not made._supports_attention_backend:
        raise refusal(f"{names[0]} has no exchangeable attention (_supports_attention_backend)")
    return made, config


@contextmanager
def _silent() -> Iterator[None]:
    """Let transformers print nothing."""
    log: Any = transformers.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


def load(
    directory: Path, dtype: torch.dtype, device: torch.device, kernels: Kernels, max_model_len: int,
    dummy: int | None = None,
) -> TransformersModel:  # fmt: skip
    """Load the model of a directory, or with random weights by the seed `dummy`, and check it against its class.

    Raises CheckpointError naming the file and the reason.
    """
    fields = Fields.of_file(directory / "config.json")
    where = str(fields.path)
    made, config = class_of(fields)
    with _silent(), torch.no_grad():
        config._attn_implementation = OURS
        net = _filled(made, config, directory, dtype, dummy).to(device)
        _fix_ropes(net, max_model_len)
        _check_experts(net, dtype, where)
        layers = survey(net, where)
        with in_float32(dtype):
            reference, ours = (_checked(net, layers, name) for name in ("eager", OURS))
            swap(ours, kernels, products=False)
            small = TransformersModel(ours, survey(ours, where), kernels, max_model_len, torch.float32)

            def logits(ids: Tensor) -> Tensor:
                found: Tensor = reference(ids[None], use_cache=False).logits[0]
                return found

            check(logits, small, device, where)
        swap(net, kernels, products=True)
        model = TransformersModel(net, layers, kernels, max_model_len, dtype)
        _refuse_waits(model, device, where)
    model.config = read_config(directory)
    return model


def _filled(made: Any, config: Any, directory: Path, dtype: torch.dtype, dummy: int | None) -> Any:
    """Return the causal LM with the checkpoint's weights, on the host."""
    if dummy is not None:
        tensors = _dummies(made, config, dtype, dummy)
        return made.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype, local_files_only=True)
    homes: dict[str, Path] = {}
    tensors = {}
    for path, name, tensor in mapped_tensors(directory):
        homes[name], tensors[name] = path, tensor
    net, found = made.from_pretrained(
        None,
        config=config,
        state_dict=tensors,
        dtype=dtype,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    usual = "does config.json belong to these weights?"
    for name in sorted(found["missing_keys"]):
        raise CheckpointError(f"{directory}: tensor {name!r} is missing; {usual}")
    for name in sorted(found["unexpected_keys"]):
        raise CheckpointError(f"{homes.get(name, directory)}: unexpected tensor {name!r}: its class has none; {usual}")
    for name, got, wanted in sorted(found["mismatched_keys"]):
        shapes = f"has shape {list(got)}, but by config.json it must be {list(wanted)}"
        raise CheckpointError(f"{homes.get(name, directory)}: tensor {name!r} {shapes}")
    return net


def _dummies(made: Any, config: Any, dtype: torch.dtype, seed: int) -> dict[str, Tensor]:
    """Norms 1, all else from N(0, 0.02)."""
    generator = torch.Generator().manual_seed(seed)
    block = torch.empty(4_194_301).normal_(0.0, 0.02, generator=generator).to(dtype)
    with torch.device("meta"):
        wanted = made(config).state_dict()
    found = {}
    for name, like in wanted.items():
        found[name] = torch.ones(like.shape, dtype=dtype)
        if like.ndim > 1:
            flat = found[name].view(-1)
            for at in range(0, len(flat), len(block)):
                part = flat[at : at + len(block)]
                part.copy_(block[: len(part)])
    return found


def _fix_ropes(net: nn.Module, length: int) -> None:
    """Fix frequencies that depend on the longest position of a batch: as for a sequence of `length` tokens."""
    for module in net.modules():
        kinds: Any = getattr(module, "rope_type", None)
        for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
            if kind is None or not ("dynamic" in kind or kind == "longrope"):
                continue
            prefix = "" if layer_type is None else f"{layer_type}_"
            frequencies: Tensor = getattr(module, f"{prefix}inv_freq")
            how: Any = {} if layer_type is None else {"layer_type": layer_type}
            found, scale = ROPE_INIT_FUNCTIONS[kind](module.config, frequencies.device, seq_len=length, **how)
            frequencies.copy_(found)
            setattr(module, f"{prefix}attention_scaling", scale)
            if layer_type is None:
                setattr(module, "rope_type", "fixed")  # noqa: B010
            else:
                kinds[layer_type] = "fixed"


def _check_experts(net: Any, dtype: torch.dtype, where: str) -> None:
    """Let experts run without a count on the host. Raises CheckpointError where they cannot."""
    try:
        net.set_experts_implementation("grouped_mm")
    except ValueError:
        return  # a class without experts, or one whose own loop is tried by `_refuse_waits`
    for module in net.modules():
        if hasattr(module, "_is_expert_parallel"):
            weight = next(p for p in module.parameters() if p.ndim == 3)
            if weight.is_cpu:
                return
            if dtype != torch.bfloat16 or not _can_use_grouped_mm(weight, weight, weight):
                raise CheckpointError(
                    f"{where}: the Transformers backend cannot serve these experts here: their products would be "
                    "counted on the host; use --dtype bfloat16 on a GPU of compute capability 9.0"
                )


def _checked(net: Any, layers: dict[nn.Module, AttendedLayer], attention: str) -> Any:
    """Return a model of the same weights for the check: its first layers of every kind, small windows."""
    config, total = deepcopy(net.config), len(layers)
    count = first_of_every_kind(base_of(net), layers)
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == total:
            setattr(config, name, value[:count])
    config.num_hidden_layers = count
    for name in ("sliding_window", "attention_chunk_size"):
        if isinstance(size := getattr(config, name, None), int):
            setattr(config, name, min(size, SMALL_WINDOW))
    config._attn_implementation = attention
    if attention == "eager" and config._experts_implementation:
        config._experts_implementation = "eager"
    with torch.device("meta"):
        made = type(net)(config).eval().requires_grad_(False)
    given = dict(net.named_modules())
    for name, module in made.named_modules():
        module._parameters, module._buffers = given[name]._parameters, given[name]._buffers
        for field, value in vars(given[name]).items():
            if field == "rope_type" or field.endswith("attention_scaling"):
                setattr(module, field, value)
    return made


def _refuse_waits(model: TransformersModel, device: torch.device, where: str) -> None:
    """Run a few tokens once, then once more under the check of captures. Raises CheckpointError with the line that
    reads a value of the device."""
    ids = tokens(model.vocab_size, device)
    if not torch.isfinite(paged_logits(model, ids)).all():
        raise CheckpointError(f"{where}: the logits of this model are not finite in {model.dtype}")
    steps = paged_steps(model, ids)
    try:
        with observe.capture_check("a forward"):
            for step in steps:
                step()
    except CaptureError as error:
        raise CheckpointError(f"{where}: the Transformers backend cannot serve this model: {error}") from error


def read_config(directory: Path) -> ModelConfig:
    """Return the sizes of a checkpoint's model, without its weights. Raises CheckpointError naming the file."""
    fields = Fields.of_file(directory / "config.json")
    made, config = class_of(fields)
    for name in fields.values:
        fields.get(name)
    with _silent(), torch.device("meta"):
        net = made(config)
    longest = next((n for name in _LENGTHS if isinstance(n := getattr(config, name, None), int)), 0)
    if not longest:
        raise fields.error("max_position_embeddings", "must be there")
    generation = generation_fields(directory, fields)
    heads, hidden = config.num_attention_heads, config.hidden_size
    products = [part.out_features for part in base_of(net).modules() if isinstance(part, nn.Linear)]
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    experts = [p.shape[1] * chosen for m in net.modules() if hasattr(m, "_is_expert_parallel") for p in m.parameters()]
    return ModelConfig(
        architecture=made.__name__,
        vocab_size=config.vocab_size,
        hidden_size=hidden,
        intermediate_size=max([*products, *experts, hidden]),
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        norm_eps=1e-6,
        rope=RopeConfig(),
        max_position_embeddings=longest,
        dtype=str(config.dtype or torch.float32).removeprefix("torch."),
        tied=bool(getattr(config, "tie_word_embeddings", False)),
        counted=sum(p.numel() for p in net.parameters()),
        eos_token_ids=read_end_tokens(generation, fields, config.vocab_size),
        default_sampling=read_sampling(generation, longest),
        files=(fields,) if generation is fields else (fields, generation),
    )
