"""POST /v1/completions."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.types import ASGIApp

from gapless.base.errors import RequestError
from gapless.engine.inputs import PromptInput
from gapless.server.endpoint import HttpCall
from gapless.server.event_stream import openai_answer
from gapless.server.generation import Job, Progress
from gapless.server.logprobs import CompletionWriter, prompt_entries
from gapless.server.protocol import DEFAULT_COMPLETION_TOKENS, CompletionRequest
from gapless.server.sse import CompletionChunks
from gapless.text.incremental import whole_text


async def completions(call: HttpCall) -> ASGIApp:
    """Continue one or more prompts."""
    request = await call.parsed(CompletionRequest)
    state = call.state
    call.model = state.admit(request.model)
    defaults = {"max_tokens": DEFAULT_COMPLETION_TOKENS, **state.llm.front.defaults}
    limit = defaults["max_tokens"] if request.max_tokens is None else request.max_tokens
    # A prompt that is only scored still runs one step, whose token is dropped.
    prompt_only = limit == 0 and (bool(request.echo) or request.prompt_logprobs is not None)
    params = request.sampling(defaults, 1 if prompt_only else limit)
    if prompt_only and params.structured_outputs is not None:
        field = params.structured_outputs.where
        raise RequestError(f"{field} has nothing to form where max_tokens is 0: leave one of them out", field)
    if request.echo and params.truncate_prompt_tokens is not None:
        name = "truncate_prompt_tokens"
        raise RequestError(f"{name} does not go with echo: leave one of them out", name)
    prompts = request.prompts()
    plain = request.add_special_tokens is False
    asked = [await _without_special(call, prompt) for prompt in prompts] if plain else prompts
    job = Job(call, request, asked, params, prompt_only)
    text = partial(whole_text, state.llm.tokenizer)
    echo = [prompt if isinstance(prompt, str) else text(prompt) for prompt in prompts] if request.echo else []
    choice = partial(_choice, job, request, echo)
    return openai_answer(job, CompletionChunks, partial(_writer, job, echo), choice, echo=echo)


async def _without_special(call: HttpCall, prompt: str | list[int]) -> PromptInput:
    """Return the prompt with the tokens of its text alone."""
    if not isinstance(prompt, str):
        return prompt
    return {"prompt": prompt, "prompt_token_ids": await call.state.text_work(call.state.llm.encode(prompt, False))}


def _choice(job: Job, request: CompletionRequest, echo: list[str], index: int, done: Progress) -> dict[str, Any]:
    stream = job.stream_of(index)
    logprobs, ids, entries = None, done.token_ids, done.logprobs
    if job.params.logprobs is not None:
        if echo:
            ids, entries = [*stream.prompt_token_ids, *ids], [*(stream.prompt_logprobs or ()), *entries]
        logprobs = _writer(job, echo, index).write(ids, entries)
    text = (echo[index // job.params.n] if echo else "") + "".join(done.text)
    choice = {"index": index, "text": text, "logprobs": logprobs}
    choice |= {"finish_reason": done.finish_reason, "stop_reason": done.stop_reason}
    if request.prompt_logprobs is not None:
        choice["prompt_logprobs"] = prompt_entries(stream.prompt_logprobs or ())
    if job.shows_ids:
        choice |= {"prompt_token_ids": stream.prompt_token_ids, "token_ids": done.token_ids}
    return choice


def _writer(job: Job, echo: list[str], choice: int) -> CompletionWriter:
    tokenizer, prompt = job.state.llm.tokenizer, job.stream_of(choice).prompt_token_ids
    echoed = echo[choice // job.params.n] if echo else None
    return CompletionWriter(tokenizer, job.params.skip_special_tokens, prompt, echoed)
