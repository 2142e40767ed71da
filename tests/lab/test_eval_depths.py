"""The demo model's held-out problems, 32 at a time: at depth 1 and at depth 8 every answer is the same text."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gapless import AsyncLLM
from gapless.lab.eval_questions import Question, demo_questions
from gapless.lab.eval_report import Comparison, EvalResult
from gapless.lab.eval_run import EvalFlags, ask_engine

QUESTIONS = demo_questions(64, 11)


def evaluate(questions: list[Question], task: EvalFlags, **engine: Any) -> EvalResult:
    contents = [task.content(question, []) for question in questions]
    most = 0

    async def run() -> Any:
        async with AsyncLLM.from_engine_args(model="demo", device="cpu", **engine) as llm:

            def look(done: int) -> None:
                nonlocal most
                most = max(most, llm.open_requests)

            return await ask_engine(llm, task, contents, look)

    answers = asyncio.run(run())
    assert most == task.concurrency - 1, "one had just ended"
    return EvalResult(task, questions, contents, answers)


@pytest.mark.seeds
def test_depth_changes_no_answer():
    task = EvalFlags(concurrency=32, max_tokens=192)
    one, eight = (evaluate(QUESTIONS, task, depth=depth) for depth in ("1", "8"))
    assert one.records == eight.records
    found = Comparison(one.json(), eight.json())
    assert found.flips == [] and found.same_text == found.n == 64
    assert one.total.right >= 58 and not one.errors


def test_a_question_that_does_not_fit_is_wrong_and_the_others_are_answered():
    report = evaluate(
        QUESTIONS[:16], EvalFlags(backend="openai-chat", concurrency=8, max_tokens=100), max_model_len=140
    )
    assert report.errors and all("maximum context length is 140" in one["error"] for one in report.errors)
    assert 0 < report.total.right <= 16 - len(report.errors)
