"""Did both arms say the same? The gate before any comparison of speed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gapless.lab.records import Sample


class FirstDifference(NamedTuple):
    """The first place at which two answers to one prompt differ."""

    seed: int
    place: int
    """The prompt: its place in the data set of that seed."""
    at: int
    """Index of the first token (character where the server sends no token ids) that differs."""
    a: str
    b: str
    """What each arm has there; "" where it has ended."""


class Sameness(NamedTuple):
    """What was compared, over all pairs of runs."""

    compared: int
    differ: int
    by: str
    """"token ids", "text", or "token ids and text" where only some answers brought ids."""
    first: FirstDifference | None
    not_compared: int
    """Prompts that failed in an arm."""


def compare_tokens(pairs: Sequence[tuple[int, Sequence[Sample], Sequence[Sample]]]) -> Sameness:
    """`pairs`: (seed, samples of A, samples of B) of runs that played the same prompts."""
    compared, differ, lost, first = 0, 0, 0, None
    kinds = set()
    for seed, a_samples, b_samples in pairs:
        b_by_place = {sample.place: sample for sample in b_samples}
        for a in sorted(a_samples):
            b = b_by_place.get(a.place)
            if b is None or a.error or b.error:
                lost += 1
                continue
            kinds.add("token ids" if a.token_ids and b.token_ids else "text")
            found = first_difference(a, b)
            compared += 1
            differ += found is not None
            if found is not None and first is None:
                first = FirstDifference(seed, a.place, *found)
    return Sameness(compared, differ, " and ".join(sorted(kinds, reverse=True)), first, lost)


def first_difference(a: Sample, b: Sample) -> tuple[int, str, str] | None:
    """(index, what A has there, what B has there), by token ids where both have them, else by text."""
    left: Sequence[int] | str = a.text
    right: Sequence[int] | str = b.text
    if a.token_ids and b.token_ids:
        left, right = a.token_ids, b.token_ids
    if left == right:
        return None
    same = next((k for k, (x, y) in enumerate(zip(left, right, strict=False)) if x != y), min(len(left), len(right)))
    x, y = (str(side[same]) if same < len(side) else "" for side in (left, right))
    return same, x, y
