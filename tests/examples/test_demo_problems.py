"""The generator of the demo model's text: repeatable, right, natural in number, and split without overlap."""

import json
import random
import re
from itertools import islice, pairwise

import pytest

from examples.demo_model.arithmetic import FORMS, arithmetic
from examples.demo_model.documents import is_held_out
from examples.demo_model.extraction import extraction
from examples.demo_model.facts import UNSEEN, all_facts
from examples.demo_model.judge import is_right, parse_call
from examples.demo_model.problems import FAMILIES, final_answer, held_out, held_out_problems, training_text
from examples.demo_model.tool_calls import tool_call

KINDS = {"string": str, "integer": int, "boolean": bool}


def value_of(expression: str) -> int:
    """An oracle of its own: products and quotients first, then sums from the left."""
    tokens = re.findall(r"\d+|[-+*/]", expression)
    assert "".join(tokens) == expression.replace(" ", ""), expression
    terms = [int(tokens[0])]
    for sign, number in zip(tokens[1::2], map(int, tokens[2::2]), strict=True):
        if sign == "*":
            terms[-1] *= number
        elif sign == "/":
            assert terms[-1] % number == 0, expression
            terms[-1] //= number
        else:
            terms.append(number if sign == "+" else -number)
    return sum(terms)


def steps_of(answer: str) -> list[str]:
    """The equations of a worked answer, without labels."""
    return [line.removesuffix(".").rpartition(": ")[2] for line in answer.splitlines()[:-1]]


def problems(make, count, seed=7):
    rng = random.Random(seed)
    return [make(rng) for _ in range(count)]


def test_the_same_seed_gives_the_same_text():
    assert list(islice(training_text(3), 200)) == list(islice(training_text(3), 200))
    assert list(islice(training_text(3), 20)) != list(islice(training_text(4), 20))
    assert held_out(20, 5) == held_out(20, 5) != held_out(20, 6)


@pytest.mark.parametrize("form", dict.fromkeys(FORMS), ids=lambda form: form.__name__)
def test_every_worked_step_is_true_and_the_last_one_is_the_answer(form):
    for problem in problems(form, 300):
        steps = steps_of(problem.answer)
        for step in steps:
            assert len({value_of(side) for side in step.split(" = ")}) == 1, problem
        assert final_answer(problem.answer) == steps[-1].rpartition(" = ")[2], problem


def test_every_number_of_a_question_is_used_and_every_step_starts_from_known_numbers():
    for problem in problems(arithmetic, 1000):
        asked, known = re.findall(r"\d+", problem.question), set(re.findall(r"\d+", problem.question))
        steps = steps_of(problem.answer)
        firsts = [number for step in steps for number in re.findall(r"\d+", step.split(" = ")[0])]
        assert set(asked) <= set(firsts), problem
        for step in steps:
            assert set(re.findall(r"\d+", step.split(" = ")[0])) <= known, problem
            known.add(step.rpartition(" = ")[2])


def test_numbers_stay_small_enough_to_work_with():
    answers = [int(final_answer(problem.answer)) for problem in problems(arithmetic, 2000)]
    assert min(answers) >= 0
    assert max(answers) < 1000


def test_an_answer_is_what_the_problem_computes():
    rng = random.Random(0)
    bare = {}
    while len(bare) < 300:
        problem = FORMS[-1](rng)
        bare[problem.question] = int(final_answer(problem.answer))
    for question, answer in bare.items():
        a, sign, b = re.search(r"(\d+) ?(\+|-|\*|/|plus|minus|times|divided by) ?(\d+)", question).groups()
        a, b = int(a), int(b)
        wanted = {"+": a + b, "p": a + b, "-": a - b, "m": a - b, "*": a * b, "t": a * b, "/": a / b, "d": a / b}[
            sign[0]
        ]
        assert answer == wanted, question


def test_extractions_are_json_of_what_the_text_says():
    for problem in problems(extraction, 1000):
        record = json.loads(problem.answer)
        assert record
        for key, value in record.items():
            assert key in problem.question
            assert isinstance(value, bool) or str(value) in problem.question, problem


def test_tool_calls_fit_one_of_the_tools():
    for problem in problems(tool_call, 1000):
        call = parse_call(problem.answer)
        tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in problem.tools}
        schema = tools[call["name"]]
        assert list(call["arguments"]) == schema["required"]
        for key, value in call["arguments"].items():
            assert type(value) is KINDS[schema["properties"][key]["type"]]
            assert isinstance(value, bool) or str(value) in problem.question


@pytest.mark.seeds
def test_training_and_held_out_never_meet():
    facts = {answer for group in all_facts() for _, answer in group}
    held = {
        problem.question
        for family in ("arithmetic", "extraction", "tool_call", "repeat")
        for problem in held_out_problems(family, 100, 0)
    }
    unseen = {question for question, _ in UNSEEN}
    checked = 0
    for document in islice(training_text(1), 5000):
        for (role, text), (_, reply) in pairwise(document.messages):
            if role == "user":
                question = re.sub(r"^Question: |\nAnswer:$|\n$", "", text) if document.plain else text
                assert question not in held | unseen
                # Chat is a finite list of wordings and is not split.
                assert reply.strip() in facts or not is_held_out(question)
                checked += 1
    assert checked > 5000
    assert all(map(is_held_out, held))


def test_held_out_problems_are_different_from_each_other():
    for family in FAMILIES:
        assert len({problem.question for problem in held_out_problems(family, 50, 1)}) == 50


def test_the_judge_knows_right_from_wrong():
    sums, facts, calls, *others = (held_out_problems(family, 1, 0)[0] for family in FAMILIES)
    for problem in (sums, facts, calls, *others):
        assert is_right(problem, problem.answer)
        assert not is_right(problem, "")
        assert not is_right(problem, problem.answer[:-1])
    assert not is_right(sums, sums.answer + "1")
    assert is_right(facts, json.dumps(json.loads(facts.answer), indent=2))
    assert not is_right(calls, calls.answer + " and more")


def test_true_is_not_one_for_the_judge():
    problem = next(p for p in problems(extraction, 1000) if '"warning": true' in p.answer)
    assert not is_right(problem, problem.answer.replace("true", "1"))
