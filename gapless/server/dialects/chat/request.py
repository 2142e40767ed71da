"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any, ClassVar

from gapless.base.errors import RequestError
from gapless.base.params import check_logprobs
from gapless.server.protocol import QUESTION, GenerationRequest


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
