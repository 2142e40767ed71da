"""Answers to figures: who was right, by category, with standard errors; and the file that keeps every question."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gapless.lab.eval_questions import MATCHES, RULES, Extracted, Question, find, is_right
from gapless.lab.eval_run import Answered, EvalFlags, prompt_hash
from gapless.lab.target import Content

KIND = "gapless-eval"
Z95 = 1.959963984540054


class Marked(NamedTuple):
    """A question, what was answered, and what either rule makes of it. An answer with an error is wrong."""

    question: Question
    prompt_sha256: str
    answered: Answered
    found: Extracted

    def right(self, match: str) -> bool:
        return not self.answered.error and is_right(getattr(self.found, match), self.question)


def mark(questions: Sequence[Question], contents: Sequence[Content], answers: Sequence[Answered]) -> list[Marked]:
    """The answers, marked; in the order of the questions."""
    rows = zip(questions, contents, answers, strict=True)
    return [Marked(q, prompt_hash(c), a, Extracted("", "") if a.error else find(q, a.text)) for q, c, a in rows]


class Share(NamedTuple):
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


class EvalResult(NamedTuple):
    """One evaluation."""

    flags: EvalFlags
    marked: Sequence[Marked]

    @property
    def match(self) -> str:
        """The rule that decides."""
        return self.flags.match

    @property
    def other(self) -> str:
        """The rule that does not."""
        return MATCHES[self.match == MATCHES[0]]

    def share(self, match: str, category: str | None = None) -> Share:
        """Count who is right by a rule, in one category or in all."""
        chosen = [one.right(match) for one in self.marked if category in (None, one.question.category)]
        return Share(sum(chosen), len(chosen))

    @property
    def total(self) -> Share:
        return self.share(self.match)

    @property
    def errors(self) -> list[Marked]:
        return [one for one in self.marked if one.answered.error]

    @property
    def cut(self) -> int:
        return sum(one.answered.finish == "length" for one in self.marked)

    def rows(self) -> list[tuple[str, Share, Share]]:
        """(category, by the deciding rule, by the other), sorted by name, the whole last."""
        names = sorted({one.question.category for one in self.marked})
        rows = [(name, self.share(self.match, name), self.share(self.other, name)) for name in names]
        return [*rows, ("all", self.total, self.share(self.other))]

    def lines(self) -> list[str]:
        """The table, and what went wrong."""
        rows = self.rows()
        if len(rows) == 2:
            rows = rows[1:]
        width = max(len("category"), *(len(name) for name, _, _ in rows))
        head = (
            f"{'category':<{width}}  {'n':>6}  {self.match:>9}  {'± s.e.':>7}  {'95 % interval':>15}  {self.other:>9}"
        )
        lines = [head, "-" * len(head)]
        lines += [_line(name, width, share, beside) for name, share, beside in rows]
        lines += [f"note: {note}" for note in self.notes()]
        return lines + [f"error: {one.question.id}: {one.answered.error}" for one in self.errors]

    def notes(self) -> list[str]:
        found = []
        if self.cut:
            found.append(f"{self.cut} answers ended at {self.flags.max_tokens} tokens (--max-tokens)")
        if self.errors:
            found.append(f"{len(self.errors)} questions got no whole answer and count as wrong")
        return found

    def json(self) -> dict[str, Any]:
        """The result's JSON, to which the caller adds date, data and target."""
        task = self.flags
        kinds = sorted({"choice" if one.question.options else "number" for one in self.marked})
        asked = {
            **{"backend": "openai-chat" if task.chat else "openai", "shots": task.shots, "turns": task.shots_as_turns},
            **{"max_tokens": task.max_tokens, "temperature": task.temperature, "concurrency": task.concurrency},
            **{"stop": list(task.stop), "match": self.match, "rules": {kind: RULES[kind] for kind in kinds}},
        }
        results = {
            **self.total.json(),
            **{match: self.share(match).json() for match in MATCHES},
            **{"errors": len(self.errors), "cut": self.cut},
            "by_category": {name: share.json() for name, share, _ in self.rows()[:-1]},
        }
        questions = [_record(one, self.match) for one in self.marked]
        return {"kind": KIND, "task": asked, "results": results, "notes": self.notes(), "questions": questions}


def _line(name: str, width: int, share: Share, beside: Share) -> str:
    low, high = share.interval
    interval = f"{100 * low:.1f} .. {100 * high:.1f}"
    numbers = f"{100 * share.accuracy:>8.2f}%  {100 * share.stderr:>6.2f}%  {interval:>15}"
    return f"{name:<{width}}  {share.n:>6}  {numbers}  {100 * beside.accuracy:>8.2f}%"


def _record(one: Marked, match: str) -> Mapping[str, Any]:
    question, answered = one.question, one.answered
    return {
        **{"id": question.id, "category": question.category, "prompt_sha256": one.prompt_sha256},
        **{"text": answered.text, "extracted": getattr(one.found, match), "gold": question.gold},
        **{"correct": one.right(match), "strict": one.found.strict, "flexible": one.found.flexible},
        **{"finish_reason": answered.finish, "output_tokens": answered.output_tokens, "error": answered.error},
    }
