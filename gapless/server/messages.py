"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API over the same engine requests as chat."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from starlette.types import ASGIApp

from gapless.server.chat import chat_job, chat_prompt, prompt_options, tool_use
from gapless.server.endpoint import HttpCall, json_response
from gapless.server.generation import Job, WholeAnswer
from gapless.server.messages_answer import MessageStream, whole_message
from gapless.server.messages_request import CountTokensRequest, MessagesRequest, TranslatedChat
from gapless.server.state import ServerState


async def messages(call: HttpCall) -> ASGIApp:
    """Answer a conversation in the form of Anthropic's Messages API."""
    request = await call.parsed(MessagesRequest)
    call.model = call.state.admit(request.model)
    job = await chat_job(call, await _converted(call.state, request))
    job.prompt_only = request.max_tokens == 0
    _fit(job)
    call.identity = f"msg_{secrets.token_hex(12)}"
    if request.stream:
        return MessageStream(job, request.max_tokens)
    return WholeAnswer(job, lambda: whole_message(job, request.max_tokens))


async def _converted(state: ServerState, request: CountTokensRequest) -> TranslatedChat:
    """Return the chat request, made on a thread: a long conversation takes a while. Raises RequestError."""
    return await state.text_work(state.llm.in_pool(request.chat))


def _fit(job: Job) -> None:
    """Lower max_tokens to the room that the prompt leaves: agents ask for far more than a model's context may hold."""
    prompt, most = job.prompts[0], job.params.max_tokens
    assert isinstance(prompt, Mapping) and most is not None
    room = job.state.llm.info.max_model_len - len(prompt["prompt_token_ids"])
    if 0 < room < most:  # without any room, the engine refuses the prompt
        job.params = job.params.replace(max_tokens=room)


async def count_tokens(call: HttpCall) -> ASGIApp:
    """Answer with the number of tokens that a conversation has as a prompt."""
    request = await call.parsed(CountTokensRequest)
    call.state.admit(request.model)
    chat = await _converted(call.state, request)
    prompt = await chat_prompt(call.state, chat.messages, **prompt_options(chat, tool_use(chat)))
    return json_response({"input_tokens": len(prompt["prompt_token_ids"])})
