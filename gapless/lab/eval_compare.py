"""Two result files of `gapless eval`, question by question: who flipped, and whether that may be chance."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from gapless.base.errors import ConfigError
from gapless.lab.eval_report import KIND, Share

SHOWN = 40
"""Characters of what was extracted, in a row of the list."""


class Flip(NamedTuple):
    """A question that one of the two got right. `a` and `b` are what was extracted."""

    id: str
    category: str
    gold: str
    a: str
    b: str
    a_right: bool


class Comparison(NamedTuple):
    """Counts are over the questions that both files hold."""

    both_right: int
    both_wrong: int
    flips: tuple[Flip, ...]
    other_prompt: int
    """Questions that were asked in other words."""
    same_text: int
    only_a: int
    """Questions that B does not hold."""
    only_b: int

    @property
    def n(self) -> int:
        return self.both_right + self.both_wrong + len(self.flips)

    @property
    def lost(self) -> int:
        """Right in A alone."""
        return sum(flip.a_right for flip in self.flips)

    @property
    def gained(self) -> int:
        return len(self.flips) - self.lost

    @property
    def difference(self) -> tuple[float, float]:
        """B's accuracy less A's, and its standard error over pairs: sqrt((b + c - (b - c)²/n) / n²)."""
        b, c, n = self.lost, self.gained, self.n
        return (c - b) / n, math.sqrt(b + c - (c - b) ** 2 / n) / n

    @property
    def p_value(self) -> float:
        return mcnemar(self.lost, self.gained)

    def lines(self, a: str, b: str) -> list[str]:
        delta, error = self.difference
        share_a, share_b = (Share(self.both_right + more, self.n) for more in (self.lost, self.gained))
        lines = [
            f"A: {a}: {100 * share_a.accuracy:.2f} % ± {100 * share_a.stderr:.2f}",
            f"B: {b}: {100 * share_b.accuracy:.2f} % ± {100 * share_b.stderr:.2f}",
            f"{self.n} questions in both: {self.both_right} right in both, {self.both_wrong} wrong in both, "
            f"{self.lost} right in A alone, {self.gained} right in B alone",
            f"B - A: {100 * delta:+.2f} points ± {100 * error:.2f}; McNemar's exact p-value {self.p_value:.4g}",
            f"same text: {self.same_text} of {self.n}",
        ]
        if self.other_prompt:
            lines.append(f"note: {self.other_prompt} questions were not asked in the same words")
        if self.only_a or self.only_b:
            lines.append(f"note: left out: {self.only_a} questions of A alone, {self.only_b} of B alone")
        for flip in self.flips:
            who = "A" if flip.a_right else "B"
            lines.append(f"{flip.id} ({flip.category}): gold {flip.gold}, A {_cut(flip.a)}, B {_cut(flip.b)}: {who}")
        return lines

    def json(self) -> dict[str, Any]:
        delta, error = self.difference
        counts = ("n", "both_right", "both_wrong", "lost", "gained", "same_text", "other_prompt", "only_a", "only_b")
        tested = {"difference": delta, "stderr": error, "mcnemar_p": self.p_value}
        return {
            "kind": f"{KIND}-compare",
            **{name: getattr(self, name) for name in counts},
            **tested,
            "flips": [flip._asdict() for flip in self.flips],
        }


def _cut(text: str) -> str:
    return repr(text if len(text) <= SHOWN else text[:SHOWN] + "…")


def mcnemar(lost: int, gained: int) -> float:
    """Two-sided exact p-value: how likely flips fall at least so unevenly, each with chance one half either way."""
    n = lost + gained
    tail: int = sum(math.comb(n, k) for k in range(min(lost, gained) + 1))
    return min(1.0, float(2 * tail / 2**n))


def compare(a: Mapping[str, Any], b: Mapping[str, Any]) -> Comparison:
    """Match two result files by question id. Raises ConfigError when they share none."""
    left, right = ({row["id"]: row for row in result["questions"]} for result in (a, b))
    pairs = [(row, right[name]) for name, row in left.items() if name in right]
    if not pairs:
        raise ConfigError("the two files have no question in common")
    flips = [
        Flip(x["id"], x["category"], x["gold"], x["extracted"], y["extracted"], x["correct"])
        for x, y in pairs
        if x["correct"] != y["correct"]
    ]
    return Comparison(
        both_right=sum(x["correct"] and y["correct"] for x, y in pairs),
        both_wrong=sum(not x["correct"] and not y["correct"] for x, y in pairs),
        flips=tuple(flips),
        other_prompt=sum(x["prompt_sha256"] != y["prompt_sha256"] for x, y in pairs),
        same_text=sum(x["text"] == y["text"] for x, y in pairs),
        only_a=len(left) - len(pairs),
        only_b=len(right) - len(pairs),
    )


TYPES = {"id": str, "category": str, "gold": str, "extracted": str, "correct": bool, "prompt_sha256": str, "text": str}


def read_result(path: Path) -> dict[str, Any]:
    """A file that `gapless eval --out` wrote. Raises ConfigError naming it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(value, dict) or value.get("kind") != KIND or not isinstance(value.get("questions"), list):
        raise ConfigError(f"{path} is no result of gapless eval --out")
    for row in value["questions"]:
        if not isinstance(row, dict) or any(type(row.get(name)) is not kind for name, kind in TYPES.items()):
            raise ConfigError(f"{path}: a question lacks one of {', '.join(TYPES)}, or has it in another form")
    return value
