"""What the front reads of a model directory: tokenizer, end-of-sequence ids, default sampling parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError
from gapless.model.config import load_config, resolve_model_dir
from gapless.text.tokenizer import Tokenizer


class Front(NamedTuple):
    """Everything about a model that the front needs and the back does not."""

    tokenizer: Tokenizer
    eos_ids: tuple[int, ...] = ()
    defaults: Mapping[str, Any] = {}
    """Sampling parameters that the model's generation_config.json recommends."""


def open_front(config: EngineConfig) -> Front:
    """Read what `config` names; no weights, no torch. Raises CheckpointError or ConfigError naming the file."""
    model = load_config(config)
    tokenizer = Tokenizer.from_dir(config.tokenizer or resolve_model_dir(config.model), config.chat_template)
    own = tokenizer.eos_token_id
    eos_ids = dict.fromkeys([*model.eos_token_ids, *([] if own is None else [own])])
    return Front(tokenizer, tuple(eos_ids), model.default_sampling)


def make_config(model: str, options: dict[str, Any]) -> EngineConfig:
    """EngineConfig from keyword arguments; an unknown name is a ConfigError that lists the known ones."""
    known = [f.name for f in fields(EngineConfig)]
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown engine argument {name!r}; known: {', '.join(known)}")
    return EngineConfig(model=str(model), **options)
