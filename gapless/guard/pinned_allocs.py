"""Finds lines that allocate pinned memory over and over, in place of keeping a ring of buffers.

One buffer, or a ring of them, is allocated once and kept. So an allocation counts if the same line, called from the
same line, allocated before and its first buffer was freed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor

from .sites import Frame, user_stack
from .watch import ThreadState

_first: dict[tuple[Frame, ...], weakref.ref[Any]] = {}
"""The storage that each line and its caller allocated first."""


def allocated(watch: ThreadState, make: Callable[[], Tensor]) -> Tensor:
    """Call `make`, which allocates pinned memory; reported first if its place allocates again."""
    place = user_stack()[:2]
    first = _first.get(place)
    if first is not None and first() is None:
        watch.flag("pinned-alloc")
    result = make()
    if first is None:
        with suppress(NotImplementedError, RuntimeError):  # some layouts and wrappers have no storage
            _first[place] = weakref.ref(result.untyped_storage())
    return result


def forget() -> None:
    """Forget all allocations."""
    _first.clear()
