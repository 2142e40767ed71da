"""Private names of torch that tests need and that have no public counterpart, each read in one place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def operators(namespace: str) -> Iterator[torch.library.Library]:
    """A part of a namespace of operators, which is taken back at the end."""
    library = torch.library.Library(namespace, "FRAGMENT")
    try:
        yield library
    finally:
        take_back(library)


def take_back(library: torch.library.Library) -> None:
    """Remove the operators now: else they stay until the library is collected."""
    library._destroy()


def without_modes() -> AbstractContextManager[Any]:
    """Inside, no dispatch mode sees what runs."""
    return _disable_current_modes()


def open_modes() -> tuple[int, int]:
    """Dispatch modes and function modes that are open on this thread."""
    return torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()


def all_schemas() -> list[Any]:
    return torch._C._jit_get_all_schemas()


def schema_of(operator: Any) -> Any:
    """Its `torch.FunctionSchema`, of which torch shows the text alone."""
    return operator._schema


def spin(cycles: int) -> None:
    """A kernel that keeps a GPU busy."""
    torch.cuda._sleep(cycles)
