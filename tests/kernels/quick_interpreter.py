"""A pytest plugin: Triton's interpreter patches its language once a launch, and not at every call of a helper.

That takes half of its time otherwise. What is patched, and what kernels compute, is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

# Triton's own private names: it has no public ones for this.
_Scope = interpreter._LangPatchScope
_plain_patch: Callable[[Any], Any] = interpreter._patch_lang
_plain_restore: Callable[[Any], None] = _Scope.restore
_patched: set[int] = set()
"""The modules that the launch which runs now has patched, by id."""


@functools.cache
def _languages(function: Any) -> frozenset[int]:
    """Those of Triton's modules that the function's file imports."""
    return frozenset(id(value) for value in function.__globals__.values() if value is tl or value is tl.core)


def _patch(function: Any) -> Any:
    if _languages(function) <= _patched:
        return _Scope()
    _patched.update(_languages(function))
    return _plain_patch(function)


def _restore(scope: Any) -> None:
    """Launches do it at their end; a helper's patches, which nothing restores, go with those of its launch."""
    _patched.clear()
    _plain_restore(scope)


interpreter._patch_lang = _patch
_Scope.restore = _restore
