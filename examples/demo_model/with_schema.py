"""Measures a demo model with and without schemas: `python -m examples.demo_model.with_schema [--model DIR] [--n 200]`.

Runs on the engine, greedily, over held-out extractions and tool calls.
"""

import argparse
import json
from typing import Any

import jsonschema  # type: ignore[import-untyped]

from examples.demo_model.documents import Problem
from examples.demo_model.judge import parse_call, parse_json
from examples.demo_model.problems import held_out_problems
from gapless import LLM, SamplingParams, StructuredOutputs
from gapless.engine.outputs import CompletionOutput

TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}


def schema_of(value: Any) -> dict[str, Any]:
    """The schema of values like this one: the same keys and types."""
    if isinstance(value, dict):
        parts = {key: schema_of(part) for key, part in value.items()}
        return {"type": "object", "properties": parts, "required": list(value), "additionalProperties": False}
    if isinstance(value, list):
        return {"type": "array", "items": schema_of(value[0]) if value else {}}
    return {"type": TYPES[type(value)]}


def is_valid(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value fits its schema; None is what could not be read."""
    return value is not None and jsonschema.Draft202012Validator(schema).is_valid(value)


def same(got: Any, wanted: Any) -> bool:
    """Equal as JSON text, since 1 == True in Python."""
    return json.dumps(got, sort_keys=True) == json.dumps(wanted, sort_keys=True)


def extractions(llm: LLM, problems: list[Problem], held: bool) -> tuple[int, int]:
    """How many answers are valid, and how many are right."""
    wanted = [parse_json(problem.answer) for problem in problems]
    schemas = [schema_of(one) for one in wanted]
    forms = [StructuredOutputs(json=schema) if held else None for schema in schemas]
    params = [SamplingParams(max_tokens=200, temperature=0, structured_outputs=form) for form in forms]
    outputs = llm.chat([[{"role": "user", "content": problem.question}] for problem in problems], params)
    got = [parse_json(output.outputs[0].text) for output in outputs]
    return sum(map(is_valid, got, schemas)), sum(map(same, got, wanted))


def call_of(output: CompletionOutput) -> Any:
    """The only call, as name and arguments; None where there is none, or more."""
    if len(output.tool_calls) != 1:
        return None
    function = output.tool_calls[0].function
    return {"name": function.name, "arguments": parse_json(function.arguments)}


def calls(llm: LLM, problems: list[Problem], held: bool) -> tuple[int, int]:
    """Return how many tool calls are valid and right. Calls are required, by schema, where they are `held`."""
    params, valid, right = SamplingParams(max_tokens=200, temperature=0), 0, 0
    for problem in problems:
        message, tools = {"role": "user", "content": problem.question}, problem.tools
        choice = "required" if held else "auto"
        output = llm.chat([message], params, tools=tools, tool_choice=choice, parallel_tool_calls=not held)
        got, wanted = call_of(output[0].outputs[0]), parse_call(problem.answer)
        schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in tools}
        valid += got is not None and is_valid(got["arguments"], schemas.get(got["name"], {"not": {}}))
        right += same(got, wanted)
    return valid, right


def report(model: str, n: int, seed: int) -> list[tuple[str, int, int, int]]:
    """Print and return a line for each kind of problem, without and with schemas: name, asked, valid, right."""
    lines = []
    with LLM(model) as llm:
        for family, ask in (("extraction", extractions), ("tool_call", calls)):
            problems = [one for one in held_out_problems(family, n, seed) if parse_json(one.answer) or one.tools]
            problems = [one for one in problems if family == "extraction" or parse_call(one.answer)]
            for held in (False, True):
                name = f"{family}, {'with' if held else 'without'} a schema"
                valid, right = ask(llm, problems, held)
                lines.append((name, len(problems), valid, right))
                shares = f"{valid / len(problems):7.1%} valid  {right / len(problems):7.1%} right"
                print(f"{shares}  of {len(problems)}  {name}")
    return lines


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--n", type=int, default=200, help="problems of each kind")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report(options.model, options.n, options.seed)


if __name__ == "__main__":
    main()
