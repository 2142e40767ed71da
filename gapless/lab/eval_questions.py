"""Questions with one right answer each: GSM8K's form, MMLU-Pro's form, and the demo model's held-out problems.

The result of an answer is extracted by the rules of lm-eval's gsm8k and mmlu_pro, strict and flexible.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gapless.base.errors import ConfigError
from gapless.demo import held_out
from gapless.lab.datasets import json_objects

OPTION_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SHOTS_SEED = 1 << 40
"""Examples for the demo's problems are drawn from a stream of their own."""
CHOICE_TASK = (
    "The following are multiple choice questions (with answers){}. Think step by step and then finish your answer "
    'with "the answer is (X)" where X is the correct letter choice.'
)
THINK = "Let's think step by step."
NO_CATEGORY = "all"
MATCHES = ("flexible", "strict")
STRICT_NUMBER = re.compile(r"#### (-?[0-9.,]+)")
ANY_NUMBER = re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+")
EXTRACTION_RULES = {
    "number": {"strict": 'the first "#### N"', "flexible": "the last number"},
    "choice": {
        "strict": 'the first "answer is (X)"',
        "flexible": 'as strict, else the last "Answer: X", else the last letter that stands alone',
    },
}


class Question(NamedTuple):
    """`gold` is a number as it was written, or with `options` a letter; `worked` is what an example answers."""

    id: str
    category: str
    text: str
    gold: str
    worked: str
    options: tuple[str, ...] = ()

    @property
    def letters(self) -> str:
        return OPTION_LETTERS[: len(self.options)]


def demo_questions(count: int, seed: int) -> list[Question]:
    """Held-out arithmetic problems, in categories by the number of steps of the worked answer."""
    made = []
    for number, (text, worked) in enumerate(held_out(count, seed)):
        steps, _, gold = worked.rpartition("\n#### ")
        lines = steps.count("\n") + 1
        made.append(Question(f"demo-{seed}-{number}", f"{lines} step{'s'[: lines > 1]}", text, gold, worked))
    return made


def demo_shots(count: int, questions: Sequence[Question]) -> list[Question]:
    """Worked examples that are none of the questions."""
    asked = {question.text for question in questions}
    drawn = demo_questions(count + len(asked), SHOTS_SEED) if count else []
    return [shot for shot in drawn if shot.text not in asked][:count]


def load_questions(path: Path) -> list[Question]:
    """JSON lines in GSM8K's or MMLU-Pro's form, mixed as they come. Raises ConfigError naming file and line."""
    found = [_question(row, where) for where, row in json_objects(path, "the questions")]
    seen: set[str] = set()
    for question in found:
        if question.id in seen:
            raise ConfigError(f"{path}: two questions have the id {question.id!r}")
        seen.add(question.id)
    return found


def _question(row: Mapping[str, Any], where: str) -> Question:
    if not isinstance(row.get("question"), str) or not row["question"].strip():
        raise ConfigError(f'{where}: a question is {{"question": text, "answer": ...}}')
    line = where.rpartition(":")[2]
    name = str(next((row[key] for key in ("question_id", "id") if row.get(key) is not None), line))
    category = str(row.get("category") or row.get("subject") or NO_CATEGORY)
    options = row.get("options", row.get("choices"))
    return _choice(row, options, name, category, where) if options else _number(row, name, category, where)


def _number(row: Mapping[str, Any], name: str, category: str, where: str) -> Question:
    """GSM8K: the number after the last `####`; an answer without that mark is the number itself."""
    worked = str(row.get("answer", "")).strip()
    gold = worked.rpartition("####")[2].strip()
    if not any(letter.isdigit() for letter in gold):
        raise ConfigError(f'{where}: "answer" must end in "#### 42", or be a number')
    return Question(name, category, row["question"], gold, worked)


def _choice(row: Mapping[str, Any], options: Any, name: str, category: str, where: str) -> Question:
    """MMLU-Pro: the right letter as "answer", or its place from 0 as "answer_index" (or as "answer", as in MMLU)."""
    if not isinstance(options, list) or not 2 <= len(options) <= len(OPTION_LETTERS):
        raise ConfigError(f'{where}: "options" must be a list of 2 to {len(OPTION_LETTERS)} texts')
    letters, answer, index = OPTION_LETTERS[: len(options)], row.get("answer"), row.get("answer_index")
    if answer is None or isinstance(answer, int):
        answer, index = None, answer if index is None else index
    letter = answer.strip().upper() if isinstance(answer, str) else ""
    named = (letters.find(letter) if len(letter) == 1 else -1) if letter else None
    places = {place for place in (named, index) if place is not None}
    if len(places) != 1 or not all(type(place) is int and 0 <= place < len(letters) for place in places):
        raise ConfigError(f'{where}: "answer" must be one of {letters}, and agree with "answer_index" where both stand')
    gold = letters[places.pop()]
    worked = str(row.get("cot_content") or "").removeprefix("A:").strip().removeprefix(THINK).strip()
    texts = tuple(str(option).strip() for option in options)
    return Question(name, category, row["question"], gold, worked or f"The answer is ({gold}).", texts)


