"""Questions from files, the words in which they are asked, and what is read from an answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gapless.base.errors import ConfigError
from gapless.lab.eval_questions import (
    Question,
    chat_messages,
    completion_prompt,
    demo_questions,
    demo_shots,
    examples_for,
    find,
    is_right,
    load_questions,
    split_shots,
)

SUM = {"question": "One and one?", "answer": "1 + 1 = 2\n#### 2"}
PICK = {"question": "Which?", "options": ["red ", "blue", "green"], "answer": "B", "category": "colour"}
CHOICE = Question("1", "colour", "Which?", "B", "The answer is (B).", ("red", "blue", "green"))


def write(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def number(gold: str, text: str = "?") -> Question:
    return Question("1", "all", text, gold, f"#### {gold}")


def test_both_forms_are_read(tmp_path):
    rows = [SUM, "", {**PICK, "question_id": 70}, {**PICK, "id": "x", "answer": None, "answer_index": 2}]
    rows += [{"question": "How many?", "choices": ["1", "2"], "answer": 0, "subject": "counting"}]
    one, two, three, four = load_questions(write(tmp_path, *rows))
    assert one == Question("1", "all", "One and one?", "2", SUM["answer"])
    assert two == CHOICE._replace(id="70")
    assert (three.id, three.gold, three.letters) == ("x", "C", "ABC")
    assert (four.id, four.gold, four.category) == ("5", "A", "counting")


def test_a_worked_choice_loses_what_the_prompt_says_already(tmp_path):
    chain = "A: Let's think step by step. Sky is blue. The answer is (B)."
    (question,) = load_questions(write(tmp_path, {**PICK, "cot_content": chain}))
    assert question.worked == "Sky is blue. The answer is (B)."


@pytest.mark.parametrize(
    "row, words",
    [
        ("{", ":1: not JSON"),
        ("[]", ":1: expected an object"),
        ({"question": " ", "answer": "#### 1"}, ":1: a question is"),
        ({"question": "?", "answer": "#### none"}, "must end in"),
        ({"question": "?"}, "must end in"),
        ({**PICK, "options": ["one"]}, "a list of 2 to 26"),
        ({**PICK, "answer": "D"}, "one of ABC"),
        ({**PICK, "answer": "BC"}, "one of ABC"),
        ({**PICK, "answer_index": 2}, "agree with"),
        ({**PICK, "answer": None, "answer_index": 3}, "one of ABC"),
        ({**PICK, "answer": None, "answer_index": True}, "one of ABC"),
        ({**PICK, "answer": None}, "one of ABC"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, row, words):
    with pytest.raises(ConfigError, match=words) as caught:
        load_questions(write(tmp_path, row))
    assert "questions.jsonl:1" in str(caught.value)


def test_a_wrong_file_of_questions_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        load_questions(tmp_path / "nowhere.jsonl")
    with pytest.raises(ConfigError, match="holds no line"):
        load_questions(write(tmp_path, ""))
    with pytest.raises(ConfigError, match="id 'a'"):
        load_questions(write(tmp_path, {**SUM, "id": "a"}, {**PICK, "id": "a"}))


def test_a_question_may_hold_other_line_separators(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"question": "a\u2028b", "answer": "1"}\n', encoding="utf-8")
    assert load_questions(path)[0].text == "a\u2028b"


def test_the_demo_problems_are_fixed_by_their_seed():
    made = demo_questions(20, 0)
    assert made == demo_questions(30, 0)[:20] and made != demo_questions(20, 1)
    for question in made:
        steps = int(question.category.split()[0])
        assert question.worked.count("\n") == steps and question.worked.endswith(f"\n#### {question.gold}")
    shots = demo_shots(5, made)
    assert len(shots) == 5 and not {shot.text for shot in shots} & {question.text for question in made}
    assert demo_shots(0, made) == []


def test_examples_are_taken_from_the_front_of_each_category_and_not_asked():
    rows = [CHOICE._replace(id=str(i), category="ab"[i % 2], text=f"q{i}") for i in range(6)]
    shots, rest = split_shots(rows, 2)
    assert [one.id for one in shots] == ["0", "1", "2", "3"] and [one.id for one in rest] == ["4", "5"]
    assert [one.id for one in examples_for(rows[4], shots, 2)] == ["0", "2"]
    other = examples_for(rows[4]._replace(category="c"), shots, 3)
    assert [one.id for one in other] == ["0", "1", "2"]
    assert examples_for(number("1"), shots, 2) == [] and examples_for(rows[0], shots, 1)[0].id == "2"
    with pytest.raises(ConfigError, match="shots-file"):
        split_shots(rows, 3)


def test_prompts_are_those_of_lm_eval():
    """Both texts were compared with what lm-eval 0.4.13 makes of its gsm8k and mmlu_pro tasks."""
    asked, shot = number("9", "Nine?"), number("8", "Eight?")
    assert completion_prompt(asked, [shot]) == "Question: Eight?\nAnswer: #### 8\n\nQuestion: Nine?\nAnswer:"
    again = CHOICE._replace(text="And which?")
    assert completion_prompt(again, [CHOICE]) == (
        "The following are multiple choice questions (with answers) about colour. Think step by step and then finish "
        'your answer with "the answer is (X)" where X is the correct letter choice.\n'
        "Question:\nWhich?\nOptions:\nA. red\nB. blue\nC. green\n"
        "Answer: Let's think step by step. The answer is (B).\n\n"
        "Question:\nAnd which?\nOptions:\nA. red\nB. blue\nC. green\nAnswer: Let's think step by step."
    )
    assert "(with answers). Think" in completion_prompt(CHOICE._replace(category="all"), [])


def test_an_example_becomes_a_turn_of_the_conversation():
    asked, shot = number("9", "Nine?"), number("8", "Eight?")
    roles = [(m["role"], m["content"]) for m in chat_messages(asked, [shot])]
    assert roles == [("user", "Eight?"), ("assistant", "#### 8"), ("user", "Nine?")]
    (message,) = chat_messages(asked, [shot], turns=False)
    assert message == {"role": "user", "content": completion_prompt(asked, [shot])}
    first, answer, last = chat_messages(CHOICE._replace(text="And?"), [CHOICE])
    assert first["content"].startswith("The following are") and first["content"].endswith("C. green")
    assert answer["content"] == "The answer is (B)." and last["content"].startswith("Question:\nAnd?\nOptions:\nA. red")


@pytest.mark.parametrize(
    "text, strict, flexible",
    [
        ("6 * 7 = 42.\n#### 42", "42", "42"),
        ("#### 42\n\nQuestion: 7", "42", "7"),
        ("The result is $1,234.", "", "$1,234."),
        ("-5 or 6, no: -7", "", "-7"),
        ("####42", "", "42"),
        ("#### -3.50 and #### 9", "-3.50", "9"),
        ("it is 5 ... I think", "", "5"),
        ("no idea", "", ""),
    ],
)
def test_a_number_is_found_in_an_answer(text, strict, flexible):
    assert find(number("42"), text) == {"strict": strict, "flexible": flexible}


@pytest.mark.parametrize(
    "found, gold, right",
    [
        ("$1,234.", "1234", True),
        ("42.", "42", True),
        ("42.0", "42", False),
        ("", "42", False),
        ("1234", "1,234", True),
    ],
)
def test_numbers_written_differently_are_equal(found, gold, right):
    assert is_right(found, gold) is right


@pytest.mark.parametrize(
    "text, strict, flexible",
    [
        ("so the answer is (B).", "B", "B"),
        ("the answer is C", "C", "C"),
        ("The answer is (A), no, the answer is (B)", "A", "A"),
        ("answer is Blue", "", ""),
        ("the answer is (D)", "", ""),
        ("Answer: A\nAnswer: (C)", "", "C"),
        ("A or B? It must be B", "", "B"),
        ("blue", "", ""),
    ],
)
def test_a_letter_is_found_in_an_answer(text, strict, flexible):
    assert find(CHOICE, text) == {"strict": strict, "flexible": flexible}
