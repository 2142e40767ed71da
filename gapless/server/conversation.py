"""Conversations: the prompt that a chat template makes of messages, and the job that continues it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gapless.base.params import SamplingParams
from gapless.server.endpoint import HttpCall
from gapless.server.generation import Job
from gapless.server.protocol import GenerationRequest
from gapless.server.state import ServerState
from gapless.text.replies import ReplyReader
from gapless.text.tools import ToolUse, formed


async def chat_prompt(state: ServerState, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
    """The prompt of a conversation, text and ids. Raises RequestError."""
    options["variables"] = {**state.template_variables, **(options.get("variables") or {})}
    return await state.text_work(state.llm.chat_prompt(messages, **options))


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
