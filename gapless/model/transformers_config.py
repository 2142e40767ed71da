"""Reads a config.json by transformers: the class that computes its model, and sizes.

Only classes of the installed package are used, never code of a checkpoint or of the hub.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
import transformers
from torch import nn
from transformers.integrations import hub_kernels
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from gapless.base.errors import CheckpointError
from gapless.model.fields import Fields
from gapless.model.spec import ModelSizes

os.environ["USE_HUB_KERNELS"] = "NO"
hub_kernels._kernels_enabled = False  # else classes fetch compiled code from the hub

_NO_DECODERS = {
    "alibi": "its attention adds a bias by distance (alibi)",
    "is_encoder_decoder": "it is an encoder and a decoder",
    "vision_config": "it is a model of pictures and text; use a checkpoint of the text model alone",
    "audio_config": "it is a model of sound and text; use a checkpoint of the text model alone",
}
"""Fields that refuse a config of transformers, which fills in defaults, and why"""

_WINDOWS = {"sliding_window": 1, "attention_chunk_size": 1, "local_attention": 2}
"""Fields of configs that size windows and chunks, in times of these"""


def refusal(where: str, why: str) -> CheckpointError:
    """Return the error of a model that cannot be served, for the file `where`."""
    return CheckpointError(f"{where}: the Transformers backend cannot serve this model: {why}")


def has_class(architecture: str) -> bool:
    """Return whether transformers has a decoder of this name."""
    return architecture in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()


def class_of(fields: Fields) -> tuple[type[Any], Any]:
    """Return the class and the config of a config.json that `registry.route` has accepted. Raises CheckpointError for a
    model that cannot be served, with the reason."""
    names, kind, where = fields.values["architectures"], fields.get("model_type"), str(fields.path)
    if kind not in CONFIG_MAPPING or not has_class(names[0]):
        raise refusal(where, f"transformers {transformers.__version__} has no decoder {names[0]} (model_type {kind!r})")
    try:
        values = {name: value for name, value in fields.values.items() if "_implementation" not in name}
        values.pop("quantization_config", None)  # weights are read by our formats
        config = CONFIG_MAPPING[kind].from_dict(deepcopy(values))  # none of code elsewhere
        made = getattr(transformers, names[0])
    except Exception as error:
        raise refusal(where, f"transformers cannot read its config: {error}") from error
    for name, why in _NO_DECODERS.items():
        if getattr(config, name, None):
            raise refusal(where, f"{name}: {why}")
    if kind == "phimoe":
        raise refusal(where, f"{names[0]} copies frequencies from the host in every forward")
    if made._is_stateful:
        raise refusal(where, f"{names[0]} keeps a state beside keys and values")
    if not made._supports_attention_backend:
        raise refusal(where, f"{names[0]} has no exchangeable attention (_supports_attention_backend)")
    return made, config


def shrink(config: Any, layers: int, count: int, window: int) -> None:
    """Cut a config of this many layers to its first `count`, and its windows to `window` tokens."""
    for name, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == layers:
            setattr(config, name, value[:count])
    config.num_hidden_layers = count
    for name, times in _WINDOWS.items():
        if isinstance(size := getattr(config, name, None), int):
            setattr(config, name, min(size, times * window))


def base_of(net: Any) -> nn.Module:
    """Return the decoder below the head; the whole model if there is none."""
    found: nn.Module = net.base_model
    return getattr(net, "model", net) if found is net else found


@contextmanager
def silent() -> Iterator[None]:
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


def count_sizes(fields: Fields) -> ModelSizes:
    """Return the sizes of a config.json's model. Raises CheckpointError naming the file and the reason."""
    made, config = class_of(fields)
    try:
        with silent(), torch.device("meta"):
            net = made(config)
    except Exception as error:
        raise refusal(str(fields.path), f"its class fails with {type(error).__name__}: {error}") from error
    hidden, layers = config.hidden_size, config.num_hidden_layers
    widths = [part.out_features for part in base_of(net).modules() if isinstance(part, nn.Linear)]
    widths += [part.nf for part in base_of(net).modules() if isinstance(part, Conv1D)]
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    experts = [part for part in net.modules() if hasattr(part, "_is_expert_parallel")]
    widths += [chosen * weight.shape[1] for part in experts for weight in part.parameters()]
    head_dim = getattr(config, "head_dim", None) or hidden // config.num_attention_heads
    return ModelSizes(
        hidden, layers, sum(weight.numel() for weight in net.parameters()), max([4 * max(widths), 8 * hidden]),
        layers * config.num_attention_heads * head_dim,
    )  # fmt: skip
