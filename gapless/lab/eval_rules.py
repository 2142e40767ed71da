"""What an answer says: the rules of lm-eval's gsm8k and mmlu_pro, strict and flexible. Pure."""

from __future__ import annotations

import re
from typing import NamedTuple

from gapless.lab.eval_questions import Question

MATCHES = ("flexible", "strict")
STRICT_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
ANY_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
RULES = {
    "number": {"strict": 'the first "#### N"', "flexible": "the last number"},
    "choice": {
        "strict": 'the first "answer is (X)"',
        "flexible": 'as strict, else the last "Answer: X", else the last letter that stands alone',
    },
}


class Extracted(NamedTuple):
    """What either rule finds in an answer; "" is nothing."""

    strict: str
    flexible: str


def find(question: Question, text: str) -> Extracted:
    """The number or the letter that `text` gives as its answer."""
    return _letter(text, question.letters) if question.options else _number(text)


def is_right(found: str, question: Question) -> bool:
    """Equal once commas, dollar signs and a full stop at the end are gone, as lm-eval compares; 42 and 42.0 differ."""
    return bool(found) and _plain(found) == _plain(question.gold)


def _plain(text: str) -> str:
    return re.sub(r"[,$]", "", text).strip().removesuffix(".").lower()


def _number(text: str) -> Extracted:
    strict = STRICT_NUMBER.search(text)
    # lm-eval's pattern takes dots and commas without a digit as well; they are no number.
    numbers = [match for match in ANY_NUMBER.findall(text) if any(letter.isdigit() for letter in match)]
    return Extracted(strict[1] if strict else "", numbers[-1] if numbers else "")


def _letter(text: str, letters: str) -> Extracted:
    one = f"[{letters}]"
    strict = re.search(rf"answer is \(?({one})\b\)?", text)
    if strict:
        return Extracted(strict[1], strict[1])
    named = re.findall(rf"[aA]nswer:\s*\(?({one})\b", text)
    alone = re.findall(rf"\b({one})\b", text)
    last = (named or alone or [""])[-1]
    return Extracted("", last)