def split_shots(questions: Sequence[Question], count: int) -> tuple[list[Question], list[Question]]:
    """(examples, the rest): the first `count` of each category are examples, and are not asked."""
    taken: dict[str, int] = {}
    shots, rest = list[Question](), list[Question]()
    for question in questions:
        group = question.category if question.options else ""
        taken[group] = taken.get(group, 0) + 1
        (shots if taken[group] <= count else rest).append(question)
    if not rest:
        raise ConfigError(f"{count} examples of each category leave no question to ask: give --shots-file")
    return shots, rest


def examples_for(question: Question, pool: Sequence[Question], count: int) -> list[Question]:
    """The first `count` of the pool of the same form; of the same category if options are asked for."""
    alike = [shot for shot in pool if bool(shot.options) == bool(question.options) and shot.text != question.text]
    same = [shot for shot in alike if shot.category == question.category]
    return (same if question.options and same else alike)[:count]


def completion_prompt(question: Question, shots: Sequence[Question]) -> str:
    """The question with its examples as one text, word for word the one of lm-eval's gsm8k and mmlu_pro."""
    if not question.options:
        examples = [f"Question: {shot.text}\nAnswer: {shot.worked}\n\n" for shot in shots]
        return f"{''.join(examples)}Question: {question.text}\nAnswer:"
    examples = [f"{_with_options(shot)}Answer: {THINK} {shot.worked}\n\n" for shot in shots]
    return f"{_choice_task(question)}\n{''.join(examples)}{_with_options(question)}Answer: {THINK}"


def chat_messages(question: Question, shots: Sequence[Question], turns: bool = True) -> tuple[dict[str, str], ...]:
    """The question as a conversation, with the examples as turns of it or in the question's own message."""
    if not turns:
        return ({"role": "user", "content": completion_prompt(question, shots)},)
    messages: list[dict[str, str]] = []
    for shot in shots:
        messages += [{"role": "user", "content": _asked(shot)}, {"role": "assistant", "content": shot.worked}]
    messages.append({"role": "user", "content": _asked(question)})
    if question.options:
        messages[0]["content"] = f"{_choice_task(question)}\n\n{messages[0]['content']}"
    return tuple(messages)


def _choice_task(question: Question) -> str:
    return CHOICE_TASK.format("" if question.category == NO_CATEGORY else f" about {question.category}")


def _asked(question: Question) -> str:
    return _with_options(question).rstrip("\n") if question.options else question.text


def _with_options(question: Question) -> str:
    lines = [f"{letter}. {text}\n" for letter, text in zip(question.letters, question.options, strict=True)]
    return f"Question:\n{question.text}\nOptions:\n{''.join(lines)}"


def find(question: Question, text: str) -> dict[str, str]:
    """The number or the letter that `text` gives as its answer, by MATCHES; "" where a rule finds none."""
    return _letter_in(text, question.letters) if question.options else _number_in(text)


def is_right(found: str, gold: str) -> bool:
    """Equal without commas, dollar signs and a full stop at the end, as lm-eval compares; 42 and 42.0 differ."""
    return bool(found) and _plain(found) == _plain(gold)


def _plain(text: str) -> str:
    return re.sub(r"[,$]", "", text).strip().removesuffix(".").lower()


def _number_in(text: str) -> dict[str, str]:
    strict = STRICT_NUMBER.search(text)
    # lm-eval's pattern takes dots and commas without a digit as well; they are no number.
    numbers = [match for match in ANY_NUMBER.findall(text) if any(letter.isdigit() for letter in match)]
    return {"strict": strict[1] if strict else "", "flexible": numbers[-1] if numbers else ""}


def _letter_in(text: str, letters: str) -> dict[str, str]:
    one = f"[{letters}]"
    strict = re.search(rf"answer is \(?({one})\b\)?", text)
    if strict:
        return {"strict": strict[1], "flexible": strict[1]}
    named = re.findall(rf"[aA]nswer:\s*\(?({one})\b", text)
    alone = re.findall(rf"\b({one})\b", text)
    last = (named or alone or [""])[-1]
    return {"strict": "", "flexible": last}
