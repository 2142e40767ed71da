"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API over the same engine requests as chat."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.types import ASGIApp

from gapless.server.auth import Access
from gapless.server.conversation import chat_prompt
from gapless.server.dialects.chat import chat_job, prompt_options
from gapless.server.dialects.messages.answer import MessageAnswer
from gapless.server.dialects.messages.errors import ERRORS
from gapless.server.dialects.messages.request import CountTokensRequest, MessagesRequest
from gapless.server.endpoint import Dialect, HttpCall, RouteEntry, json_response
from gapless.server.generation import Job
from gapless.text.tools import bounds_nothing, check_tools


async def messages(call: HttpCall) -> ASGIApp:
    """Answer a conversation in the form of Anthropic's Messages API."""
    request = await call.parsed(MessagesRequest)
    call.model = call.state.admit(request.model)
    chat = await call.state.text_work(call.state.llm.in_pool(request.chat))  # a long conversation takes a while
    wish, reasoning = request.thinking, call.state.replies.reasoning
    if wish is not None and wish.type == "enabled" and reasoning is not None and reasoning.thinking is not None:
        chat.thinking_token_budget = wish.budget_tokens
    job = await chat_job(call, chat)
    job.prompt_only = request.max_tokens == 0
    _fit(job)
    return MessageAnswer(job, request.max_tokens)


def _fit(job: Job) -> None:
    """Lower max_tokens to the room that the prompt leaves: agents ask for far more than a model's context may hold."""
    prompt, most = job.prompts[0], job.params.max_tokens
    assert isinstance(prompt, Mapping) and most is not None
    room = job.state.llm.info.max_model_len - len(prompt["prompt_token_ids"])
    if 0 < room < most:  # without any room, the engine refuses the prompt
        job.params = job.params.replace(max_tokens=room)
    form = job.params.structured_outputs
    if form and form.thinking and form.thinking.free and bounds_nothing(job.params):
        job.params = job.params.replace(structured_outputs=None, thinking_token_budget=None)


async def count_tokens(call: HttpCall) -> ASGIApp:
    """Answer with the number of tokens that a conversation has as a prompt."""
    request = await call.parsed(CountTokensRequest)
    call.state.admit(request.model)
    chat = await call.state.text_work(call.state.llm.in_pool(request.chat))
    use = check_tools(chat.tools, chat.tool_choice, chat.parallel_tool_calls)
    prompt = await chat_prompt(call.state, chat.messages, **prompt_options(chat, use))
    return json_response({"input_tokens": len(prompt["prompt_token_ids"])})


MESSAGES = Dialect(
    (
        RouteEntry("/v1/messages", ("POST",), messages, Access.USER, MessagesRequest, generates=True),
        RouteEntry("/v1/messages/count_tokens", ("POST",), count_tokens, Access.USER, CountTokensRequest),
    ),
    ERRORS,
)
