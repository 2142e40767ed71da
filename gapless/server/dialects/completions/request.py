"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import ClassVar

from gapless.base.errors import RequestError
from gapless.server.protocol import GenerationRequest

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
