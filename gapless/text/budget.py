"""Budget of one render of a chat template: items looped over, characters made, seconds of its thread."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from jinja2 import TemplateError

MAX_CHARS = 16_000_000
"""Longest text a template may make, in one value or as its output."""
MAX_PRINTED = 4 * MAX_CHARS
"""Characters printed in all; a macro's text counts again where the macro is printed."""
MAX_ITEMS = 2_000_000
MAX_SECONDS = 2.0
MAX_BITS = 4_096
"""Longest whole number, in bits."""


class BudgetError(TemplateError):
    """The template worked longer, or made more, than one render may."""


class Budget:
    """The rest of the budget of a render."""

    def __init__(self, items: int = MAX_ITEMS, seconds: float = MAX_SECONDS) -> None:
        self._items = items
        self._printed = MAX_PRINTED
        # Time of this thread, not of the clock: a busy machine must not fail a cheap template.
        self._deadline = time.thread_time() + seconds

    def spend(self, items: int = 1) -> None:
        self._items -= items
        if self._items < 0:
            raise BudgetError("it loops too much")
        if time.thread_time() > self._deadline:
            raise BudgetError("it takes too long")

    def print(self, chars: int) -> None:
        self._printed -= chars
        if self._printed < 0:
            raise BudgetError("it makes too much text")


BUDGET: ContextVar[Budget] = ContextVar("budget")
"""Set around every render."""


def check_chars(count: int) -> None:
    if count > MAX_CHARS:
        raise BudgetError("it makes too much text")


def weigh(value: Any) -> int:
    """Characters that printing `value` takes at least. A list that holds itself many times over is found here."""
    if isinstance(value, str):
        return len(value)
    budget, total, todo = BUDGET.get(), 0, [value]
    while todo:
        item = todo.pop()
        total += len(item) if isinstance(item, str) else 1
        check_chars(total)
        if isinstance(item, Mapping):
            budget.spend(len(item))
            todo += [*item.keys(), *item.values()]
        elif isinstance(item, (list, tuple)):
            budget.spend(len(item))
            todo += item
    return total


def check_operator(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation before it makes something huge."""
    if operator == "%" and isinstance(left, str):
        check_function("format", [left, right])
    elif operator == "+" and _is_sequence(left) and _is_sequence(right):
        check_chars(len(left) + len(right))
    elif operator == "*" and (_is_sequence(left) or _is_sequence(right)):
        check_chars(_length_or_number(left) * _length_or_number(right))
    elif isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
        bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise BudgetError("it makes too large a number")


def _is_sequence(value: Any) -> bool:
    return isinstance(value, (str, list, tuple))


def _length_or_number(value: Any) -> int:
    if _is_sequence(value):
        return len(value)
    return max(value, 0) if isinstance(value, int) else 0


def check_function(name: str, args: Sequence[Any]) -> None:
    """Refuse a filter or a method of str before it makes far more text than it was given."""
    estimate = _ESTIMATES.get(name)
    if estimate is not None:
        check_chars(estimate(args))


def _padded(args: Sequence[Any]) -> int:
    """Every line (or tab) of the first text grows by the widest other argument."""
    text = next((arg for arg in args if isinstance(arg, str)), "")
    width = max((_length_or_number(arg) for arg in args if arg is not text), default=0)
    return len(text) + (1 + text.count("\n") + text.count("\t")) * width


def _replaced(args: Sequence[Any]) -> int:
    texts = [arg for arg in args if isinstance(arg, str)]
    return len(texts[0]) + texts[0].count(texts[1]) * len(texts[2]) if len(texts) >= 3 else 0


def _joined(args: Sequence[Any]) -> int:
    """Every part is followed by the separator, whichever argument that is."""
    sizes = [len(arg) for arg in args if _is_sequence(arg)]
    between = sizes[0] * sizes[1] if len(sizes) > 1 else 0
    return between + weigh(args)


_WIDE = re.compile(r"%(\([^)]*\))?[^a-zA-Z%]*(\d{6,}|\*)|\{[^{}]*:[^{}]*(\d{6,}|\{)")
"""A format whose width has six digits or comes from an argument."""


def _formatted(args: Sequence[Any]) -> int:
    if isinstance(args[0], str) and _WIDE.search(args[0]):
        raise BudgetError("it formats with too large a width")
    return weigh(args)


_ESTIMATES: dict[str, Callable[[Sequence[Any]], int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "wordwrap"), _padded),
    **dict.fromkeys(("string", "pprint", "xmlattr", "urlencode", "escape", "e", "forceescape", "trim"), weigh),
    **dict.fromkeys(("format", "format_map"), _formatted),
    "replace": _replaced,
    "join": _joined,
}
