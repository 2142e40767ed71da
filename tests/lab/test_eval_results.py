"""Asking a scripted server, marking, shares with their errors, and two results question by question."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from lab.scripted import HEAD, Model, Network, Request, event, play, respond

from gapless.base.errors import ConfigError, ServerError
from gapless.lab.eval_questions import Question
from gapless.lab.eval_report import Comparison, EvalResult, RightShare, mcnemar, read_result
from gapless.lab.eval_run import EvalFlags, ask_server, prompt_hash
from gapless.lab.http import Client
from gapless.lab.records import Sample
from gapless.lab.target import Target


def question(number: int, category: str = "all") -> Question:
    return Question(f"q{number}", category, f"what is {number}", str(number), f"#### {number}")


class Knows(Model):
    """Gives back the last word of the prompt; 13 breaks off, 14 is refused, 15 runs on to its limit."""

    def stream(self, request: Request) -> Any:
        body = request.body
        text = body["messages"][-1]["content"] if "messages" in body else body["prompt"].removesuffix("\nAnswer:")
        word = text.split()[-1]
        if word == "14":
            return iter([(0.0, respond({"error": {"message": "too much"}}, 400))])
        return self.answer(word, "messages" in body)

    def answer(self, word: str, chat: bool) -> Any:
        yield 0.0, HEAD
        finish = {"13": None, "15": "length"}.get(word, "stop")
        said = {"delta": {"content": f"#### {word}"}} if chat else {"text": f" #### {word}"}
        yield 0.01 * (int(word) % 7 if word.isdigit() else 0), event({"choices": [{**said, "finish_reason": finish}]})
        yield 0.0, event(b"[DONE]") + b"0\r\n\r\n"


def asked(model: Model, numbers: list[int], task: EvalFlags) -> tuple[Target, Sequence[Sample]]:
    target = Target("http://h", backend="openai-chat" if task.chat else "openai")
    contents = [task.content(question(number), []) for number in numbers]
    done: list[int] = []
    network = Network(model)
    found: tuple[Target, Sequence[Sample]] = play(ask_server(Client(target, network), task, contents, done.append))
    assert done == list(range(1, len(numbers) + 1))
    # The first connection looked at the server before.
    assert network.opened <= task.concurrency
    return found


@pytest.mark.parametrize("chat", [False, True])
def test_answers_come_back_in_order_and_failures_are_answers(chat):
    model, task = Knows(), EvalFlags(backend="openai-chat" if chat else "openai", concurrency=4, max_tokens=9)
    numbers = [11, 12, 13, 14, 15, *range(20, 40)]
    target, answers = asked(model, numbers, task)
    assert target.model == "m"
    good = [one.text for one, number in zip(answers, numbers, strict=True) if number not in (13, 14)]
    assert good == [f"{'' if chat else ' '}#### {number}" for number in numbers if number not in (13, 14)]
    assert "broke off" in answers[2].error and answers[3].error == "HTTP 400: too much"
    assert answers[4].finish == "length" and not answers[4].error
    sent = [request.body for request in model.asked[1:]]
    assert len(sent) == len(numbers), "nothing is asked twice"
    assert all(body["temperature"] == 0.0 and body["max_tokens"] == 9 and "ignore_eos" not in body for body in sent)
    assert all(body.get("stop") == (None if chat else ["Question:"]) for body in sent)


def test_a_server_that_is_not_there_or_lacks_the_model():
    async def refused(_: Any) -> Any:
        raise ConnectionRefusedError("no server")

    with pytest.raises(ServerError, match="is a server running there"):
        asyncio.run(ask_server(Client(Target("http://h"), refused), EvalFlags(), ["x"], print))
    with pytest.raises(ServerError, match="no model 'z'"):
        play(ask_server(Client(Target("http://h", "z"), Network(Knows())), EvalFlags(), ["x"], print))
    with pytest.raises(ConfigError, match="concurrency must be a whole number from 1"):
        EvalFlags(concurrency=0)


def answered(text: str, finish: str = "", tokens: int = 0, error: str = "") -> Sample:
    return Sample(text=text, finish=finish, output_tokens=tokens, error=error)


def report(rows: list[tuple[Question, Sample]], match: str = "flexible") -> EvalResult:
    questions, answers = [one for one, _ in rows], [one for _, one in rows]
    return EvalResult(EvalFlags(match=match), questions, [one.text for one in questions], answers)


def test_an_answer_is_right_if_its_number_or_letter_is():
    rows = [
        (question(1, "b"), answered("#### 1", "stop", 4)),
        (question(2, "a"), answered("it is 2", "length", 4)),
        (question(3, "a"), answered("#### 4", "stop", 4)),
        (question(5, "a"), answered("#### 5", "", 2, "the stream broke off")),
    ]
    found = report(rows)
    assert (found.total, found.share("strict")) == (RightShare(2, 4), RightShare(1, 4))
    assert found.rows() == [
        ("a", RightShare(1, 3), RightShare(0, 3)),
        ("b", RightShare(1, 1), RightShare(1, 1)),
        ("all", *found.rows()[2][1:]),
    ]
    text = "\n".join(found.lines())
    assert "error: q5: the stream broke off" in text and "1 answers ended at 512 tokens" in text
    written = found.json()
    assert written["results"]["correct"] == 2 and written["results"]["strict"]["accuracy"] == 0.25
    assert written["results"]["by_category"]["a"]["n"] == 3 and written["results"]["errors"] == 1
    assert written["task"]["rules"] == {"number": {"strict": 'the first "#### N"', "flexible": "the last number"}}
    assert written["questions"][1] == {
        **{"id": "q2", "category": "a", "prompt_sha256": prompt_hash("what is 2"), "text": "it is 2"},
        **{"extracted": "2", "gold": "2", "correct": True, "strict": "", "flexible": "2"},
        **{"finish_reason": "length", "output_tokens": 4, "error": ""},
    }
    assert report(rows, "strict").json()["questions"][1]["correct"] is False
    json.dumps(written)


def test_one_category_needs_no_row_of_its_own():
    lines = list(report([(question(1), answered("1"))]).lines())
    assert len(lines) == 3 and lines[2].startswith("all ")


def test_standard_error_and_interval_equal_the_direct_computation():
    share = RightShare(30, 40)
    ones = [1.0] * 30 + [0.0] * 10
    mean = sum(ones) / 40
    sample = math.sqrt(sum((one - mean) ** 2 for one in ones) / 39)
    assert share.stderr == pytest.approx(sample / math.sqrt(40))
    # Both ends solve |p - x| = z sqrt(x (1 - x) / n), which is what Wilson's interval means.
    for end in share.interval:
        assert abs(0.75 - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / 40), rel=1e-6)
    assert RightShare(0, 0).stderr == RightShare(1, 1).stderr == 0.0
    assert RightShare(40, 40).interval[1] == 1.0 and RightShare(40, 40).interval[0] < 0.95


@pytest.mark.parametrize("lost, gained", [(0, 0), (1, 0), (5, 1), (3, 3), (2, 9)])
def test_mcnemar_counts_every_way_to_fall(lost, gained):
    ways = [sum(coins) for coins in itertools.product((0, 1), repeat=lost + gained)]
    far = [heads for heads in ways if min(heads, lost + gained - heads) <= min(lost, gained)]
    assert mcnemar(lost, gained) == pytest.approx(len(far) / len(ways))


def result(answers: dict[int, str], prompt: str = "") -> dict[str, Any]:
    rows = [(question(number), answered(text)) for number, text in answers.items()]
    questions, answers = [one for one, _ in rows], [one for _, one in rows]
    return EvalResult(EvalFlags(), questions, [one.text + prompt for one in questions], answers).json()


def test_two_results_are_compared_question_by_question():
    a = result({1: "1", 2: "2", 3: "3", 4: "0", 5: "0", 7: "7"})
    b = result({1: "1", 2: "it is 2", 3: "0", 4: "4", 5: "0", 6: "6"})
    found = Comparison(a, b)
    assert (found.n, found.both_right, found.both_wrong, found.lost, found.gained) == (5, 2, 1, 1, 1)
    assert (found.only_a, found.only_b, found.same_text, found.other_prompt) == (1, 1, 2, 0)
    assert [(flip["id"], flip["a"], flip["b"], flip["a_right"]) for flip in found.flips] == [
        ("q3", "3", "0", True),
        ("q4", "0", "4", False),
    ]
    assert found.difference == pytest.approx((0.0, math.sqrt(2) / 5)) and found.p_value == 1.0
    text = "\n".join(found.lines("a.json", "b.json"))
    assert "q3 (all): gold 3, A '3', B '0': A" in text and "left out: 1 questions of A alone, 1 of B alone" in text
    assert Comparison(a, result({1: "1"}, "!")).other_prompt == 1
    with pytest.raises(ConfigError, match="no question in common"):
        Comparison(a, result({99: "1"}))


def test_a_broken_result_file_is_refused(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps(result({1: "1"})))
    assert read_result(path)["questions"][0]["id"] == "q1"
    broken = result({1: "1"})
    del broken["questions"][0]["gold"]
    for text, words in (("{", "cannot read"), ("{}", "no result of"), (json.dumps(broken), "a question lacks")):
        path.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_result(path)
