"""Typed reading of a JSON object; every complaint names the file and the field."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gapless.base.errors import CheckpointError
from gapless.base.files import read_json

T = TypeVar("T")


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
        return self._of(bool, name, default, "must be true or false")

    def text(self, name: str, default: str) -> str:
        return self._of(str, name, default, "must be a string")

    def sub(self, name: str) -> Fields:
        """A nested object; empty where it is missing."""
        return Fields(self.path, self._of(dict, name, {}, "must be an object"), f"{self.prefix}{name}.")

    def _of(self, kind: type[T], name: str, default: T, rule: str) -> T:
        value = self._get(name, default)
        if not isinstance(value, kind):
            raise self.error(name, rule)
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        return default if value is None else value
