"""Turns the fields of a config dataclass into flags: names, types, and the reading of their values."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from gapless.base.config import field_kind
from gapless.base.sizes import read_size
from gapless.base.spellings import VALUES
from gapless.base.variables import PREFIX
from gapless.cli.errors import UsageError

_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


class Spec(NamedTuple):
    """One field of a config record, as a flag."""

    owner: type
    field: str
    kind: type
    """bool, int, float or str"""
    many: bool
    """The field is a tuple of `kind`."""
    optional: bool
    default: Any
    help: str
    group: str
    choices: tuple[str, ...]
    aliases: tuple[str, ...]

    @property
    def flag(self) -> str:
        return "--" + self.field.replace("_", "-")

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.flag, *(a for a in self.aliases if a != self.flag))

    @property
    def env(self) -> str:
        return PREFIX + self.field.upper()


def specs(config: type) -> list[Spec]:
    """The flags of a frozen dataclass whose fields were made by `gapless.base.config.flag`."""
    hints = typing.get_type_hints(config)
    found = []
    for f in fields(config):
        kind, many, optional = field_kind(hints[f.name])
        assert kind in _READERS, f"{config.__name__}.{f.name}: no flag can be made of type {hints[f.name]}"
        meta: Mapping[str, Any] = f.metadata
        texts = meta["help"], meta["group"], tuple(meta["choices"]), tuple(meta["aliases"])
        found.append(Spec(config, f.name, kind, many, optional, f.default, *texts))
    return found


def convert(spec: Spec, value: Any, source: str) -> Any:
    """`value` (text, or a value of a config file) as the field's type. Raises UsageError naming `source`."""
    if spec.many:
        items = value.split(",") if isinstance(value, str) else value
        if not isinstance(items, (list, tuple)):
            raise UsageError(f"{source}: expected a list, got {value!r}")
        return tuple(_one(spec, item.strip() if isinstance(item, str) else item, source) for item in items)
    return _one(spec, value, source)


def _one(spec: Spec, value: Any, source: str) -> Any:
    if isinstance(value, str):
        value = VALUES.get(spec.field, {}).get(value, value)
    if spec.optional and _means_default(spec, value):
        return None
    read, expected = _READERS[spec.kind]
    result = read(value)
    if result is None:
        raise UsageError(f"{source}: expected {expected}, got {value!r}")
    if spec.choices and result not in spec.choices:
        raise UsageError(f"{source}: must be one of {', '.join(spec.choices)}, got {value!r}")
    return result


def _means_default(spec: Spec, value: Any) -> bool:
    if spec.kind is int:
        return value is None or value in (-1, "-1") or (isinstance(value, str) and value.lower() in ("auto", "none"))
    return value is None


def read_bool(value: Any) -> bool | None:
    """True for on, yes, true and 1, False for their opposites, None for anything else."""
    if isinstance(value, bool):
        return value
    return _WORDS.get(value.lower()) if isinstance(value, str) else None


def _read_int(value: Any) -> int | None:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    return read_size(value) if isinstance(value, str) else None


def _read_float(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        return float(value)
    except ValueError:
        return None


def _read_str(value: Any) -> str | None:
    # A file may have `depth = 8` for a field of text.
    if isinstance(value, bool):
        return None
    return str(value) if isinstance(value, (str, int, float)) else None


_READERS: dict[type, tuple[typing.Callable[[Any], Any], str]] = {
    bool: (read_bool, "true or false"),
    int: (_read_int, "a whole number (32k and 32KB are 32,000, 32K and 32KiB are 32,768)"),
    float: (_read_float, "a number"),
    str: (_read_str, "text"),
}
"""The reader of a kind's values, which returns None for any other, and the words for the kind"""
