"""What the scenarios share. Runs in the client's own environment: the standard library alone.
A scenario is a list of functions, one a step, that return what the client made of the answers, under common names."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import urllib.request
from collections.abc import Callable
from typing import Any

KEY = "test-key"
MODEL = "demo"
STEP_PATH = "/__step__"
MIA = "Mia has 17 pens. She buys 25 more. How many pens does she have?"
CAR = "A car leaves Sydney for Lyon and drives 18 km every hour for 4 hours. How many km does it drive?"
PERSON = "Extract name, age, city and job as JSON: The nurse Marco moved to Quabaris at the age of 89."
PARIS = "What is the weather in Paris?"
SUNNY = '{"weather": "sunny", "temperature": 21}'
LIA = "Lia has 48 coins. She gives 19 coins to Ben. How many coins does she have left?"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def weather(**more: Any) -> dict[str, Any]:
    """A function tool, as /v1/responses has it."""
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    about = {"description": "Get the current weather of a city", "parameters": {**city, "additionalProperties": False}}
    return {"type": "function", "name": "get_weather", **about, **more}


def plain(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def usage(value: Any) -> list[int]:
    """[prompt, completion, total]"""
    return [value.prompt_tokens, value.completion_tokens, value.total_tokens]


def items(response: Any) -> list[list[Any]]:
    """What a response says: [type, text] of its messages, [type, name, arguments] of its calls."""
    told = []
    for item in response.output:
        if item.type == "function_call":
            told.append([item.type, item.name, json.loads(item.arguments)])
        else:
            told.append([item.type, "".join(part.text for part in item.content)])
    return told


def spent(value: Any) -> list[int]:
    """[input, output, total]"""
    return [value.input_tokens, value.output_tokens, value.total_tokens]


def refused(error: Any, status: int, body: dict[str, Any]) -> dict[str, Any]:
    """What a client tells of an error: its class, the status, and the server's words where it hands them on."""
    found = {name: body[name] for name in ("type", "param", "code") if name in body}
    return {"error": type(error).__name__, "status": status, "body": found}


def play(address: str, steps: list[Callable[[str], Any]]) -> list[dict[str, Any]]:
    played = []
    # One event loop for all: clients keep connections in caches of their own.
    with asyncio.Runner() as runner:
        for step in steps:
            name = step.__name__
            urllib.request.urlopen(urllib.request.Request(address + STEP_PATH, name.encode()), timeout=30).read()
            seen = step(address)
            played.append({"name": name, "seen": runner.run(seen) if inspect.iscoroutine(seen) else seen})
    return played


def main(version: str, steps: list[Callable[[str], Any]]) -> None:
    told = {"version": version, "python": sys.version.split()[0], "steps": play(sys.argv[1], steps)}
    # Clients print things of their own; the last line is ours.
    print("\n" + json.dumps(told))
