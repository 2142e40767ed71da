"""instructor, by each of its ways to an answer of a type: a named tool, a schema, and /v1/responses."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import instructor
from openai import OpenAI
from pydantic import BaseModel
from steps import KEY, MODEL, PERSON, main, user


class Person(BaseModel):
    """A person in a text"""

    name: str
    age: int
    city: str
    job: str


def asked(address: str, mode: instructor.Mode) -> Any:
    client = instructor.from_openai(OpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0), mode=mode)
    made = client.create(model=MODEL, messages=user(PERSON), response_model=Person, temperature=0, max_retries=0)
    return {"json": [made.model_dump()]}


def tools(address: str) -> Any:
    return asked(address, instructor.Mode.TOOLS)


def strict_tools(address: str) -> Any:
    return asked(address, instructor.Mode.TOOLS_STRICT)


def json_schema(address: str) -> Any:
    return asked(address, instructor.Mode.JSON_SCHEMA)


def responses_tools(address: str) -> Any:
    return asked(address, instructor.Mode.RESPONSES_TOOLS)


STEPS = [tools, strict_tools, json_schema, responses_tools]

if __name__ == "__main__":
    main(importlib.metadata.version("instructor"), STEPS)
