"""Which values of a parameter `make test` runs, and which wait for `make prove`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sharpest(values: Iterable[Any], keep: int = 1, mark: str = "seeds", whole: bool = False) -> list[Any]:
    """Return `values` for parametrize: the first `keep` as they are, the others with a mark that `make prove` runs.

    A tuple is the values of several parameters, unless it is `whole`.
    """
    values = list(values)
    marks = getattr(pytest.mark, mark)
    return [
        *values[:keep],
        *(pytest.param(*((value,) if whole else _parts(value)), marks=marks) for value in values[keep:]),
    ]


def _parts(value: Any) -> tuple[Any, ...]:
    """The values of several parameters; a named tuple is one."""
    return value if isinstance(value, tuple) and not hasattr(value, "_fields") else (value,)
