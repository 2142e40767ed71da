"""How the served model writes its replies, and readers that take them apart as their tokens come."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from gapless.base.errors import ConfigError
from gapless.text.reply_parser import CallArguments, CallBegun, Reasoning, ReplyEvent, ReplyFormat
from gapless.text.reply_tables import (
    HARMONY_MESSAGE,
    HARMONY_REPLY,
    REASONING_NAMES,
    REASONING_TABLES,
    TOOL_NAMES,
    TOOL_TABLES,
    ReplyState,
    ReplyTable,
    choose_tables,
)
from gapless.text.response_template import compile_response_template
from gapless.text.tokenizer import Tokenizer

HEAD_CHARS = 40
"""The end of a prompt that is looked at where a template has changed the text before it"""


class ReplyForms:
    """The served model's way of writing replies: by its chat template, or by the flags."""

    def __init__(self, tokenizer: Tokenizer, tools: str, reasoning: str) -> None:
        """`tools` and `reasoning` are names of tables, auto, or none. Raises ConfigError for another, and
        CheckpointError where the checkpoint's own description cannot be read and is needed."""
        found = _described(tokenizer) if {"auto", "mistral"} & {tools, reasoning} else (None, None)
        self.tools = _table(TOOL_TABLES, form_name(tools, TOOL_NAMES), found[0], "tool_call_parser")
        self.reasoning = _table(REASONING_TABLES, form_name(reasoning, REASONING_NAMES), found[1], "reasoning_parser")
        self.special_ids = tokenizer.special_ids
        self._added = tokenizer.added
        self.encode = tokenizer.encode
        self._formats: dict[bool, ReplyFormat] = {}

    def format(self, tools: bool) -> ReplyFormat | None:
        """Return the format of replies to requests with or without tools; None where they are plain text."""
        table = self.tools if tools else None
        if table is None and self.reasoning is None:
            return None
        if tools not in self._formats:
            self._formats[tools] = ReplyFormat(table, self.reasoning, self._added)
        return self._formats[tools]

    def begun(self, last: LastWords) -> str:
        """Return a prompt's part of the reply: the text of the continued message, and before it the text that begins or
        ends the reasoning in the chat template's own words."""
        table, thinking = self.reasoning or self.tools, self.reasoning and self.reasoning.thinking
        if table is not None and table.start is ReplyState.HEADER:
            _, found, head = last.before.rpartition(HARMONY_REPLY)
            return (head if found and HARMONY_MESSAGE not in head else "") + last.text
        marks = (thinking.begin, thinking.end) if thinking else ()
        head = _head(last, marks) if marks else ""
        places = [head.find(mark) for mark in marks if mark in head]
        return head[min(places) :] + last.text if places else last.text

    def names(self) -> dict[str, str | None]:
        """Return the choice, for clients that ask the server."""
        return {
            "tool_call_parser": self.tools.name if self.tools else None,
            "reasoning_parser": self.reasoning.name if self.reasoning else None,
        }


def _described(tokenizer: Tokenizer) -> tuple[ReplyTable | None, ReplyTable | None]:
    """Return the tables that the checkpoint describes, else the tables whose marks its chat template has."""
    if tokenizer.response_template is not None:
        return compile_response_template(tokenizer.response_template)
    return choose_tables(tokenizer.template.source if tokenizer.template else "")


def form_name(asked: str, others: Mapping[str, str]) -> str:
    """The name of a form here, for its name here or in another engine."""
    name = asked.replace("-", "_")
    return others.get(name, name)


def _table(tables: Mapping[str, ReplyTable], asked: str, found: ReplyTable | None, flag: str) -> ReplyTable | None:
    if asked not in ("auto", "none", *tables):
        raise ConfigError(f"{flag}: {asked!r} is none of auto, none, {', '.join(tables)}")
    # To vLLM, mistral is both of its forms.
    by_template = asked == "auto" or (asked == "mistral" and found is not None and found.name.startswith(asked))
    return found if by_template else tables.get(asked)


