"""langchain-openai: chat and completions, one by one, in streams and in batches, with usage."""

from __future__ import annotations

import importlib.metadata
from typing import Any

import openai
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel
from steps import CAR, KEY, LIA, MIA, MODEL, PARIS, PERSON, SUNNY, main, plain, refused


class Person(BaseModel):
    name: str
    age: int
    city: str
    job: str


def get_weather(city: str) -> str:
    """Get the current weather of a city"""
    return SUNNY


def chat_model(address: str, **options: Any) -> ChatOpenAI:
    known = {"model": MODEL, "base_url": f"{address}/v1", "api_key": KEY, "temperature": 0, "max_retries": 0}
    return ChatOpenAI(**{**known, "max_tokens": 12, **options})


def counts(message: Any) -> list[int]:
    used = message.usage_metadata
    return [used["input_tokens"], used["output_tokens"], used["total_tokens"]]


def answer(message: Any) -> dict[str, Any]:
    finish = message.response_metadata["finish_reason"]
    return {"choices": [[0, message.content, finish]], "usage": counts(message)}


def invoke(address: str) -> Any:
    return answer(chat_model(address).invoke([("system", "Be short and exact."), ("human", MIA)]))


def stream(address: str) -> Any:
    whole: Any = None
    for chunk in chat_model(address, stream_usage=True).stream(MIA):
        whole = chunk if whole is None else whole + chunk
    return {"text": whole.content, "finish": whole.response_metadata["finish_reason"], "usage": counts(whole)}


def batch(address: str) -> Any:
    said = chat_model(address).batch([MIA, CAR, LIA])
    return {"texts": sorted(one.content for one in said), "usages": sorted(counts(one) for one in said)}


def logprobs(address: str) -> Any:
    said = chat_model(address, max_tokens=6, logprobs=True, top_logprobs=2).invoke(CAR)
    content = said.response_metadata["logprobs"]["content"]
    return {"tokens": [one["token"] for one in content], "tops": [len(one["top_logprobs"]) for one in content]}


def stop(address: str) -> Any:
    return answer(chat_model(address, max_tokens=60).bind(stop=["####"]).invoke(LIA))


async def asynchronous(address: str) -> Any:
    return answer(await chat_model(address).ainvoke(CAR))


async def asynchronous_stream(address: str) -> Any:
    whole: Any = None
    async for chunk in chat_model(address, stream_usage=True).astream(LIA):
        whole = chunk if whole is None else whole + chunk
    return {"text": whole.content, "finish": whole.response_metadata["finish_reason"], "usage": counts(whole)}


def completions(address: str) -> Any:
    model = OpenAI(
        model=MODEL, base_url=f"{address}/v1", api_key=KEY, temperature=0, max_tokens=12, max_retries=0, batch_size=2
    )
    result = model.generate([plain(MIA), plain(CAR)])
    used = result.llm_output["token_usage"]
    return {
        "choices": [[i, one.text, one.generation_info["finish_reason"]] for i, [one] in enumerate(result.generations)],
        "usage": [used["prompt_tokens"], used["completion_tokens"], used["total_tokens"]],
    }


def completions_stream(address: str) -> Any:
    model = OpenAI(model=MODEL, base_url=f"{address}/v1", api_key=KEY, temperature=0, max_tokens=12, max_retries=0)
    return {"text": "".join(model.stream(plain(LIA)))}


def failing(work: Any) -> Any:
    try:
        work()
    except openai.APIStatusError as error:
        return refused(error, error.status_code, dict(error.body))
    raise AssertionError("it was accepted")


def bad_field(address: str) -> Any:
    return failing(lambda: chat_model(address, top_p=7).invoke("Hi"))


def wrong_key(address: str) -> Any:
    return failing(lambda: chat_model(address, api_key="another-key").invoke("Hi"))


def unknown_model(address: str) -> Any:
    return failing(lambda: chat_model(address, model="nobody").invoke("Hi"))


def with_a_tool(address: str, **options: Any) -> Any:
    """A call, and an answer after its result."""
    model = chat_model(address, max_tokens=200, **options).bind_tools([get_weather])
    asked = HumanMessage(PARIS)
    first = model.invoke([asked])
    calls = [[call["name"], call["args"]] for call in first.tool_calls]
    then = model.invoke([asked, first, ToolMessage(SUNNY, tool_call_id=first.tool_calls[0]["id"])])
    return {"calls": calls, "texts": sorted(["", then.text])}


def tools(address: str) -> Any:
    return with_a_tool(address)


def tools_by_responses(address: str) -> Any:
    return with_a_tool(address, use_responses_api=True)


def typed(address: str) -> Any:
    made = chat_model(address, max_tokens=200).with_structured_output(Person, method="json_schema").invoke(PERSON)
    return {"json": [made.model_dump()]}


def stream_by_responses(address: str) -> Any:
    whole: Any = None
    for chunk in chat_model(address, max_tokens=200, use_responses_api=True).stream(LIA):
        whole = chunk if whole is None else whole + chunk
    return {"text": whole.text, "usage": counts(whole)}


STEPS = [
    *(invoke, stream, batch, logprobs, stop, asynchronous, asynchronous_stream, completions, completions_stream),
    *(bad_field, wrong_key, unknown_model, tools, tools_by_responses, typed, stream_by_responses),
]

if __name__ == "__main__":
    main(importlib.metadata.version("langchain-openai"), STEPS)
