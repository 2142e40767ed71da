"""Loads the model that an EngineConfig names onto a device."""

from __future__ import annotations

from pathlib import Path

import torch

from gapless.base.config import DEMO_MODEL, EngineConfig
from gapless.base.errors import ConfigError
from gapless.base.progress import tell
from gapless.kernels import plain
from gapless.kernels.seam import Kernels
from gapless.model.adapters import AdapterTables
from gapless.model.config import ModelConfig, model_length, read_model_config, resolve_model_dir
from gapless.model.dense import DenseModel
from gapless.model.eagle import Eagle, HeadConfig, load_params
from gapless.model.params import allocate, fill_dummy, slots
from gapless.model.weights import load_weights

_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def dtype_of(config: EngineConfig, model: ModelConfig) -> torch.dtype:
    """Return the dtype that the engine computes in: `config.dtype`, or the checkpoint's own."""
    return _DTYPES[model.dtype if config.dtype == "auto" else config.dtype]


def load_model(config: EngineConfig, device: torch.device, kernels: Kernels = plain.KERNELS) -> DenseModel:
    """Build the model of `config.model` on `device`, in `config.dtype`.

    Raises:
        ConfigError: no such directory, or max_model_len beyond the model.
        CheckpointError: the directory's files are wrong; names the file and the field or tensor.
    """
    directory = resolve_model_dir(config.model)
    model = read_model_config(directory)
    length = model_length(config, model)
    dtype = dtype_of(config, model)
    params = allocate(model, dtype, device)
    if config.load_format == "dummy":
        tell("making dummy weights")
        fill_dummy(params, config.seed)
    else:
        load_weights(directory, slots(model, params), model.tied)
    tell("arranging weights for the kernels")
    tables = None
    if config.lora_modules or config.lora_dir:
        tables = AdapterTables(model, config.max_loras, config.max_lora_rank, dtype, device)
    speculation = config.speculation
    has_head = speculation is not None and speculation.method == "eagle3"
    return DenseModel(model, params, length, kernels, tables, spare_layers=int(has_head))


def load_head(config: EngineConfig, model: DenseModel, rows: int) -> Eagle:
    """Build the head that `config.speculative_config` names, for `rows` rows of `model`, which left it a layer of KV.

    Raises:
        ConfigError: there is no such directory, or no head for this device.
        CheckpointError: the directory's files are wrong; names the file and the field or tensor.
    """
    asked, device = config.speculation, model.rope.table.device
    assert asked is not None
    if device.type != "cpu":
        raise ConfigError("speculative_config.method: eagle3 drafts on a CPU only, so far: set it to ngram")
    directory = _head_dir(config.model, asked.model)
    head = HeadConfig.read(directory, model.config)
    return Eagle(head, load_params(directory, head, model.dtype, device), model, rows, asked.num_speculative_tokens)


def _head_dir(model: str, head: str) -> Path:
    if not head and model == DEMO_MODEL:
        from gapless.demo import head_dir  # as in `resolve_model_dir`

        return Path(head_dir())
    directory = Path(head).expanduser()
    if not head or not directory.is_dir():
        raise ConfigError(f"speculative_config.model must be the directory of an EAGLE-3 head, got {head!r}")
    return directory
