"""The Jinja environment of chat templates: what transformers offers, in a sandbox, on a budget.

A template comes with the model and sees what clients send. Loops, calls, filters and operators are metered where
jinja2 passes them; see budget.py for what one render may spend.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from gapless.text.budget import BUDGET, check_chars, check_function, check_operator, weigh

_LOOP = "metered loop"
_TEXT = "metered text"


class Environment(ImmutableSandboxedEnvironment):
    """Compiles chat templates. Render only while BUDGET holds a Budget."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        # Without the optimizer nothing of the template runs while it is compiled, where no budget counts.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[Generation, loopcontrols],
            finalize=_print,
        )
        self.filters = {name: _metered(name, function) for name, function in self.filters.items()}
        self.filters |= {"tojson": _tojson, _LOOP: _loop, _TEXT: _text}
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": TemplateDict(),
            "namespace": TemplateNamespace,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = nodes.Filter(loop.iter, _LOOP, [], [], None, None, lineno=loop.lineno)
        for concat in list(tree.find_all(nodes.Concat)):
            parts = nodes.List(list(concat.nodes), lineno=concat.lineno)
            concat.nodes = [nodes.Filter(parts, _TEXT, [], [], None, None, lineno=concat.lineno)]
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        BUDGET.get().spend()
        check_operator(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        BUDGET.get().spend()
        # The sandbox wraps str.format.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(owner, str):
            check_function(__obj.__name__, [owner, *args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)


class Generation(Extension):
    """{% generation %} marks what an assistant said; it prints its body."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class TemplateDict:
    """`dict` for templates: it makes dicts and has nothing else of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class TemplateNamespace(Namespace):
    """`namespace` without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # self comes in args, so that a template can say namespace(self=...).
        values = dict(*args[1:], **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(args[0], values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: str) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise TemplateError(f"a namespace cannot hold {name!r}: rename it without the underscore")


def _loop(iterable: Any) -> Any:
    """Return what a for loop runs over; its length is spent at once where it has one."""
    if hasattr(iterable, "__len__"):
        BUDGET.get().spend(len(iterable) + 1)
        return iterable
    return _one_by_one(iterable)


def _one_by_one(iterable: Iterable[Any]) -> Iterator[Any]:
    budget = BUDGET.get()
    for item in iterable:
        budget.spend()
        yield item


def _text(parts: list[Any]) -> str:
    """The operands of `~`, joined."""
    weigh(parts)
    return "".join(map(str, parts))


def _print(value: Any) -> Any:
    """Return what {{ }} prints."""
    BUDGET.get().print(weigh(value))
    return value


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not jinja2's own tojson: that one escapes for HTML.
    check_chars(weigh(x) * (1 + (indent if isinstance(indent, int) else 0)))
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, on the budget. wraps() keeps jinja2's mark of what is passed first."""

    @wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        BUDGET.get().spend()
        check_function(name, [*args, *kwargs.values()])
        result = function(*args, **kwargs)
        if isinstance(result, str):
            check_chars(len(result))
        return result

    return metered
