"""POST /v1/completions."""

from __future__ import annotations

import time

import msgspec
from starlette.types import ASGIApp

from gapless.server.endpoint import Call, json_response
from gapless.server.generation import EventStream, Job
from gapless.server.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    Answer,
    CompletionChoice,
    CompletionRequest,
    parse,
)
from gapless.server.sse import CompletionChunks
from gapless.server.state import State, new_id


async def completions(call: Call) -> ASGIApp:
    """Continue one or more prompts."""
    body = await call.json()
    request = parse(body, CompletionRequest)
    state = call.state
    model = state.admit(request.model)
    limit = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    params = request.sampling(state.sampling_defaults, limit)
    prompts = request.prompts()
    job = Job(call, request, prompts, params)
    echo = [_text(state, prompt) for prompt in prompts] if request.echo else []
    identity, created = new_id("cmpl"), int(time.time())
    call.answers(identity, model)
    include, every = request.usage_wanted()
    include = include or state.config.enable_force_include_usage
    if request.stream:
        chunks = CompletionChunks(identity, created, model, null_usage=include)
        return EventStream(job, chunks, include_usage=include, every_usage=every, echo=echo)
    await call.while_wanted(job.collect(), job.deadline)
    answer = Answer(identity, "text_completion", created, model, _choices(job, echo), job.usage())
    return json_response(msgspec.json.encode(answer))


def _choices(job: Job, echo: list[str]) -> list[CompletionChoice]:
    return [
        CompletionChoice(
            index,
            (echo[index // job.params.n] if echo else "") + "".join(done.text),
            None,
            done.finish_reason,
            done.stop_reason,
        )
        for index, done in enumerate(job.choices)
    ]


def _text(state: State, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else state.llm.tokenizer.decode(prompt)
