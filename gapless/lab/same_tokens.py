"""Whether both arms gave the same tokens: the gate before any comparison of speed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TypedDict

from gapless.lab.records import Sample


class TokenDifference(TypedDict):
    """The first place, from 0, where two answers differ, and the text of each there: "" after its end."""

    at: int
    a: str
    b: str


class FirstDifference(TokenDifference):
    seed: int
    place: int
    """The prompt's number"""


class Sameness(TypedDict):
    """A part of the report."""

    compared: int
    """Prompts"""
    differ: int
    by: str
    """"token ids", "text", or "token ids and text" where only some answers brought ids"""
    first: FirstDifference | None
    not_compared: int
    """Prompts that failed in an arm"""


def compare_tokens(pairs: Sequence[tuple[int, Sequence[Sample], Sequence[Sample]]]) -> Sameness:
    """Compare runs that played the same prompts: (seed, samples of A, samples of B)."""
    compared, differ, lost = 0, 0, 0
    first: FirstDifference | None = None
    kinds = set()
    for seed, a_samples, b_samples in pairs:
        b_by_place = {sample.place: sample for sample in b_samples}
        for a in sorted(a_samples):
            b = b_by_place.get(a.place)
            if b is None or a.error or b.error:
                lost += 1
                continue
            kinds.add("token ids" if a.token_ids and b.token_ids else "text")
            compared += 1
            if found := first_difference(a, b):
                differ += 1
                first = first or {"seed": seed, "place": a.place, **found}
    by = " and ".join(sorted(kinds, reverse=True))
    return {"compared": compared, "differ": differ, "by": by, "first": first, "not_compared": lost}


def first_difference(a: Sample, b: Sample) -> TokenDifference | None:
    """Return where two answers first differ, by token ids where both have them, else by text."""
    both = (a.token_ids, b.token_ids) if a.token_ids and b.token_ids else (a.text, b.text)
    for at, (x, y) in enumerate(zip_longest(*both, fillvalue="")):
        if x != y:
            return {"at": at, "a": str(x), "b": str(y)}
    return None
