"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp

from gapless.base.errors import RequestError
from gapless.base.params import SamplingParams
from gapless.server.auth import Access
from gapless.server.conversation import chat_prompt, rendered_job
from gapless.server.dialects.chat.answer import ChatAnswer
from gapless.server.dialects.chat.request import ChatRequest
from gapless.server.endpoint import Dialect, HttpCall, RouteEntry
from gapless.server.errors import unsupported
from gapless.server.generation import Job
from gapless.server.protocol import check_scored_only
from gapless.server.state import ServerState
from gapless.text.tools import ToolUse, check_tools


async def chat_completions(call: HttpCall) -> ASGIApp:
    """Answer a conversation."""
    request = await call.parsed(ChatRequest)
    call.model = call.state.admit(request.model)
    return ChatAnswer(await chat_job(call, request))


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
    if prompt_only:
        check_scored_only(job.params)
    job.prompt_only = prompt_only
    return job


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


DIALECT = Dialect(
    (RouteEntry("/v1/chat/completions", ("POST",), chat_completions, Access.USER, ChatRequest, generates=True),)
)
