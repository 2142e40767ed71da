"""Answers of chat completions."""

from __future__ import annotations

from typing import ClassVar

from gapless.server.dialects.choices import ChoicesAnswer, Fields
from gapless.server.generation import Progress
from gapless.server.logprobs import ChatWriter, prompt_entries
from gapless.text.items import Change, ItemKind, Items, Step


class ChatAnswer(ChoicesAnswer):
    object, chunk_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"
    first: ClassVar[Fields] = {"delta": {"role": "assistant", "content": ""}}
    nothing: ClassVar[Fields] = {"delta": {}}

    def said(self, text: str) -> Fields:
        return {"delta": {"content": text}}

    def shown(self, change: Change) -> Fields | None:
        delta = delta_of(change)
        return None if delta is None else {"delta": delta}

    def whole_choice(self, choice: int, done: Progress) -> tuple[Fields, Fields]:
        return {"message": message_of(done.items)}, {"token_ids": done.token_ids} if self.job.shows_ids else {}

    def new_writer(self, choice: int) -> ChatWriter:
        return ChatWriter(self.job.state.llm.tokenizer, self.job.params.logprobs or 0)

    def about_prompt(self) -> Fields:
        job, prompt, fields = self.job, self.job.stream_of(0), Fields()
        if job.params.prompt_logprobs is not None:
            fields["prompt_logprobs"] = prompt_entries(prompt.prompt_logprobs or ())
        if job.shows_ids:
            fields["prompt_token_ids"] = prompt.prompt_token_ids
        return fields


def message_of(items: Items) -> Fields:
    """Return the message of a whole answer."""
    message = {"content": items.content, "role": "assistant", "refusal": None}
    if reasoning := items.texts(ItemKind.REASONING):
        message |= {"reasoning": reasoning, "reasoning_content": reasoning}
    return {**message, "tool_calls": calls} if (calls := items.calls) else message


def delta_of(change: Change) -> Fields | None:
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
