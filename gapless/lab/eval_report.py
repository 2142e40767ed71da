"""Answers to figures: who was right, by category, with standard errors; the file that keeps every question.

Two such files are compared question by question: who flipped, and whether that may be chance.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gapless.base.errors import ConfigError
from gapless.lab.eval_questions import EXTRACTION_RULES, MATCHES, Question, find, is_right
from gapless.lab.eval_run import EvalFlags, prompt_hash
from gapless.lab.records import Sample
from gapless.lab.target import PromptContent

KIND = "gapless-eval"
Z95 = 1.959963984540054
SHOWN_CHARS = 40
"""Characters of the extracted result, in a row of the list."""
TYPES = {"id": str, "category": str, "gold": str, "extracted": str, "correct": bool, "prompt_sha256": str, "text": str}


class RightShare(NamedTuple):
    """`right` of `n`. A share of 0 or 1 has a standard error of 0: believe the interval."""

    right: int
    n: int

    @property
    def accuracy(self) -> float:
        return self.right / self.n if self.n else 0.0

    @property
    def stderr(self) -> float:
        """sqrt(p (1 - p) / (n - 1)): the binomial's, from the sample variance, as lm-eval gives it; 0 for n < 2."""
        p = self.accuracy
        return math.sqrt(p * (1 - p) / (self.n - 1)) if self.n > 1 else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval: (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)."""
        if not self.n:
            return 0.0, 1.0
        p, n, z = self.accuracy, self.n, Z95
        middle, half = p + z * z / (2 * n), z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        return (max(0.0, (middle - half) / (1 + z * z / n)), min(1.0, (middle + half) / (1 + z * z / n)))

    def json(self) -> dict[str, Any]:
        low, high = self.interval
        numbers = {"accuracy": self.accuracy, "stderr": self.stderr, "interval_95": [low, high]}
        return {"n": self.n, "correct": self.right, **numbers}


class EvalResult:
    """One evaluation: its questions and their answers, marked. An answer with an error is wrong."""

    def __init__(
        self,
        flags: EvalFlags,
        questions: Sequence[Question],
        contents: Sequence[PromptContent],
        answers: Sequence[Sample],
    ) -> None:
        self.flags = flags
        self.match = flags.match
        """The rule that decides."""
        self.other = MATCHES[self.match == MATCHES[0]]
        self.kinds = sorted({"choice" if question.options else "number" for question in questions})
        """The entries of RULES that the questions need: number, choice or both."""
        asked = zip(questions, contents, answers, strict=True)
        self.records = [_record(question, content, answer, self.match) for question, content, answer in asked]
        """The file's record of each question: the answer, and the result of either rule."""
        self.errors = [row for row in self.records if row["error"]]
        self.cut = sum(row["finish_reason"] == "length" for row in self.records)
        self.total = self.share(self.match)

    def share(self, match: str, category: str | None = None) -> RightShare:
        """Count who is right by a rule, in one category or in all."""
        chosen = [is_right(row[match], row["gold"]) for row in self.records if category in (None, row["category"])]
        return RightShare(sum(chosen), len(chosen))

    def rows(self) -> list[tuple[str, RightShare, RightShare]]:
        """(category, by the deciding rule, by the other), sorted by name, the whole last."""
        names = sorted({row["category"] for row in self.records})
        rows = [(name, self.share(self.match, name), self.share(self.other, name)) for name in names]
        return [*rows, ("all", self.total, self.share(self.other))]

    def lines(self) -> Iterator[str]:
        """The table, and what went wrong."""
        rows = self.rows()
        if len(rows) == 2:
            rows = rows[1:]
        width = max(len("category"), *(len(name) for name, _, _ in rows))
        head = f"{'category':<{width}}  {'n':>6}  {self.match:>9}  {'± s.e.':>7}"
        head += f"  {'95 % interval':>15}  {self.other:>9}"
        yield from (head, "-" * len(head))
        yield from (_line(name, width, share, beside) for name, share, beside in rows)
        yield from (f"note: {note}" for note in self.notes())
        yield from (f"error: {row['id']}: {row['error']}" for row in self.errors)

    def notes(self) -> list[str]:
        found = []
        if self.cut:
            found.append(f"{self.cut} answers ended at {self.flags.max_tokens} tokens (--max-tokens)")
        if self.errors:
            found.append(f"{len(self.errors)} questions got no whole answer and count as wrong")
        return found

    def json(self) -> dict[str, Any]:
        """The result's JSON; the caller adds date, data and target."""
        task = self.flags
        asked = {
            "backend": "openai-chat" if task.chat else "openai",
            "shots": task.shots,
            "turns": task.shots_as_turns,
            "max_tokens": task.max_tokens,
            "temperature": task.temperature,
            "concurrency": task.concurrency,
            "stop": list(task.stop),
            "match": self.match,
            "rules": {kind: EXTRACTION_RULES[kind] for kind in self.kinds},
        }
        results = {
            **self.total.json(),
            **{match: self.share(match).json() for match in MATCHES},
            "errors": len(self.errors),
            "cut": self.cut,
            "by_category": {name: share.json() for name, share, _ in self.rows()[:-1]},
        }
        return {"kind": KIND, "task": asked, "results": results, "notes": self.notes(), "questions": self.records}


