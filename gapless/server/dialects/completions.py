"""POST /v1/completions."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

from starlette.types import ASGIApp

from gapless.base.errors import RequestError
from gapless.engine.inputs import PromptInput
from gapless.server.auth import Access
from gapless.server.dialects.choices import ChoiceFields, ChoicesAnswer
from gapless.server.endpoint import Dialect, HttpCall, RouteEntry
from gapless.server.generation import Job, Progress
from gapless.server.logprobs import CompletionWriter, prompt_entries
from gapless.server.protocol import GenerationRequest, check_scored_only
from gapless.text.incremental import whole_text
from gapless.text.items import ItemKind

DEFAULT_TOKENS = 16


class CompletionRequest(GenerationRequest):
    EXAMPLE: ClassVar = {"prompt": "12 + 30 =", "max_tokens": 8, "temperature": 0}
    LOGPROBS: ClassVar[str] = "logprobs"

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    add_special_tokens: bool | None = None
    logprobs: int | bool | None = None

    def wanted_logprobs(self) -> int | None:
        if self.logprobs is True:
            text = "logprobs must be a whole number: how many of the most likely tokens to show"
            raise RequestError(text, "logprobs")
        return None if self.logprobs is False else self.logprobs

    def wanted_prompt_logprobs(self) -> int | None:
        wanted = super().wanted_prompt_logprobs()
        return self.wanted_logprobs() if wanted is None and self.echo else wanted

    def prompts(self) -> list[str | list[int]]:
        """The prompts, one per text or list of ids. Raises RequestError for a list of mixed kinds."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = set(map(type, self.prompt))
        if kinds == {int}:
            return [self.prompt]  # type: ignore[list-item]
        if kinds in ({str}, {list}):
            return self.prompt  # type: ignore[return-value]
        text = "prompt must be a string, a list of strings, a list of token ids, or a list of such lists"
        raise RequestError(text, "prompt")


class CompletionAnswer(ChoicesAnswer):
    """Completions; `echo` has the prompts that are sent too, and `scores_prompts` shows prompts' log-probabilities."""

    object, chunk_object, prefix = "text_completion", "text_completion", "cmpl-"
    nothing: ClassVar[ChoiceFields] = {"text": ""}
    ongoing: ClassVar[ChoiceFields] = {"finish_reason": None, "stop_reason": None}

    def __init__(self, job: Job, echo: Sequence[str], scores_prompts: bool) -> None:
        super().__init__(job, echo)
        self._scores_prompts = scores_prompts

    def new_writer(self, choice: int) -> CompletionWriter:
        job = self.job
        prompt, plain = job.stream_of(choice).prompt_token_ids, job.params.skip_special_tokens
        return CompletionWriter(job.state.llm.tokenizer, plain, prompt, self.echo.get(choice))

    def said(self, text: str) -> ChoiceFields:
        return {"text": text}

    def whole_choice(self, choice: int, done: Progress) -> tuple[ChoiceFields, ChoiceFields]:
        stream, fields = self.job.stream_of(choice), ChoiceFields()
        if self._scores_prompts:
            fields["prompt_logprobs"] = prompt_entries(stream.prompt_logprobs or ())
        if self.job.shows_ids:
            fields |= {"prompt_token_ids": stream.prompt_token_ids, "token_ids": done.token_ids}
        return {"text": self.echo.get(choice, "") + done.items.texts(ItemKind.TEXT)}, fields


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


COMPLETIONS = Dialect(
    (RouteEntry("/v1/completions", ("POST",), completions, Access.USER, CompletionRequest, generates=True),)
)
