"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace
from starlette.types import ASGIApp

from gapless.base.errors import RequestError
from gapless.base.params import SamplingParams
from gapless.server.endpoint import HttpCall
from gapless.server.event_stream import EventStream
from gapless.server.extras import Extras
from gapless.server.generation import Job, Progress, WholeAnswer
from gapless.server.logprobs import ChatWriter, prompt_entries
from gapless.server.protocol import Answer, AnswerMessage, ChatChoice, ChatRequest, parse
from gapless.server.replies import message_of
from gapless.server.sse import ChatChunks
from gapless.server.state import ServerState, new_id
from gapless.text.replies import ReplyReader
from gapless.text.reply_parser import ReplyFormat
from gapless.text.tools import ToolUse, check_tools, formed


async def chat_completions(call: HttpCall) -> ASGIApp:
    """Answer a conversation."""
    body = await call.json()
    state = call.state
    await state.turnstile.enter()
    request = parse(body, ChatRequest)
    model = state.admit(request.model)
    job = await chat_job(call, request)
    identity, created = new_id("chatcmpl"), int(time.time())
    call.answers(identity, model)
    include, every = request.usage_wanted()
    include = include or state.config.enable_force_include_usage
    if request.stream:
        chunks = ChatChunks(identity, created, model, null_usage=include)
        extras = _extras(job, request)
        return EventStream(job, chunks, include_usage=include, every_usage=every, echo=[], extras=extras)

    def encode() -> bytes:
        choices = [_choice(job, request, index, done) for index, done in enumerate(job.choices)]
        answer = Answer(identity, "chat.completion", created, model, choices, job.usage())
        if job.params.prompt_logprobs is not None:
            answer = replace(answer, prompt_logprobs=prompt_entries(job.stream_of(0).prompt_logprobs or ()))
        if request.return_token_ids:
            answer = replace(answer, prompt_token_ids=job.stream_of(0).prompt_token_ids)
        return msgspec.json.encode(replace(answer, kv_transfer_params=job.handed_over))

    return WholeAnswer(job, encode)


async def chat_job(call: HttpCall, request: ChatRequest) -> Job:
    """Return the job of a conversation: checked, with its prompt, and with readers where replies are taken apart."""
    state = call.state
    use = tool_use(request)
    form = state.replies.format(tools=bool(use.tools))
    params = _sampling(request, state)
    prompt = await chat_prompt(state, request.messages, **prompt_options(request, use))
    params = formed(params, use, state.replies, prompt["prompt"])
    await state.turnstile.enter()  # many may have waited for their text too
    job = Job(call, request, [prompt], params)
    if form is not None:
        job.readers = {index: _reader(form, use, request, prompt["prompt"]) for index in range(len(job.choices))}
    return job


def _reader(form: ReplyFormat, use: ToolUse, request: ChatRequest, prompt: str) -> ReplyReader:
    shown = request.include_reasoning is not False
    return ReplyReader(form, use.schemas, prompt, shown, parallel=use.parallel, named=use.named)


def tool_use(request: ChatRequest) -> ToolUse:
    """Return what a request says about tools. Raises RequestError naming the field."""
    return check_tools(request.tools, request.tool_choice, request.parallel_tool_calls)


def _choice(job: Job, request: ChatRequest, index: int, done: Progress) -> ChatChoice:
    logprobs = None
    if job.params.logprobs is not None:
        logprobs = ChatWriter(job.state.llm.tokenizer, job.params.logprobs).write(done.token_ids, done.logprobs)
    ids = done.token_ids if request.return_token_ids else UNSET
    message, reason = AnswerMessage("".join(done.text)), done.finish_reason
    if (reader := job.readers.get(index)) is not None:
        message = message_of(done.events + reader.finish())
        reason = reason and reader.finish_reason(reason)
    return ChatChoice(index, message, logprobs, reason, done.stop_reason, ids)


def _extras(job: Job, request: ChatRequest) -> Extras | None:
    top, ids = job.params.logprobs, bool(request.return_token_ids)
    if top is None and not ids:
        return None
    new_writer = None if top is None else lambda stream: ChatWriter(job.state.llm.tokenizer, top)
    return Extras(job.stream_of, new_writer, ids=ids, chat=True)


async def chat_prompt(state: ServerState, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
    """The prompt of a conversation, text and ids. Raises RequestError."""
    known = [{**message, "role": "system"} if message.get("role") == "developer" else message for message in messages]
    return await state.text_work(state.llm.chat_prompt(known, **options))


def prompt_options(request: ChatRequest, use: ToolUse) -> Mapping[str, Any]:
    """Return what `chat_prompt` takes beside the messages."""
    continued = bool(request.continue_final_message)
    opened = not continued if request.add_generation_prompt is None else request.add_generation_prompt
    return {
        "tools": use.tools or None,
        "add_generation_prompt": opened,
        "continue_final_message": continued,
        "variables": request.variables(),
    }


def _sampling(request: ChatRequest, state: ServerState) -> SamplingParams:
    try:
        return request.sampling(state.sampling_defaults, request.limit())
    except RequestError as error:
        if error.param == "max_tokens" and request.max_completion_tokens is not None:
            text = str(error).replace("max_tokens", "max_completion_tokens")
            raise RequestError(text, "max_completion_tokens", error.code) from None
        raise
