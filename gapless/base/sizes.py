"""Sizes as people write them, in one notation everywhere."""

from __future__ import annotations

import re

_SIZE = re.compile(r"([+-]?\d+(?:\.\d+)?)(?:([kmgt])|([KMGT])(i?B)?)?")
_POWER = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def read_size(text: str) -> int | None:
    """`32k` = `32KB` = 32,000, `32K` = `32KiB` = 32,768, `1.3GiB` rounded down; None for any other text."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    number, small, large, suffix = match.groups()
    if not (small or large or "." in number):
        return int(number)
    size = float(number) * (1000 if small or suffix == "B" else 1024) ** _POWER[(small or large or "").upper()]
    return int(size) if large or size.is_integer() else None
