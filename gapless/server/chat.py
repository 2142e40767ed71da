"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from starlette.types import ASGIApp

from gapless.base.errors import RequestError
from gapless.base.params import SamplingParams
from gapless.server.endpoint import HttpCall
from gapless.server.errors import unsupported
from gapless.server.event_stream import openai_answer
from gapless.server.generation import Job, Progress
from gapless.server.logprobs import ChatWriter, prompt_entries
from gapless.server.protocol import ChatRequest, GenerationRequest
from gapless.server.sse import ChatChunks
from gapless.server.state import ServerState
from gapless.text.replies import ReplyReader, joined
from gapless.text.reply_parser import ReplyEvent
from gapless.text.tools import ToolUse, check_tools, formed


async def chat_completions(call: HttpCall) -> ASGIApp:
    """Answer a conversation."""
    request = await call.parsed(ChatRequest)
    call.model = call.state.admit(request.model)
    job = await chat_job(call, request)
    return openai_answer(job, ChatChunks, partial(_writer, job), partial(_choice, job), lambda: _prompt_fields(job))


def _prompt_fields(job: Job) -> dict[str, Any]:
    """Return the requested fields about the prompt in a whole answer."""
    prompt, fields = job.stream_of(0), dict[str, Any]()
    if job.params.prompt_logprobs is not None:
        fields["prompt_logprobs"] = prompt_entries(prompt.prompt_logprobs or ())
    if job.shows_ids:
        fields["prompt_token_ids"] = prompt.prompt_token_ids
    return fields


async def chat_job(call: HttpCall, request: ChatRequest) -> Job:
    """Return the job of a conversation: checked, with its prompt, and with readers where replies are taken apart."""
    use = check_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
    template = call.state.llm.tokenizer.template
    if request.documents and not (template and "documents" in template.source):
        raise unsupported("documents", ": this model's chat template has no place for them")
    # A prompt that is only scored still runs one step, whose token is dropped.
    prompt_only = request.limit() == 0 and request.prompt_logprobs is not None
    params = _sampling(request, call.state, 1 if prompt_only else request.limit())
    prompt = await chat_prompt(call.state, request.messages, **prompt_options(request, use))
    job = await rendered_job(call, request, use, params, prompt, request.include_reasoning is not False)
    if prompt_only and job.params.structured_outputs is not None:
        field = job.params.structured_outputs.where
        raise RequestError(f"{field} has nothing to form where max_tokens is 0: leave one of them out", field)
    job.prompt_only = prompt_only
    return job


async def rendered_job(
    call: HttpCall,
    request: GenerationRequest,
    use: ToolUse,
    params: SamplingParams,
    prompt: dict[str, Any],
    include_reasoning: bool = True,
) -> Job:
    """Return the job of a conversation whose `prompt` has been made. Raises RequestError naming the field."""
    state = call.state
    form, begun = state.replies.format(tools=bool(use.tools)), state.replies.begun(prompt["last_words"])
    params = formed(params, use, state.replies, begun)
    await state.turnstile.enter()  # many may have waited for their text too
    job = Job(call, request, [prompt], params)
    if form is not None:
        job.readers = {
            index: ReplyReader(form, use.schemas, begun, include_reasoning, parallel=use.parallel, named=use.named)
            for index in range(len(job.choices))
        }
    return job


def _writer(job: Job, _choice: int) -> ChatWriter:
    return ChatWriter(job.state.llm.tokenizer, job.params.logprobs or 0)


def _choice(job: Job, index: int, done: Progress) -> dict[str, Any]:
    scored = job.params.logprobs is not None
    logprobs = _writer(job, index).write(done.token_ids, done.logprobs) if scored else None
    reader, reason = job.readers.get(index), done.finish_reason
    if reader is not None and reason is not None:
        reason = reader.finish_reason(reason)
    choice = {"index": index, "message": message_of(done.events), "logprobs": logprobs}
    choice |= {"finish_reason": reason, "stop_reason": done.stop_reason}
    return {**choice, "token_ids": done.token_ids} if job.shows_ids else choice


def message_of(events: Sequence[ReplyEvent]) -> dict[str, Any]:
    """Return the message of a whole answer."""
    said = joined(events)
    content = said.content or (None if said.reasoning or said.tool_calls else "")
    message = {"content": content, "role": "assistant", "refusal": None}
    if said.reasoning:
        message |= {"reasoning": said.reasoning, "reasoning_content": said.reasoning}
    return {**message, "tool_calls": said.tool_calls} if said.tool_calls else message


async def chat_prompt(state: ServerState, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
    """The prompt of a conversation, text and ids. Raises RequestError."""
    options["variables"] = {**state.template_variables, **(options.get("variables") or {})}
    return await state.text_work(state.llm.chat_prompt(messages, **options))


def prompt_options(request: ChatRequest, use: ToolUse) -> Mapping[str, Any]:
    """Return what `chat_prompt` takes beside the messages."""
    continued = bool(request.continue_final_message)
    opened = not continued if request.add_generation_prompt is None else request.add_generation_prompt
    return {
        "tools": use.tools or None,
        "add_generation_prompt": opened,
        "continue_final_message": continued,
        "variables": request.variables(),
        "add_special_tokens": bool(request.add_special_tokens),
    }


def _sampling(request: ChatRequest, state: ServerState, limit: int | None) -> SamplingParams:
    try:
        return request.sampling(state.llm.front.defaults, limit)
    except RequestError as error:
        if error.param == "max_tokens" and request.max_completion_tokens is not None:
            text = str(error).replace("max_tokens", "max_completion_tokens")
            raise RequestError(text, "max_completion_tokens", error.code) from None
        raise