class ReplyReader:
    """Takes one choice apart, as its tokens come.

    `begun` is what the prompt has of the reply. Without `parallel` it passes on the first call alone. `named` is
    whether the request has named the function.
    """

    def __init__(
        self, form: ReplyFormat, schemas: Mapping[str, Any], begun: str = "", include_reasoning: bool = True,
        *, parallel: bool = True, named: bool = False,
    ) -> None:  # fmt: skip
        self._form = form
        self._parser = form.parser(schemas, begun)
        self._include = include_reasoning
        self._parallel = parallel
        self._named = named
        self._terminals: deque[tuple[int, int]] = deque()
        """Tokens that are terminals and whose text has not come, each with the number of tokens up to it: text may
        be held back for a stop string."""
        self._plain = 0
        """Tokens after the last of them."""
        self._pending = ""
        self.called = False
        self.reasoning_tokens = 0

    @property
    def held(self) -> int:
        """Characters at the end of the text that no event has reported yet."""
        return len(self._pending) + self._parser.held

    def feed(self, tokens: Sequence[int], text: str) -> list[ReplyEvent]:
        """Return the events of these tokens, whose text may come later."""
        for token in tokens:
            self._plain += 1
            if token in self._form.terminal_of:
                self._terminals.append((token, self._plain))
                self._plain = 0
        self._pending += text
        events: list[ReplyEvent] = []
        while self._terminals:
            token, count = self._terminals[0]
            before, literal, after = self._pending.partition(self._form.terminal_of[token])
            if not literal:
                return self._shown(events)
            self._terminals.popleft()
            self._count(count)
            events += self._parser.push(before, literal)
            self._pending = after
        self._count(self._plain)
        events += self._parser.push(self._pending)
        self._plain, self._pending = 0, ""
        return self._shown(events)

    def finish(self) -> list[ReplyEvent]:
        """Return the held text, at the end."""
        return self._shown(self._parser.push(self._pending) + self._parser.finish())

    @property
    def cut(self) -> bool:
        """Whether the reply, if it has ended, ended inside a call that was passed on."""
        index = self._parser.open_call
        return index is not None and (self._parallel or index == 0)

    def finish_reason(self, reason: str) -> str:
        """Return the finish reason of a completion, as clients are given it: `stop` where they chose the call, and
        where the end came inside one."""
        return "tool_calls" if self.called and not self.cut and reason == "stop" and not self._named else reason

    def _count(self, tokens: int) -> None:
        """Note these tokens, before their text changes what the parser reads."""
        self.reasoning_tokens += tokens * self._parser.in_reasoning

    def _shown(self, events: list[ReplyEvent]) -> list[ReplyEvent]:
        self.called |= any(isinstance(event, CallBegun) for event in events)
        return [event for event in events if self._passes(event)]

    def _passes(self, event: ReplyEvent) -> bool:
        if isinstance(event, CallBegun | CallArguments):
            return self._parallel or event.index == 0
        return self._include or not isinstance(event, Reasoning)


class LastWords(NamedTuple):
    """The end of a chat's prompt."""

    before: str
    """The prompt up to the text that the reply continues"""
    answered: str = ""
    """The text of the last message that is answered"""
    text: str = ""
    """The prompt's part of the message that the reply continues, if it does"""


def last_words(prompt: str, messages: Sequence[Mapping[str, Any]], continued: bool) -> LastWords:
    text = _text_of(messages[-1]) if continued else ""
    shown = next((one for one in (text, text.rstrip(), text.strip()) if prompt.endswith(one)), None)
    if shown is None:
        return LastWords("", text=text)
    answered = _text_of(messages[-2] if continued else messages[-1]).strip() if len(messages) > continued else ""
    return LastWords(prompt.removesuffix(shown), answered, shown)


def _head(last: LastWords, marks: tuple[str, str]) -> str:
    """Return the chat template's words after the message that is answered. Its text may be part of these words, as "hi"
    is of a mark, or a mark itself."""
    before, answered = last.before, last.answered
    places = _places(before, answered, marks)
    at = next(places, -1)
    if answered.endswith(marks) and at + len(answered) >= len(before.rstrip()):
        at = next(places, at)
    return before[at + len(answered) :] if at >= 0 else before[-HEAD_CHARS:]


def _places(before: str, text: str, marks: tuple[str, str]) -> Iterator[int]:
    """Yield where this text stands, the last place first, but where a mark is across one of its ends."""
    at = len(before)
    for _ in range(HEAD_CHARS if text else 0):
        at = before.rfind(text, 0, at + len(text) - 1)
        if at < 0:
            return
        edges = (at, at + len(text))
        if not any(mark in before[max(0, x - len(mark) + 1) : x + len(mark) - 1] for x in edges for mark in marks):
            yield at


def _text_of(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "".join(part if isinstance(part, str) else str(part.get("text") or "") for part in content)
