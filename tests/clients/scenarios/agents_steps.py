"""The OpenAI Agents SDK, which speaks /v1/responses: an agent with a function tool, whole and streamed."""

from __future__ import annotations

import importlib.metadata
from typing import Any

from agents import Agent, ModelSettings, OpenAIResponsesModel, Runner, function_tool
from openai import AsyncOpenAI
from pydantic import BaseModel
from steps import KEY, MIA, MODEL, PARIS, PERSON, SUNNY, items, main


class Person(BaseModel):
    name: str
    age: int
    city: str
    job: str


@function_tool
def get_weather(city: str) -> str:
    """Get the current weather of a city"""
    assert city == "Paris"
    return SUNNY


def agent(address: str, **options: Any) -> Agent[None]:
    client = AsyncOpenAI(base_url=f"{address}/v1", api_key=KEY, max_retries=0)
    settings = ModelSettings(temperature=0, store=False)
    return Agent("helper", model=OpenAIResponsesModel(MODEL, client), model_settings=settings, **options)


def told(result: Any) -> dict[str, Any]:
    found = [one for response in result.raw_responses for one in items(response)]
    return {"items": sorted(found), "last": str(result.final_output)}


async def tool(address: str) -> Any:
    return told(await Runner.run(agent(address, tools=[get_weather]), PARIS))


async def tool_streamed(address: str) -> Any:
    result = Runner.run_streamed(agent(address, tools=[get_weather]), PARIS)
    kinds = [event.type async for event in result.stream_events()]
    assert "raw_response_event" in kinds and "run_item_stream_event" in kinds
    return told(result)


async def instructions(address: str) -> Any:
    return told(await Runner.run(agent(address, instructions="Be short and exact."), MIA))


async def typed_output(address: str) -> Any:
    result = await Runner.run(agent(address, output_type=Person), PERSON)
    return {"json": [result.final_output.model_dump()]}


async def typed_output_beside_a_tool(address: str) -> Any:
    """The model may call, or answer with the type."""
    result = await Runner.run(agent(address, tools=[get_weather], output_type=Person), PERSON)
    return {"json": [result.final_output.model_dump()]}


STEPS = [tool, tool_streamed, instructions, typed_output, typed_output_beside_a_tool]

if __name__ == "__main__":
    main(importlib.metadata.version("openai-agents"), STEPS)
