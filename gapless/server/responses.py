"""POST /v1/responses: a conversation answered in items. Nothing is stored, so each request brings all of it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import msgspec
from starlette.types import ASGIApp, Receive, Scope, Send

from gapless.engine.outputs import Delta
from gapless.server.chat import chat_prompt, rendered_job
from gapless.server.endpoint import HttpCall
from gapless.server.errors import ApiError
from gapless.server.event_stream import StreamedAnswer
from gapless.server.generation import Job, whole_answer
from gapless.server.responses_items import ItemFields, Output, ResponseEvent
from gapless.server.responses_request import ResponsesRequest, own_names
from gapless.server.responses_scores import ReplyScores
from gapless.text.replies import ReplyForms
from gapless.text.reply_parser import ReplyEvent
from gapless.text.tools import ToolUse, check_tools

_json = msgspec.json.encode


async def responses(call: HttpCall) -> ASGIApp:
    """Answer a conversation in items: reasoning, messages and calls of tools. Nothing is stored."""
    request = await call.parsed(ResponsesRequest)
    request.check()
    state = call.state
    call.model = state.admit(request.model)
    with own_names():
        use = _tool_use(request, state.replies)
        params = request.params(state.llm.front.defaults)
        messages = await state.text_work(state.llm.in_pool(request.messages))
        prompt = await chat_prompt(state, messages, tools=use.tools or None, variables=request.variables())
        job = await rendered_job(call, request, use, params, prompt)
    call.identity = f"resp_{secrets.token_hex(16)}"
    return ResponseAnswer(job, _frame(job, request), Output(request.custom_names()))


async def stored_responses(call: HttpCall) -> ASGIApp:
    """Refuse with 404: responses are not stored."""
    if call.request.method == "POST" and not call.request.url.path.endswith("/cancel"):
        raise ApiError(404, "there is no such route; POST goes to /v1/responses alone", code="not_found")
    text = "responses are not stored here: keep the answer, and send its items in the next request's input"
    raise ApiError(404, text, code="not_found")


def _tool_use(request: ResponsesRequest, replies: ReplyForms) -> ToolUse:
    # Functions are strict by default, if the model's way of writing calls lets them be.
    strict = replies.tools is not None and replies.tools.form is not None
    tools = request.chat_tools(strict)
    use = check_tools(list(tools.values()), request.chat_choice(), request.parallel_tool_calls, list(tools))
    custom = request.custom_names()
    own = {name: "format.definition" if name in custom else "parameters" for name in use.fields}
    return use._replace(fields={name: use.fields[name].replace("function.parameters", own[name]) for name in own})


def _frame(job: Job, request: ResponsesRequest) -> ItemFields:
    """Return the response object as it is at first."""
    params = job.params
    effort = request.reasoning.effort if request.reasoning else None
    return {
        "id": job.call.identity,
        "object": "response",
        "status": "in_progress",
        "created_at": int(time.time()),
        "model": job.call.model,
        "background": False,
        "error": None,
        "incomplete_details": None,
        "instructions": request.instructions,
        "max_output_tokens": params.max_tokens,
        "metadata": request.metadata or {},
        "output": [],
        "parallel_tool_calls": request.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": effort, "summary": None},
        "store": False,
        "temperature": params.temperature,
        "text": request.text or {"format": {"type": "text"}},
        "tool_choice": request.tool_choice or "auto",
        "tools": list(request.callable_tools().values()),
        "top_logprobs": params.logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "usage": None,
    }


class ResponseAnswer(StreamedAnswer):
    """The ASGI app that runs one job and answers with a response object, or with the events of one."""

    def __init__(self, job: Job, frame: ItemFields, output: Output) -> None:
        super().__init__(job, plain=False)
        self._frame = frame
        self._output = output
        self._reader = job.readers.get(0)
        self._scores: ReplyScores | None = None
        """Log-probabilities of the text, if they are asked for; made with the first tokens"""
        self._sent = 0
        """Events that have been sent"""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with own_names():
            if self._job.streamed:
                await super().__call__(scope, receive, send)
            else:
                await whole_answer(self._job, lambda: _json(self._ended()), self._take)(scope, receive, send)

    def _opening(self) -> bytes:
        return self._encoded((f"response.{name}", {"response": self._frame}) for name in ("created", "in_progress"))

    def _chunk(self, choice: int, delta: Delta) -> bytes:
        return self._encoded(self._take(choice, delta))

    def _end(self) -> bytes:
        ended = self._ended()
        return self._encoded([(f"response.{ended['status']}", {"response": ended})])

    def _error(self, answer: ApiError) -> bytes:
        events = list(self._output.finish("incomplete"))
        failed = {"status": "failed", "error": {"code": "server_error", "message": answer.message}}
        response = {**self._frame, **failed, "output": self._output.records}
        return self._encoded([*events, ("response.failed", {"response": response})])

    def _take(self, choice: int, delta: Delta) -> list[ResponseEvent]:
        events: list[ResponseEvent] = []
        for tokens, text in self._pieces(delta):
            events += self._given(self._job.events_of(choice, Delta(choice, text, tokens)))
        if delta.finish_reason is not None:
            events += self._given(self._reader.finish() if self._reader else [], ended=True)
            cut = delta.finish_reason == "length" or (self._reader is not None and self._reader.cut)
            events += self._output.finish("incomplete" if cut else "completed")
        return events

    def _pieces(self, delta: Delta) -> Iterable[tuple[list[int], str]]:
        job = self._job
        if job.params.logprobs is None:
            return [(delta.token_ids, delta.text)]
        if self._scores is None:
            self._scores = ReplyScores(job.state.llm.tokenizer, job.params, job.stream_of(0), self._reader)
        return self._scores.split(delta)

    def _given(self, said: Sequence[ReplyEvent], ended: bool = False) -> Iterable[ResponseEvent]:
        return self._output.take(said, self._scores.of(said, ended) if self._scores else repeat(()))

    def _ended(self) -> ItemFields:
        whole = self._job.choices[0].finish_reason != "length"
        ended = {"status": "completed", "completed_at": int(time.time())}
        cut = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        times = {"timings": self._job.timings()} if self._job.shows_times else {}
        said = {"output": self._output.records, "usage": self._usage(), **times}
        return {**self._frame, **(ended if whole else cut), **said}

    def _usage(self) -> Mapping[str, Any]:
        used = self._job.usage()
        cached = self._job.stream_of(0).num_cached_tokens
        return {
            "input_tokens": used["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": used["completion_tokens"],
            "output_tokens_details": used.get("completion_tokens_details", {"reasoning_tokens": 0}),
            "total_tokens": used["total_tokens"],
        }

    def _encoded(self, events: Iterable[ResponseEvent]) -> bytes:
        data = b""
        for kind, fields in events:
            body = _json({"type": kind, "sequence_number": self._sent, **fields})
            data += b"event: %b\ndata: %b\n\n" % (kind.encode(), body)
            self._sent += 1
        return data
