"""How a protection is taken away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, NamedTuple

from simulation.scenario import Scenario

from gapless.loop.loop import Loop

Prepare = Callable[[Loop], None]
Where = Callable[[Scenario], bool]


def untouched(loop: Loop) -> None:
    """The loop stays as it was built."""


def anywhere(scenario: Scenario) -> bool:
    """Every scenario has what the protection protects."""
    return True


class Site(NamedTuple):
    """One protection. `broken` takes it away while it is entered; `prepare` changes each loop that is built.

    `alone` is what the sound engine needs so that this protection is the only one in the way: a ring of one slot, say,
    where the depth limit would cover for the slot's fence. `where` says which scenarios have what it protects: others
    cannot notice, and are left out.
    """

    name: str
    hazard: int
    broken: Callable[[], AbstractContextManager[None]]
    prepare: Prepare = untouched
    alone: Prepare = untouched
    where: Where = anywhere
    first: int = 0
    """The seed from which on there are such scenarios"""


@contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """`owner.name` is `function(original, ...)` for a while."""
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: function(original, *args, **kwargs))
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def both(*contexts: AbstractContextManager[None]) -> Iterator[None]:
    """All of them at once."""
    with ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield
