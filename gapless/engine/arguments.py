"""EngineConfig from keyword arguments, under our names and other engines'."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from gapless.base.config import EngineConfig, field_kind
from gapless.base.errors import ConfigError
from gapless.base.progress import warn
from gapless.base.spellings import VALUES, Fate, Foreign, did_you_mean, foreign, rows_of


def make_config(model: str, options: Mapping[str, Any]) -> EngineConfig:
    """Return an EngineConfig from keyword arguments, which may be named after other engines' flags.

    Raises ConfigError for an unknown name, and for a setting that cannot be met. Settings without effect are logged.
    """
    hints = typing.get_type_hints(EngineConfig)
    ours = {alias.lstrip("-").replace("-", "_"): f.name for f in fields(EngineConfig) for alias in _aliases(f)}
    given: dict[str, Any] = {"model": str(model)}
    for name, value in options.items():
        field = ours.get(name)
        if field is None:
            given |= _foreign(name, value, ours)
        elif value is not None or type(None) in typing.get_args(hints[field]):
            given[field] = _as_ours(field, value)
    return EngineConfig(**given)


def one_engine(config: EngineConfig) -> EngineConfig:
    """Return the config. Raises ConfigError for one of several engines, which only a server has."""
    if config.data_parallel_size > 1:
        raise ConfigError("data_parallel_size: one object is one engine: make several, or use gapless serve")
    return config


def _aliases(field: Any) -> tuple[str, ...]:
    return (field.name, *(alias for alias in field.metadata["aliases"] if alias.startswith("--")))


def _as_ours(field: str, value: Any) -> Any:
    """Return a value in our spelling: float16 for half and torch.float16."""
    text = str(value).removeprefix("torch.") if field == "dtype" else value
    return VALUES.get(field, {}).get(text, text) if isinstance(text, str) else value


def _foreign(name: str, value: Any, ours: Mapping[str, str]) -> dict[str, Any]:
    """Return our settings for another engine's keyword argument; a switch that is off, or None, sets nothing."""
    positive, negative = (f"--{word}{name.replace('_', '-')}" for word in ("", "no-"))
    if not rows_of(positive):
        known = did_you_mean(name, ours) or f"; known: {', '.join(f.name for f in fields(EngineConfig))}"
        raise ConfigError(f"unknown engine argument {name!r}{known}")
    if value is None:
        return {}
    switch = isinstance(value, bool) and any(not row.at for row in rows_of(positive))
    row = foreign(negative if value is False else positive, None if switch else str(value))
    typed = f"{name}={value!r:.40}"
    if row is None:
        takes = " or ".join(row.at or "true or false" for row in rows_of(positive))
        raise ConfigError(f"{typed} is not accepted: it takes {takes}")
    why = re.sub(r"--([a-z][a-z-]+)", lambda flag: flag[1].replace("-", "_"), row.text)
    if row.fate is Fate.NOTHING and value is False:
        return {}
    if row.fate is Fate.NOTHING:
        warn(f"{typed} {row.fate.value}: {why}")
        return {}
    if row.fate is Fate.SET and "." not in row.field and hasattr(EngineConfig, row.field):
        return {row.field: _set(name, row, value)}
    if row.fate is Fate.NOT_YET:
        raise ConfigError(f"{typed} {row.fate.value}" + (f": {why}" if why else ""))
    why = f"write {row.field.partition('.')[0]}" if row.fate is Fate.SET else why
    raise ConfigError(f"{name} is not accepted: {why}")  # without its value, which may be secret


def _set(name: str, row: Foreign, value: Any) -> Any:
    kind, many, _ = field_kind(typing.get_type_hints(EngineConfig)[row.field])
    text = row.text.format(value)
    if many:
        return tuple(value) if isinstance(value, (list, tuple)) else (text,)
    try:
        return text == "on" if kind is bool else kind(text)
    except ValueError as error:
        raise ConfigError(f"{name} must be a {'whole ' * (kind is int)}number, got {value!r:.40}") from error
