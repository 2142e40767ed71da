"""POST /v1/completions."""

from __future__ import annotations

from functools import partial

from starlette.types import ASGIApp

from gapless.base.errors import RequestError
from gapless.engine.inputs import PromptInput
from gapless.server.auth import Access
from gapless.server.dialects.completions.answer import CompletionAnswer
from gapless.server.dialects.completions.request import DEFAULT_TOKENS, CompletionRequest
from gapless.server.endpoint import Dialect, HttpCall, RouteEntry
from gapless.server.generation import Job
from gapless.server.protocol import check_scored_only
from gapless.text.incremental import whole_text


async def completions(call: HttpCall) -> ASGIApp:
    """Continue one or more prompts."""
    request = await call.parsed(CompletionRequest)
    state = call.state
    call.model = state.admit(request.model)
    defaults = {"max_tokens": DEFAULT_TOKENS, **state.llm.front.defaults}
    limit = defaults["max_tokens"] if request.max_tokens is None else request.max_tokens
    # A prompt that is only scored still runs one step, whose token is dropped.
    prompt_only = limit == 0 and (bool(request.echo) or request.prompt_logprobs is not None)
    params = request.sampling(defaults, 1 if prompt_only else limit)
    if prompt_only:
        check_scored_only(params)
    if request.echo and params.truncate_prompt_tokens is not None:
        name = "truncate_prompt_tokens"
        raise RequestError(f"{name} does not go with echo: leave one of them out", name)
    prompts = request.prompts()
    plain = request.add_special_tokens is False
    asked = [await _without_special(call, prompt) for prompt in prompts] if plain else prompts
    text = partial(whole_text, state.llm.tokenizer)
    echo = [prompt if isinstance(prompt, str) else text(prompt) for prompt in prompts] if request.echo else []
    return CompletionAnswer(Job(call, request, asked, params, prompt_only), echo, request.prompt_logprobs is not None)


async def _without_special(call: HttpCall, prompt: str | list[int]) -> PromptInput:
    """Return the prompt with the tokens of its text alone."""
    if not isinstance(prompt, str):
        return prompt
    return {"prompt": prompt, "prompt_token_ids": await call.state.text_work(call.state.llm.encode(prompt, False))}


DIALECT = Dialect(
    (RouteEntry("/v1/completions", ("POST",), completions, Access.USER, CompletionRequest, generates=True),)
)
