"""Loads a decoder of transformers from a checkpoint's directory, and refuses what cannot be computed exactly.

Only classes of the installed package run, never code of a checkpoint or of the hub.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import _can_use_grouped_mm
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gapless.base import observe
from gapless.base.errors import CaptureError, CheckpointError, UserError
from gapless.device.facts import on_host
from gapless.kernels import plain
from gapless.kernels.matrix import Matrix
from gapless.kernels.seam import Kernels
from gapless.model.fields import Fields
from gapless.model.formats.rounded import RoundedFormat
from gapless.model.formats.seam import WeightFormat
from gapless.model.self_check import SMALL_WINDOW, TOKENS, check, paged_logits, paged_steps, tokens
from gapless.model.transformers_backend import OURS, AttendedLayer, TransformersModel, first_of_every_kind, survey, swap
from gapless.model.transformers_config import base_of, class_of, refusal, shrink, silent
from gapless.model.transformers_weights import matched, release, rounded, wide_tensors


def load(
    directory: Path, dtype: torch.dtype, device: torch.device, kernels: Kernels, max_model_len: int,
    dummy: int | None = None, form: WeightFormat | None = None,
) -> TransformersModel:  # fmt: skip
    """Load the model of a directory, or with random weights by the seed `dummy`, and check it against its class. Its
    weights are stored in, or rounded to, the format `form`.

    Raises CheckpointError naming the file and the reason.
    """
    fields = Fields.of_file(directory / "config.json")
    where = str(fields.path)
    made, config = class_of(fields)
    try:
        with silent(), torch.no_grad():
            config._attn_implementation = OURS
            with _parameters_as_read():
                net, kept = _filled(made, config, directory, dtype, dummy, form)
            _fix_ropes(net, max_model_len)
            _ask_for_grouped_experts(net)
            layers = survey(net, where)
            _refuse_own_positions(net, max_model_len, where)
            _check(net, layers, kernels if device == net.device else plain.KERNELS, where)
            release(kept)
            net.to(device)
            _check_experts(net, dtype, where)
            swap(net, kernels, products=True, kept=kept)
            model = TransformersModel(net, layers, kernels, max_model_len, dtype)
            _refuse_waits(model, device, where)
    except UserError:
        raise
    except Exception as error:
        raise refusal(where, f"its class fails with {type(error).__name__}: {error}") from error
    return model


def _check(net: Any, layers: dict[nn.Module, AttendedLayer], kernels: Kernels, where: str) -> None:
    """Compare the class's own attention, without a cache, with ours, on the host. Raises CheckpointError if they
    differ."""
    copies: dict[int, Any] = {}
    reference, ours = (_checked(net, layers, name, copies) for name in ("eager", OURS))
    swap(ours, kernels, products=False)
    small = survey(ours, where)
    if any(layer.attend.size > SMALL_WINDOW for layer in small.values()):
        raise refusal(where, "the field of its config that sizes its windows is not known")

    def logits(ids: Tensor) -> Tensor:
        found: Tensor = reference(ids[None], use_cache=False).logits[0]
        return found

    check(logits, TransformersModel(ours, small, kernels, TOKENS, torch.float32), net.device, where)


def _refuse_own_positions(net: Any, max_model_len: int, where: str) -> None:
    """Refuse layers that read positions from a cache of transformers'. Llama 4's do so to scale queries far behind."""
    forwards = {type(module).forward for module in base_of(net).modules()}
    given = [forward for forward in forwards if "position_ids" not in inspect.signature(forward).parameters]
    if not any("get_seq_length" in inspect.getsource(forward) for forward in given):
        return
    tuned, first = getattr(net.config, "attn_temperature_tuning", None), getattr(net.config, "floor_scale", 0)
    if tuned is None:
        raise refusal(where, "its layers read positions from a cache of their class")
    if tuned and max_model_len >= first:
        rule = f"attn_temperature_tuning scales from floor_scale ({first}) tokens on: lower --max-model-len below that"
        raise refusal(where, rule)


@contextmanager
def _parameters_as_read() -> Iterator[None]:
    """Let classes initialise modules with buffers alone: Youtu's overwrites a part of the embedding that was read."""
    usual = PreTrainedModel._initialize_weights

    def only_buffers(self: PreTrainedModel, module: nn.Module, *args: Any) -> None:
        if any(True for _ in module.buffers(recurse=False)):
            usual(self, module, *args)

    vars_of: Any = PreTrainedModel
    vars_of._initialize_weights = only_buffers
    try:
        yield
    finally:
        vars_of._initialize_weights = usual


def _filled(
    made: Any, config: Any, directory: Path, dtype: torch.dtype, dummy: int | None, form: WeightFormat | None
) -> tuple[Any, dict[nn.Module, Matrix]]:
    """Return the causal LM with the checkpoint's weights, on the host, and the quantised ones of its modules."""
    if dummy is not None:
        tensors = _dummies(made, config, dtype, dummy)
        net = made.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype, local_files_only=True)
        return net, {} if form is None else rounded(net, base_of(net), form)
    at_load = isinstance(form, RoundedFormat)
    tensors, homes, stored = wide_tensors(directory, None if at_load else form, dtype)
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
    return net, rounded(net, base_of(net), form) if form is not None and at_load else matched(net, stored)


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


def _ask_for_grouped_experts(net: Any) -> None:
    """Let experts run without a count on the host. A class with a loop of its own is tried by `_refuse_waits`."""
    with suppress(ValueError):
        net.set_experts_implementation("grouped_mm")


def _check_experts(net: Any, dtype: torch.dtype, where: str) -> None:
    """Raise CheckpointError if transformers would take its loop over experts, or torch its own, which count them on the
    host."""
    for module in net.modules():
        if hasattr(module, "_is_expert_parallel"):
            weight = next(p for p in module.parameters() if p.ndim == 3)
            if on_host(weight):
                return
            if dtype != torch.bfloat16 or not _can_use_grouped_mm(weight, weight, weight):
                why = (
                    "its experts would be counted on the host; use --dtype bfloat16 on a GPU of compute capability 9.0"
                )
                raise refusal(where, why)


def _checked(net: Any, layers: dict[nn.Module, AttendedLayer], attention: str, copies: dict[int, Any]) -> Any:
    """Return a model for the check: the first layers of every kind, in float32, with small windows. `copies` are the
    weights in float32, by the ids of the model's own."""
    config = deepcopy(net.config)
    shrink(config, len(layers), first_of_every_kind(base_of(net), layers), SMALL_WINDOW)
    config._attn_implementation = attention
    if attention == "eager" and config._experts_implementation:
        config._experts_implementation = "eager"
    with torch.device("meta"):
        made = type(net)(config).eval().requires_grad_(False)
    given = dict(net.named_modules())
    for name, module in made.named_modules():
        for kind in ("_parameters", "_buffers"):
            parts = {
                name: part if part is None else _in_float32(part, copies)
                for name, part in getattr(given[name], kind).items()
            }
            setattr(module, kind, parts)
        for field, value in vars(given[name]).items():
            if field == "rope_type" or field.endswith("attention_scaling"):
                setattr(module, field, value)
    return made


def _in_float32(tensor: Tensor, copies: dict[int, Any]) -> Tensor:
    if tensor.dtype not in (torch.bfloat16, torch.float16):
        return tensor
    if id(tensor) not in copies:
        wide = tensor.detach().float()
        copies[id(tensor)] = nn.Parameter(wide, requires_grad=False) if isinstance(tensor, nn.Parameter) else wide
    found: Tensor = copies[id(tensor)]
    return found


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
        raise refusal(where, str(error)) from error
