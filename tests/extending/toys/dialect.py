"""A dialect: a small part of Ollama's POST /api/generate. `gapless serve --dialects ollama` serves it."""

from __future__ import annotations

from typing import Any, ClassVar

import msgspec

from gapless.server.answer import JobAnswer
from gapless.server.auth import Access
from gapless.server.dialects.completions import CompletionRequest
from gapless.server.endpoint import Dialect, HttpCall, RouteEntry
from gapless.server.errors import ApiError, ErrorForm
from gapless.server.generation import Job
from gapless.text.items import Change, Step


class Options(msgspec.Struct):
    num_predict: int | None = None
    temperature: float | None = None
    stop: list[str] | None = None


class Generate(msgspec.Struct):
    EXAMPLE: ClassVar[dict[str, Any]] = {"prompt": "12 + 30 =", "options": {"num_predict": 8}}

    prompt: str
    model: str | None = None
    stream: bool = True
    options: Options = msgspec.field(default_factory=Options)


class Lines(JobAnswer):
    media_type = "application/x-ndjson"

    def changed(self, change: Change) -> bytes:
        return self._line(response=change.text, done=False) if change.step is Step.GROWN else b""

    def ending(self) -> bytes:
        return self._line(response="", **self._end())

    def failure(self, error: ApiError) -> bytes:
        return msgspec.json.encode({"error": error.message}) + b"\n"

    def whole(self) -> dict[str, Any]:
        return {"model": self.job.call.model, "response": self.job.choices[0].items.content, **self._end()}

    def _line(self, **fields: Any) -> bytes:
        return msgspec.json.encode({"model": self.job.call.model, **fields}) + b"\n"

    def _end(self) -> dict[str, Any]:
        reason, usage = self.job.choices[0].finish_reason, self.job.usage()
        counts = {"prompt_eval_count": usage["prompt_tokens"], "eval_count": usage["completion_tokens"]}
        return {"done": True, "done_reason": reason, **counts}


async def generate(call: HttpCall) -> JobAnswer:
    """Continue a prompt."""
    asked = await call.parsed(Generate)
    call.model = call.state.admit(asked.model)
    options = asked.options
    request = CompletionRequest(
        prompt=asked.prompt,
        model=asked.model,
        stream=asked.stream,
        temperature=options.temperature,
        stop=options.stop,
    )
    params = request.sampling(call.state.llm.front.defaults, options.num_predict)
    return Lines(Job(call, request, [asked.prompt], params))


def error(error: ApiError, label: str) -> tuple[int, bytes]:
    return error.status, msgspec.json.encode({"error": error.message})


DIALECT = Dialect(
    (RouteEntry("/api/generate", ("POST",), generate, Access.USER, Generate, generates=True),),
    ErrorForm(lambda scope: scope["path"].startswith("/api/"), error),
)
