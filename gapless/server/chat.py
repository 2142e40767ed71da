"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.types import ASGIApp

from gapless.base.errors import RequestError
from gapless.base.params import SamplingParams
from gapless.server.endpoint import Call, json_response
from gapless.server.generation import EventStream, Job
from gapless.server.protocol import Answer, AnswerMessage, ChatChoice, ChatRequest, parse
from gapless.server.sse import ChatChunks
from gapless.server.state import State, new_id


async def chat_completions(call: Call) -> ASGIApp:
    """Answer a conversation."""
    body = await call.json()
    request = parse(body, ChatRequest)
    state = call.state
    model = state.admit(request.model)
    params = _sampling(request, state)
    prompt = await chat_prompt(state, request.messages, **_options(request))
    job = Job(call, request, [prompt], params)
    identity, created = new_id("chatcmpl"), int(time.time())
    call.answers(identity, model)
    include, every = request.usage_wanted()
    include = include or state.config.enable_force_include_usage
    if request.stream:
        chunks = ChatChunks(identity, created, model, null_usage=include)
        return EventStream(job, chunks, include_usage=include, every_usage=every, echo=[])
    await call.while_wanted(job.collect(), job.deadline)
    choices = [
        ChatChoice(index, AnswerMessage("".join(done.text)), None, done.finish_reason, done.stop_reason)
        for index, done in enumerate(job.choices)
    ]
    return json_response(msgspec.json.encode(Answer(identity, "chat.completion", created, model, choices, job.usage())))


async def chat_prompt(state: State, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
    """The prompt of a conversation, text and ids. Raises RequestError."""
    known = [{**message, "role": "system"} if message.get("role") == "developer" else message for message in messages]
    return await state.text_work(state.llm.chat_prompt(known, **options))


def _options(request: ChatRequest) -> Mapping[str, Any]:
    continued = bool(request.continue_final_message)
    opened = not continued if request.add_generation_prompt is None else request.add_generation_prompt
    return {
        "tools": request.tools,
        "add_generation_prompt": opened,
        "continue_final_message": continued,
        "variables": request.variables(),
    }


def _sampling(request: ChatRequest, state: State) -> SamplingParams:
    try:
        return request.sampling(state.sampling_defaults, request.limit())
    except RequestError as error:
        if error.param == "max_tokens" and request.max_completion_tokens is not None:
            text = str(error).replace("max_tokens", "max_completion_tokens")
            raise RequestError(text, "max_completion_tokens", error.code) from None
        raise
