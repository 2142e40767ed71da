"""Logits processors, functions that change the logits of the rows that ask, as flags and requests name them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gapless.base.errors import ConfigError, RequestError

MAX_PROCESSORS = 8
"""Processors of one engine."""
MAX_ARGUMENTS = 8
"""Numbers that a request may hand to one of them."""
MAX_ARGUMENT = 3.4e38
FIELD = "logits_processors"


@dataclass(frozen=True)
class ProcessorCall:
    """A request's wish for one processor, in vLLM's names."""

    qualname: str
    """The name that the engine has for the processor"""
    args: tuple[float, ...] = ()


def as_calls(given: object) -> tuple[ProcessorCall, ...] | None:
    """Return what a request asks for; None for nothing. Raises RequestError."""
    if given is None:
        return None
    if not isinstance(given, (list, tuple)) or len(given) > MAX_PROCESSORS:
        raise RequestError(f"{FIELD} must be a list of at most {MAX_PROCESSORS} names or objects", FIELD)
    calls = tuple(map(_as_call, given))
    if len({call.qualname for call in calls}) < len(calls):
        raise RequestError(f"{FIELD} must name each processor once", FIELD)
    return calls or None


def _as_call(given: Any) -> ProcessorCall:
    if isinstance(given, ProcessorCall):
        return given
    if callable(given):
        raise RequestError(
            f"{FIELD} are named: give the engine the function at start, as {FIELD}=('module:function',), or let one "
            "choose among tokens as prefix_allowed_tokens_fn", FIELD
        )  # fmt: skip
    parts = {"qualname": given} if isinstance(given, str) else given
    if not isinstance(parts, Mapping) or not isinstance(parts.get("qualname"), str):
        raise RequestError(f'{FIELD} must hold names, or objects with a "qualname" and "args"', FIELD)
    if parts.get("kwargs") or not parts.keys() <= {"qualname", "args", "kwargs"}:
        raise RequestError(f"{FIELD}: a processor takes numbers by their places: list them in args", FIELD)
    return ProcessorCall(parts["qualname"], _arguments(parts.get("args") or ()))


def _arguments(args: object) -> tuple[float, ...]:
    if not isinstance(args, (list, tuple)) or len(args) > MAX_ARGUMENTS:
        raise RequestError(f"{FIELD}: args must be a list of at most {MAX_ARGUMENTS} numbers", FIELD)
    for number in args:
        real = isinstance(number, (int, float)) and not isinstance(number, bool)
        if not real or not math.isfinite(number) or abs(number) > MAX_ARGUMENT:
            raise RequestError(f"{FIELD}: args must be finite numbers that fit into 32 bits", FIELD)
    return tuple(map(float, args))


def numbered(calls: Sequence[ProcessorCall], known: Sequence[str]) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """Return the place of each processor in `known`, and its numbers. Raises RequestError."""
    for call in calls:
        if call.qualname not in known:
            names = ", ".join(known) or "none"
            raise RequestError(f"{FIELD}: there is no {call.qualname[:80]!r}; those of this engine: {names}", FIELD)
    return tuple((known.index(call.qualname), call.args) for call in calls)


def processor_paths(given: Sequence[str]) -> dict[str, str]:
    """Return where each processor is, as `module:function`, by its name. Raises ConfigError."""
    found: dict[str, str] = {}
    for text in given:
        name, named, path = text.rpartition("=")
        module, colon, function = path.partition(":")
        name = name if named else function
        if not (module and colon and function and name.isprintable() and name) or name in found:
            raise ConfigError(f"{FIELD} must be module:function or name=module:function, each name once, got {text!r}")
        found[name] = path
    if len(found) > MAX_PROCESSORS:
        raise ConfigError(f"{FIELD} holds {len(found)} processors, at most {MAX_PROCESSORS} are allowed")
    return found
