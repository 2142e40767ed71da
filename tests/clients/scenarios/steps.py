"""What the scenarios share. Runs in the client's own environment: the standard library alone.

A scenario is a list of functions, one a step. Each returns what the client made of the answers, in plain values under
common names, so that one test can hold the server against all clients. `python SCENARIO.py ADDRESS` plays it against a
recorder and prints the steps as JSON.
"""

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
LIA = "Lia has 48 coins. She gives 19 coins to Ben. How many coins does she have left?"


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def plain(question: str) -> str:
    return f"Question: {question}\nAnswer:"


def usage(value: Any) -> list[int]:
    """[prompt, completion, total]"""
    return [value.prompt_tokens, value.completion_tokens, value.total_tokens]


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
