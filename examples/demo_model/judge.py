"""Is a reply right? Pure Python, one rule for each family."""

import json
from typing import Any

from examples.demo_model.documents import Problem
from examples.demo_model.problems import final_answer

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def parse_json(text: str) -> Any:
    """The value of a JSON text, or None if it is not JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return None


def parse_call(text: str) -> Any:
    """The record between the tool-call marks, or None if the reply is anything else than one call."""
    text = text.strip()
    if not (text.startswith(OPEN) and text.endswith(CLOSE)):
        return None
    return parse_json(text[len(OPEN) : -len(CLOSE)])


def is_right(problem: Problem, reply: str) -> bool:
    """True for the right number after `####`, the equal JSON value, the equal tool call, or the same text."""
    if problem.family == "arithmetic":
        return final_answer(reply) == final_answer(problem.answer)
    if problem.family == "extraction":
        return _same_json(parse_json(reply), parse_json(problem.answer))
    if problem.family == "tool_call":
        return _same_json(parse_call(reply), parse_call(problem.answer))
    return reply.strip() == problem.answer


def _same_json(got: Any, wanted: Any) -> bool:
    # As text with sorted keys, because in Python 1 == True.
    return got is not None and json.dumps(got, sort_keys=True) == json.dumps(wanted, sort_keys=True)
