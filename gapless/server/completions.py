"""POST /v1/completions."""

from __future__ import annotations

import time

import msgspec
from msgspec import UNSET
from msgspec.structs import replace
from starlette.types import ASGIApp

from gapless.base.errors import RequestError
from gapless.engine.stream import OutputStream
from gapless.server.endpoint import HttpCall
from gapless.server.event_stream import EventStream
from gapless.server.extras import Extras
from gapless.server.generation import Job, Progress, WholeAnswer
from gapless.server.logprobs import CompletionWriter, prompt_entries
from gapless.server.protocol import (
    DEFAULT_COMPLETION_TOKENS,
    Answer,
    CompletionChoice,
    CompletionRequest,
    parse,
)
from gapless.server.sse import CompletionChunks
from gapless.server.state import ServerState, new_id


async def completions(call: HttpCall) -> ASGIApp:
    """Continue one or more prompts."""
    body = await call.json()
    state = call.state
    await state.turnstile.enter()
    request = parse(body, CompletionRequest)
    model = state.admit(request.model)
    limit = DEFAULT_COMPLETION_TOKENS if request.max_tokens is None else request.max_tokens
    # An echo without completion still runs one step, whose token is dropped.
    prompt_only = bool(request.echo) and limit == 0
    params = request.sampling(state.sampling_defaults, 1 if prompt_only else limit)
    if prompt_only and params.structured_outputs is not None:
        field = params.structured_outputs.where
        raise RequestError(f"{field} has nothing to form where max_tokens is 0: leave one of them out", field)
    prompts = request.prompts()
    job = Job(call, request, prompts, params, prompt_only)
    echo = [_text(state, prompt) for prompt in prompts] if request.echo else []
    identity, created = new_id("cmpl"), int(time.time())
    call.answers(identity, model)
    include, every = request.usage_wanted()
    include = include or state.config.enable_force_include_usage
    if request.stream:
        chunks = CompletionChunks(identity, created, model, null_usage=include)
        extras = _extras(job, request)
        return EventStream(job, chunks, include_usage=include, every_usage=every, echo=echo, extras=extras)

    def encode() -> bytes:
        choices = [_choice(job, request, index, done, echo) for index, done in enumerate(job.choices)]
        answer = Answer(identity, "text_completion", created, model, choices, job.usage())
        return msgspec.json.encode(replace(answer, kv_transfer_params=job.handed_over))

    return WholeAnswer(job, encode)


def _choice(job: Job, request: CompletionRequest, index: int, done: Progress, echo: list[str]) -> CompletionChoice:
    stream = job.stream_of(index)
    logprobs, ids, entries = None, done.token_ids, done.logprobs
    if job.params.logprobs is not None:
        writer = _writer(job, request, stream)
        if echo:
            ids, entries = [*stream.prompt_token_ids, *ids], [*(stream.prompt_logprobs or ()), *entries]
        logprobs = writer.write(ids, entries)
    shown = bool(request.return_token_ids)
    return CompletionChoice(
        index,
        (echo[index // job.params.n] if echo else "") + "".join(done.text),
        logprobs,
        done.finish_reason,
        done.stop_reason,
        UNSET if request.prompt_logprobs is None else prompt_entries(stream.prompt_logprobs or ()),
        stream.prompt_token_ids if shown else UNSET,
        done.token_ids if shown else UNSET,
    )


def _writer(job: Job, request: CompletionRequest, stream: OutputStream) -> CompletionWriter:
    context = () if request.echo else stream.prompt_token_ids
    return CompletionWriter(job.state.llm.tokenizer, job.params.skip_special_tokens, context)


def _extras(job: Job, request: CompletionRequest) -> Extras | None:
    wanted, ids = job.params.logprobs is not None, bool(request.return_token_ids)
    if not wanted and not ids:
        return None
    return Extras(
        job.stream_of, (lambda stream: _writer(job, request, stream)) if wanted else None, ids=ids, chat=False
    )


def _text(state: ServerState, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else state.llm.tokenizer.decode(prompt)
