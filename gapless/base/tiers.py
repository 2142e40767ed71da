"""Reads what `--kv-tier` says: where copies of KV pages are kept beyond the device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from gapless.base.errors import ConfigError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)(i?B)?")
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
KINDS = ("host",)


class TierConfig(NamedTuple):
    """One tier."""

    kind: str
    nbytes: int


def parse_tiers(texts: Sequence[str]) -> dict[str, TierConfig]:
    """Return the tiers by kind. Raises ConfigError for one that is unknown, named twice, or without a size."""
    found: dict[str, TierConfig] = {}
    for text in texts:
        kind, _, size = text.partition(":")
        if kind not in KINDS:
            raise ConfigError(f"kv_tiers must be {' or '.join(f'{one}:SIZE' for one in KINDS)}, got {text!r}")
        if kind in found:
            raise ConfigError(f"kv_tiers names {kind} twice: give it one size")
        found[kind] = TierConfig(kind, parse_bytes(size, text))
    return found


def parse_bytes(size: str, text: str) -> int:
    """Return a size such as 8GiB, 8G (the same), 8GB (8 * 10**9) or 8589934592 in bytes. Raises ConfigError."""
    match = _SIZE.fullmatch(size.strip())
    nbytes = 0
    if match:
        number, unit, suffix = match.groups()
        nbytes = int(float(number) * (1000 if suffix == "B" and unit else 1024) ** _POWER[unit])
    if not 0 < nbytes < 2**63:
        raise ConfigError(f"kv_tiers: the size must be like 8GiB, got {size!r} in {text!r}")
    return nbytes
