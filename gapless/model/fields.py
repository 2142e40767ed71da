"""Typed reading of a JSON object; every complaint names the file and the field."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gapless.base.errors import CheckpointError
from gapless.base.files import read_json


@dataclass(frozen=True)
class Fields:
    """A JSON object of one file. A missing or null field takes the default; without a default it is an error."""

    path: Path
    values: dict[str, Any]
    prefix: str = ""

    @classmethod
    def of_file(cls, path: Path) -> Fields:
        values = read_json(path)
        if values is None:
            raise CheckpointError(f"{path}: no such file; is this the directory of a Hugging Face checkpoint?")
        return cls(path, values)

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def error(self, name: str, rule: str, value: object = None) -> CheckpointError:
        value = self.values.get(name) if value is None else value
        found = "is missing; it " if value is None else ""
        got = "" if value is None else f", got {value!r}"
        return CheckpointError(f"{self.path}: {self.prefix}{name} {found}{rule}{got}")

    def whole(self, name: str, default: int | None = None, low: int = 1) -> int:
        value = self._get(name, default)
        if type(value) is not int or not low <= value < 2**53:
            raise self.error(name, f"must be a whole number of at least {low}")
        return value

    def real(
        self,
        name: str,
        default: float | None = None,
        *,
        above: float = -math.inf,
        low: float = -math.inf,
        high: float = math.inf,
    ) -> float:
        value = self._get(name, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.error(name, "must be a number")
        if not (above < value and low <= value <= high):
            raise self.error(name, f"must be above {above}" if value <= above else f"must be from {low} to {high}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self.error(name, "must be a string")
        return value

    def sub(self, name: str) -> Fields:
        """A nested object; empty where it is missing."""
        value = self._get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "must be an object")
        return Fields(self.path, value, f"{self.prefix}{name}.")

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value
