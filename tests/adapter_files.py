"""Adapters with random weights, written as peft writes them, and what they add to a model's weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from gapless.model.adapters import ADAPTER_CONFIG, WEIGHTS, module_sizes
from gapless.model.config import ModelConfig
from gapless.model.family import LLAMA_NAMES
from gapless.model.params import PRODUCTS

ALL = [module.rpartition(".")[2] for name in PRODUCTS for module in LLAMA_NAMES.modules(name)]


def random_weights(config: ModelConfig, seed: int, rank: int, modules: list[str], size: float) -> dict[str, Tensor]:
    """The tensors of an adapter, by the names that peft gives them."""
    generator, found = torch.Generator().manual_seed(seed), {}
    for number, layer in enumerate(config.spec.layers):
        for name, (inputs, outputs) in module_sizes(config, layer).items():
            for module, columns in zip(config.names.modules(name), outputs, strict=True):
                if module.rpartition(".")[2] in modules:
                    prefix = f"base_model.model.{config.names.layer.format(number)}.{module}.lora_"
                    found[prefix + "A.weight"] = torch.randn(rank, inputs, generator=generator) * size
                    found[prefix + "B.weight"] = torch.randn(columns, rank, generator=generator) * size
    return found


def write_adapter(
    directory: Path, config: ModelConfig, seed: int, *, rank: int = 8, modules: list[str] | None = None,
    size: float = 0.1, weights: dict[str, Tensor] | None = None, **settings: Any,
) -> Path:  # fmt: skip
    """Write an adapter; `settings` are fields of its config beside the usual ones."""
    modules = ALL if modules is None else modules
    directory.mkdir(parents=True, exist_ok=True)
    save_file(weights or random_weights(config, seed, rank, modules, size), directory / WEIGHTS)
    usual = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": modules, "bias": "none"}
    (directory / ADAPTER_CONFIG).write_text(json.dumps(usual | settings))
    return directory


def additions(directory: Path) -> dict[str, Tensor]:
    """What the adapter adds to each weight of the model, by the weight's name."""
    from safetensors.torch import load_file

    settings, tensors = json.loads((directory / ADAPTER_CONFIG).read_text()), load_file(directory / WEIGHTS)
    rank = settings["r"]
    scale = settings["lora_alpha"] / (math.sqrt(rank) if settings.get("use_rslora") else rank)
    return {
        name.removeprefix("base_model.model.").replace("lora_B.", ""): scale * up @ tensors[name.replace("_B.", "_A.")]
        for name, up in tensors.items()
        if "lora_B" in name
    }
