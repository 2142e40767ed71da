"""Typed reading of a JSON object. Complaints name file and field; unread fields are listed too."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from gapless.base.errors import CheckpointError, ForeignModelError
from gapless.base.files import read_json
from gapless.base.progress import warn

T = TypeVar("T")
KnownFields = Mapping[str, tuple[Any, ...]]
"""Fields that nothing reads, by full name, with their neutral values; none listed stands for any."""
WAS_READ, SILENT, UNUSED = "read", "changes nothing", "not used"


class Heard(NamedTuple):
    """The treatment of a field of a file."""

    path: Path
    name: str
    value: Any
    use: str
    """READ, SILENT or UNUSED"""
    why: str = ""

    def __str__(self) -> str:
        value = repr(self.value)
        shown = value if len(value) <= 80 else value[:77] + "..."
        return f"{self.name} = {shown} is {self.use}" + (f": {self.why}" if self.why else "")


def warn_of(heard: Iterable[Heard]) -> None:
    """Log each field that is not used."""
    for one in heard:
        if one.use == UNUSED:
            warn(f"{one.path}: {one}", file=str(one.path), field=one.name, value=one.value)


@dataclass(frozen=True)
class Fields:
    """A JSON object of one file. A missing or null field takes the default; without a default it is an error.

    It notes which fields are read; `heard` yields all of them.
    """

    path: Path
    values: dict[str, Any]
    prefix: str = ""
    known: KnownFields = field(default_factory=dict)
    _read: set[str] = field(default_factory=set, init=False, repr=False, compare=False)
    _unused: dict[str, str] = field(default_factory=dict, init=False, repr=False, compare=False)
    _parts: dict[str, Fields] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of_file(cls, path: Path, known: KnownFields | None = None) -> Fields:
        values = read_json(path)
        if values is None:
            raise CheckpointError(f"{path}: no such file; is this the directory of a Hugging Face checkpoint?")
        return cls(path, values, known=known or {})

    def __contains__(self, name: str) -> bool:
        return self.values.get(name) is not None

    def get(self, name: str) -> Any:
        """Return a field as it is, None where it is missing."""
        self._read.add(name)
        return self.values.get(name)

    def null(self, name: str) -> bool:
        """Return whether a field is given as null."""
        return self.get(name) is None and name in self.values

    def unused(self, name: str, why: str) -> None:
        """Note that a given field does not count."""
        self._unused[name] = why

    def heard(self) -> Iterator[Heard]:
        """Yield every field and what became of it; call this when all has been read."""
        for name, value in self.values.items():
            if name in self._parts and name not in self._unused:
                yield from self._parts[name].heard()
            else:
                yield Heard(self.path, self.prefix + name, value, self._use(name, value), self._unused.get(name, ""))

    def _use(self, name: str, value: Any) -> str:
        if name in self._unused:
            return UNUSED
        if name in self._read:
            return WAS_READ
        harmless = self.known.get(self.prefix + name, (None,))
        return SILENT if says_nothing(value) or not harmless or value in harmless else UNUSED

    def error(self, name: str, rule: str, value: object = None) -> CheckpointError:
        return CheckpointError(self._text(name, rule, value))

    def foreign(self, name: str, rule: str, value: object = None) -> ForeignModelError:
        """Return the error of a field that asks for a forward of another kind."""
        return ForeignModelError(self._text(name, rule, value))

    def _text(self, name: str, rule: str, value: object) -> str:
        value = self.values.get(name) if value is None else value
        found = "is missing; it " if value is None else ""
        got = "" if value is None else f", got {value!r}"
        return f"{self.path}: {self.prefix}{name} {found}{rule}{got}"

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

    def reals(self, name: str) -> tuple[float, ...]:
        """Return a list of numbers above 0."""
        value = self._of(list, name, [], "must be a list of numbers")
        if not value or any(type(x) not in (int, float) or not 0 < x < math.inf for x in value):
            raise self.error(name, "must be a list of numbers above 0")
        return tuple(map(float, value))

    def flag(self, name: str, default: bool) -> bool:
        return self._of(bool, name, default, "must be true or false")

    def text(self, name: str, default: str) -> str:
        return self._of(str, name, default, "must be a string")

    def sub(self, name: str) -> Fields:
        """A nested object; empty where it is missing."""
        if name not in self._parts:
            values = self._of(dict, name, {}, "must be an object")
            self._parts[name] = Fields(self.path, values, f"{self.prefix}{name}.", self.known)
        return self._parts[name]

    def _of(self, kind: type[T], name: str, default: T, rule: str) -> T:
        value = self._get(name, default)
        if not isinstance(value, kind):
            raise self.error(name, rule)
        return value

    def _get(self, name: str, default: Any) -> Any:
        value = self.get(name)
        return default if value is None else value


def says_nothing(value: Any) -> bool:
    """Return whether a value asks for nothing: null, false, or an empty text, list or object; 0 is a number."""
    return value is None or value is False or value in ("", [], {})
