"""The families that are served, one row each: a tiny random model of transformers, and the implementation that serves
it. Tests run the table, and the manual's matrix is made from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import NamedTuple

import transformers
from model.model_harness import FAMILIES as NATIVE
from model.model_harness import reference

from gapless.model.registry import Impl


class FamilyRow(NamedTuple):
    name: str
    make: Callable[[], transformers.PreTrainedModel]
    """A model with random weights, large enough that every term matters"""
    impl: Impl


def _fallback() -> list[FamilyRow]:
    """The rows that transformers computes, in its own rows of tests; natively served ones too, asked for so."""
    if find_spec("model.transformers_rows") is None:
        return []
    rows = import_module("model.transformers_rows")
    return [FamilyRow(f"{name}@", partial(rows.make, row), Impl.TRANSFORMERS) for name, row in rows.SERVED.items()]


FAMILIES = [*(FamilyRow(name, partial(reference, name), Impl.NATIVE) for name in NATIVE), *_fallback()]
