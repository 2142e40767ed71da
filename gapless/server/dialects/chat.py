"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from starlette.types import ASGIApp

from gapless.base.errors import RequestError
from gapless.base.params import SamplingParams, check_logprobs
from gapless.server.auth import Access
from gapless.server.conversation import chat_prompt, rendered_job
from gapless.server.dialects.choices import ChoiceFields, ChoicesAnswer
from gapless.server.endpoint import Dialect, HttpCall, RouteEntry
from gapless.server.errors import unsupported
from gapless.server.generation import Job, Progress
from gapless.server.logprobs import ChatWriter, prompt_entries
from gapless.server.protocol import QUESTION, GenerationRequest, check_scored_only
from gapless.server.state import ServerState
from gapless.text.items import Change, ItemKind, Items, Step
from gapless.text.tools import ToolUse, check_tools


class ChatRequest(GenerationRequest):
    """The text room checks the messages, when it renders them."""

    EXAMPLE: ClassVar = {"messages": QUESTION, "max_tokens": 32}

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def wanted_logprobs(self) -> int | None:
        check_logprobs("top_logprobs", self.top_logprobs)
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs to be true", "top_logprobs")
        return (self.top_logprobs or 0) if self.logprobs else None

    def variables(self) -> dict[str, Any]:
        """Values for the template by name; the text room checks them."""
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        documents = {"documents": self.documents} if self.documents else {}
        return {**effort, **documents, **(self.chat_template_kwargs or {})}

    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class ChatAnswer(ChoicesAnswer):
    object, chunk_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"
    first: ClassVar[ChoiceFields] = {"delta": {"role": "assistant", "content": ""}}
    nothing: ClassVar[ChoiceFields] = {"delta": {}}

    def said(self, text: str) -> ChoiceFields:
        return {"delta": {"content": text}}

    def shown(self, change: Change) -> ChoiceFields | None:
        delta = delta_of(change)
        return None if delta is None else {"delta": delta}

    def whole_choice(self, choice: int, done: Progress) -> tuple[ChoiceFields, ChoiceFields]:
        return {"message": message_of(done.items)}, {"token_ids": done.token_ids} if self.job.shows_ids else {}

    def new_writer(self, choice: int) -> ChatWriter:
        return ChatWriter(self.job.state.llm.tokenizer, self.job.params.logprobs or 0)

    def about_prompt(self) -> ChoiceFields:
        job, prompt, fields = self.job, self.job.stream_of(0), ChoiceFields()
        if job.params.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_entries(prompt.prompt_logprobs or ())
        if job.shows_ids:
            fields["prompt_token_ids"] = prompt.prompt_token_ids
        return fields


def message_of(items: Items) -> ChoiceFields:
    """Return the message of a whole answer."""
    message = {"content": items.content, "role": "assistant", "refusal": None}
    if reasoning := items.texts(ItemKind.REASONING):
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return {**message, "tool_calls": calls} if (calls := items.calls) else message


def delta_of(change: Change) -> ChoiceFields | None:
    """Return the delta of a stream for a change; None for a change that it does not show."""
    step, item, text, _ = change
    if step is Step.GROWN and item.kind is ItemKind.TEXT:
        return {"content": text}
    if step is Step.GROWN and item.kind is ItemKind.REASONING:
        return {"reasoning": text, "reasoning_content": text}
    if item.call is None or step is Step.CLOSED:
        return None
    if step is Step.GROWN:
        return {"tool_calls": [{"index": item.call.index, "function": {"arguments": text}}]}
    function = {"name": item.call.name, "arguments": ""}
    call = {"index": item.call.index, "id": item.call_id(), "type": "function", "function": function}
    return {"tool_calls": [call]}


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


CHAT = Dialect(
    (RouteEntry("/v1/chat/completions", ("POST",), chat_completions, Access.USER, ChatRequest, generates=True),)
)
