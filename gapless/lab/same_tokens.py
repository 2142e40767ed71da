"""Did both arms say the same? The gate before any comparison of speed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from gapless.lab.records import Sample


def compare_tokens(pairs: Sequence[tuple[int, Sequence[Sample], Sequence[Sample]]]) -> dict[str, Any]:
    """Compare runs that played the same prompts: (seed, samples of A, samples of B). Returns a part of the report.

    compared, differ  numbers of prompts
    by                "token ids", "text", or "token ids and text" where only some answers brought ids
    first             the first difference (see `first_difference`), with the seed and the place of its prompt; or None
    not_compared      number of prompts that failed in an arm
    """
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
            compared += 1
            if found := first_difference(a, b):
                differ += 1
                first = first or {"seed": seed, "place": a.place, **found}
    by = " and ".join(sorted(kinds, reverse=True))
    return {"compared": compared, "differ": differ, "by": by, "first": first, "not_compared": lost}


def first_difference(a: Sample, b: Sample) -> dict[str, Any] | None:
    """Return where two answers first differ (`at`, from 0) and what each has there, "" where it has ended.

    They are compared by token ids where both have them, else by text.
    """
    both = (a.token_ids, b.token_ids) if a.token_ids and b.token_ids else (a.text, b.text)
    places = enumerate(zip_longest(*both, fillvalue=""))
    return next(({"at": at, "a": str(x), "b": str(y)} for at, (x, y) in places if x != y), None)
