"""The Jinja environment of chat templates: what transformers offers, in a sandbox, for a bounded time.

A template is the operator's own, or of the checkpoint that the operator chose: requests bring none. So what it
makes inside is not metered. The conversation is the client's: however long, it must neither hold up a render, hence the
time, looked at in loops and calls, nor fill memory, hence the longest prompt.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARS = 16_000_000
"""Longest prompt"""
_DEADLINE: ContextVar[float] = ContextVar("deadline")
_LOOP = "timed loop"


def deadline_in(seconds: float) -> float:
    """Return the end of a render, by the time of this thread: a busy machine must not fail a cheap template."""
    return time.thread_time() + seconds


def rendered(template: Template, values: Mapping[str, Any], deadline: float) -> str:
    """Return what a template makes of these values. Raises TemplateError, and whatever it does wrong itself."""
    token = _DEADLINE.set(deadline)
    try:
        pieces, size = [], 0
        for piece in template.generate(values):
            size += len(piece)
            if size > MAX_CHARS:
                raise TemplateError("it makes too much text")
            pieces.append(piece)
        return "".join(pieces)
    finally:
        _DEADLINE.reset(token)


def _look_at_time() -> None:
    if time.thread_time() > _DEADLINE.get():
        raise TemplateError("it takes too long")


class Environment(ImmutableSandboxedEnvironment):
    """Compiles chat templates; `rendered` renders them."""

    def __init__(self) -> None:
        # Without the optimizer nothing of the template runs while it is compiled; time is not checked there.
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[Generation, loopcontrols])
        self.filters |= {"tojson": _tojson, _LOOP: _timed}
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
        return tree

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        _look_at_time()
        return super().call(__context, __obj, *args, **kwargs)


class Generation(Extension):
    """{% generation %} marks an assistant's words; it prints its body."""

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
        # self comes in args, so that a template can write namespace(self=...).
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


def _timed(iterable: Iterable[Any]) -> Iterator[Any]:
    for item in iterable:
        _look_at_time()
        yield item


def _tojson(
    x: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Not jinja2's own tojson: that one escapes for HTML.
    return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