def _line(name: str, width: int, share: RightShare, beside: RightShare) -> str:
    low, high = share.interval
    interval = f"{100 * low:.1f} .. {100 * high:.1f}"
    numbers = f"{100 * share.accuracy:>8.2f}%  {100 * share.stderr:>6.2f}%  {interval:>15}"
    return f"{name:<{width}}  {share.n:>6}  {numbers}  {100 * beside.accuracy:>8.2f}%"


def _record(question: Question, content: PromptContent, answer: Sample, match: str) -> dict[str, Any]:
    found = find(question, "" if answer.error else answer.text)
    return {
        "id": question.id,
        "category": question.category,
        "prompt_sha256": prompt_hash(content),
        "text": answer.text,
        "extracted": found[match],
        "gold": question.gold,
        "correct": is_right(found[match], question.gold),
        **found,
        "finish_reason": answer.finish,
        "output_tokens": answer.output_tokens,
        "error": answer.error,
    }


class Comparison:
    """Two result files, matched by question id. Counts are over the questions that both hold.

    Raises ConfigError when they share none.
    """

    def __init__(self, a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
        left, right = ({row["id"]: row for row in result["questions"]} for result in (a, b))
        pairs = [(row, right[name]) for name, row in left.items() if name in right]
        if not pairs:
            raise ConfigError("the two files have no question in common")
        self.n = len(pairs)
        self.both_right = sum(x["correct"] and y["correct"] for x, y in pairs)
        self.both_wrong = sum(not x["correct"] and not y["correct"] for x, y in pairs)
        self.flips = [
            {key: x[key] for key in ("id", "category", "gold")}
            | {"a": x["extracted"], "b": y["extracted"], "a_right": x["correct"]}
            for x, y in pairs
            if x["correct"] != y["correct"]
        ]
        """Questions that one of the two got right. `a` and `b` are the extracted results."""
        self.other_prompt = sum(x["prompt_sha256"] != y["prompt_sha256"] for x, y in pairs)
        """Questions that were asked in other words."""
        self.same_text = sum(x["text"] == y["text"] for x, y in pairs)
        self.only_a, self.only_b = len(left) - len(pairs), len(right) - len(pairs)
        """Questions that the other does not hold."""

    @property
    def lost(self) -> int:
        """Right in A alone."""
        return sum(flip["a_right"] for flip in self.flips)

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

    def lines(self, a: str, b: str) -> Iterator[str]:
        delta, error = self.difference
        for name, file, more in (("A", a, self.lost), ("B", b, self.gained)):
            share = RightShare(self.both_right + more, self.n)
            yield f"{name}: {file}: {100 * share.accuracy:.2f} % ± {100 * share.stderr:.2f}"
        yield (
            f"{self.n} questions in both: {self.both_right} right in both, {self.both_wrong} wrong in both, "
            f"{self.lost} right in A alone, {self.gained} right in B alone"
        )
        yield f"B - A: {100 * delta:+.2f} points ± {100 * error:.2f}; McNemar's exact p-value {self.p_value:.4g}"
        yield f"same text: {self.same_text} of {self.n}"
        if self.other_prompt:
            yield f"note: {self.other_prompt} questions were not asked in the same words"
        if self.only_a or self.only_b:
            yield f"note: left out: {self.only_a} questions of A alone, {self.only_b} of B alone"
        for flip in self.flips:
            who = "A" if flip["a_right"] else "B"
            said = f"gold {flip['gold']}, A {_cut(flip['a'])}, B {_cut(flip['b'])}"
            yield f"{flip['id']} ({flip['category']}): {said}: {who}"

    def json(self) -> dict[str, Any]:
        delta, error = self.difference
        counts = ("n", "both_right", "both_wrong", "lost", "gained", "same_text", "other_prompt", "only_a", "only_b")
        tested = {"difference": delta, "stderr": error, "mcnemar_p": self.p_value}
        return {
            "kind": f"{KIND}-compare",
            **{name: getattr(self, name) for name in counts},
            **tested,
            "flips": self.flips,
        }


def _cut(text: str) -> str:
    return repr(text if len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "…")


def mcnemar(lost: int, gained: int) -> float:
    """Two-sided exact p-value: how likely flips fall at least so unevenly, each with chance one half either way."""
    n = lost + gained
    tail: int = sum(math.comb(n, k) for k in range(min(lost, gained) + 1))
    return min(1.0, float(2 * tail / 2**n))


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
