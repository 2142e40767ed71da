"""The field `speculative_config`, as vLLM spells it."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from gapless.base.errors import ConfigError

METHODS = ("ngram", "eagle3")
MAX_DRAFTS = 8


class SpeculativeConfig(NamedTuple):
    """How an engine guesses tokens that it then verifies."""

    method: str = "ngram"
    num_speculative_tokens: int = 4
    """Tokens guessed at a time, for each row"""
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    """How many of a row's last tokens must have come before in its history, at least, and are looked for at most"""
    model: str = ""
    """Directory of a head; the demo model has one of its own"""

    @classmethod
    def parse(cls, text: str) -> SpeculativeConfig:
        """Read the JSON of the field. Raises ConfigError naming what is wrong in it."""
        name = "speculative_config"
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{name} must be JSON such as {EXAMPLE}: {error}") from error
        if not isinstance(value, dict):
            raise ConfigError(f"{name} must be a JSON object such as {EXAMPLE}, got {text!r}")
        if unknown := sorted(set(value) - set(cls._fields)):
            raise ConfigError(f"{name}: {unknown[0]!r} is not known; fields are {', '.join(cls._fields)}")
        config = cls(**value)
        if config.method not in METHODS:
            raise ConfigError(f"{name}.method must be one of {', '.join(METHODS)}, got {config.method!r}")
        if not isinstance(config.model, str):
            raise ConfigError(f"{name}.model must be the directory of a head, got {config.model!r}")
        if config.model and config.method == "ngram":
            raise ConfigError(f"{name}.model is of no use to ngram: leave it out, or set method to eagle3")
        shortest, longest = config.prompt_lookup_min, config.prompt_lookup_max
        _check(f"{name}.num_speculative_tokens", config.num_speculative_tokens, 1)
        _check(f"{name}.prompt_lookup_min", shortest, 1)
        _check(f"{name}.prompt_lookup_max", longest, shortest)
        return config


def _check(name: str, value: Any, low: int) -> None:
    if type(value) is not int or not low <= value <= MAX_DRAFTS:
        raise ConfigError(f"{name} must be a whole number from {low} to {MAX_DRAFTS}, got {value!r}")


EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'
