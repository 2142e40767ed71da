"""Requests of Anthropic's Messages API, and the chat requests that they stand for.

Faults are named by the fields of the body, in Anthropic's spelling: `messages.0.content.1`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec

from gapless.base.errors import RequestError
from gapless.base.structured import StructuredOutputs
from gapless.server.dialects.chat import ChatRequest
from gapless.server.protocol import QUESTION

LEAST_BUDGET = 1_024
"""Fewest tokens of thinking that a request may ask for"""
_ROLES = ("user", "assistant", "system")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_THINKING = {"enabled": True, "adaptive": True, "between_tools": True, "disabled": False}
_EFFORTS = {"low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
"""Chat templates' words for the API's efforts"""


class ContentBlock(msgspec.Struct):
    """A block of any type. Its type decides the fields that it needs; fields that change no token are ignored."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: Any = None
    tool_use_id: str | None = None
    content: str | list[ContentBlock] | None = None
    is_error: bool | None = None


MessageContent = str | list[ContentBlock]


class MessageParam(msgspec.Struct):
    role: str
    content: MessageContent | None = None


class ClientTool(msgspec.Struct):
    name: str = ""
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingConfig(msgspec.Struct):
    type: str
    budget_tokens: int | None = None
    display: str | None = None


class OutputFormat(msgspec.Struct):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: OutputFormat | None = None


class TranslatedChat(ChatRequest):
    """A chat request that was written in another API's form."""

    wanted: StructuredOutputs | None = None

    def form(self) -> StructuredOutputs | None:
        return self.wanted


class CountTokensRequest(msgspec.Struct, kw_only=True):
    EXAMPLE: ClassVar[dict[str, Any]] = {"model": "MODEL", "messages": QUESTION}
    model: str
    messages: list[MessageParam]
    system: MessageContent | None = None
    tools: list[ClientTool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def chat(self, **sampling: Any) -> TranslatedChat:
        """Return the chat request that this stands for. Raises RequestError naming the field."""
        turns, tools, choice = _turns(self.messages), self.tools or [], self.tool_choice
        config = self.output_config or OutputConfig()
        system = [{"role": "system", "content": _joined(self.system, "system")}] if self.system else []
        prefilled = turns[-1].role == "assistant"
        if prefilled:
            _check_prefill(turns[-1])
        return TranslatedChat(
            model=self.model,
            messages=[*system, *_messages(turns)],
            tools=[_tool(tool, f"tools.{i}") for i, tool in enumerate(tools)],
            tool_choice=_choice(choice, [tool.name for tool in tools]),
            parallel_tool_calls=None if choice is None else not choice.disable_parallel_tool_use,
            include_reasoning=self.thinking is None or self.thinking.display != "omitted",
            chat_template_kwargs={**_thinking(self.thinking), **(self.chat_template_kwargs or {})} or None,
            reasoning_effort=_effort(config.effort),
            add_generation_prompt=not prefilled,
            continue_final_message=prefilled,
            wanted=_wanted(config.format, self.output_format),
            **sampling,
        )


class MessagesRequest(CountTokensRequest, kw_only=True):
    EXAMPLE: ClassVar[dict[str, Any]] = {"model": "MODEL", "max_tokens": 32, "messages": QUESTION}
    max_tokens: int
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None

    def chat(self, **sampling: Any) -> TranslatedChat:
        if self.temperature is not None and not 0 <= self.temperature <= 1:
            raise RequestError("temperature must be from 0 to 1", "temperature")
        self._check_budget()
        return super().chat(
            # With 0 the prompt alone is computed, for the cache: a step runs, whose token is dropped.
            max_tokens=1 if self.max_tokens == 0 else self.max_tokens,
            stop=self.stop_sequences,
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            stream=self.stream,
            **sampling,
        )

    def _check_budget(self) -> None:
        """Check a number that no template takes: max_tokens bounds thinking and answer together."""
        asked = self.thinking
        if asked is None or asked.type != "enabled":
            return
        if asked.budget_tokens is None or not LEAST_BUDGET <= asked.budget_tokens < self.max_tokens:
            field = "thinking.budget_tokens"
            raise RequestError(f"{field} must be at least {LEAST_BUDGET} and less than max_tokens", field)


# The conversation


class _Turn(NamedTuple):
    """Messages of one role in a row; each block with the name of its field."""

    role: str
    blocks: list[tuple[str, ContentBlock]]


def _turns(messages: Sequence[MessageParam]) -> list[_Turn]:
    turns: list[_Turn] = []
    for i, message in enumerate(messages):
        where = f"messages.{i}"
        if message.role not in _ROLES:
            text = f"{where}.role must be user, assistant or system, got {message.role[:40]!r}"
            raise RequestError(text, f"{where}.role")
        blocks = _blocks(message.content or [], f"{where}.content")
        if not blocks and message.role != "assistant":
            raise RequestError(f"{where}.content must hold at least one block", f"{where}.content")
        if turns and turns[-1].role == message.role:
            turns[-1].blocks.extend(blocks)
        else:
            turns.append(_Turn(message.role, blocks))
    if not turns:
        raise RequestError("messages must hold at least one message", "messages")
    return turns


def _blocks(content: MessageContent, where: str) -> list[tuple[str, ContentBlock]]:
    if isinstance(content, str):
        return [(where, ContentBlock("text", text=content))]
    return [(f"{where}.{i}", block) for i, block in enumerate(content)]


def _messages(turns: Sequence[_Turn]) -> Iterator[dict[str, Any]]:
    called: dict[str, str] = {}
    for turn in turns:
        if turn.role == "assistant":
            message = _assistant(turn)
            called |= {call["id"]: call["function"]["name"] for call in message["tool_calls"] or ()}
            yield message
        else:
            yield from _user(turn, called)


def _assistant(turn: _Turn) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for where, block in turn.blocks:
        if block.type == "thinking":
            thoughts.append(_needed(block, "thinking", where))
        elif block.type == "tool_use":
            function = {"name": _needed(block, "name", where), "arguments": block.input}
            calls.append({"id": _needed(block, "id", where), "type": "function", "function": function})
        elif block.type != "redacted_thinking":  # which is for the API's own models alone
            texts.append(_text(block, where))
    return {
        "role": "assistant",
        "content": "\n".join(texts) if texts or not calls else None,
        "reasoning_content": "\n".join(thoughts) or None,
        "tool_calls": calls or None,
    }


def _user(turn: _Turn, called: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Yield the results of tools, which answer the turn before, and then the text. `called` has names by id."""
    texts = []
    for where, block in turn.blocks:
        if block.type == "tool_result" and turn.role == "user":
            yield _result(block, where, called)
        else:
            texts.append(_text(block, where))
    if texts:
        yield {"role": turn.role, "content": "\n".join(texts)}


def _result(block: ContentBlock, where: str, called: Mapping[str, str]) -> dict[str, Any]:
    call = _needed(block, "tool_use_id", where)
    text = _joined(block.content or "", f"{where}.content")
    # No chat template has a field for it.
    text = f"Error: {text}" if block.is_error else text
    return {"role": "tool", "tool_call_id": call, "name": called.get(call), "content": text}


def _joined(content: MessageContent, where: str) -> str:
    return "\n".join(_text(block, field) for field, block in _blocks(content, where))


def _text(block: ContentBlock, where: str) -> str:
    if block.type != "text":
        text = f"{where}: {block.type[:40]} blocks are not supported: models here read text, and results of tools"
        raise RequestError(text, where, "unsupported_parameter")
    return str(_needed(block, "text", where))


def _needed(block: ContentBlock, field: str, where: str) -> Any:
    value = getattr(block, field)
    if value is None:
        raise RequestError(f"{where}.{field} is missing: a {block.type} block needs it", f"{where}.{field}")
    return value


def _check_prefill(turn: _Turn) -> None:
    """Check a final turn of the assistant, whose text the answer continues."""
    for where, block in turn.blocks:
        if block.type == "tool_use":
            raise RequestError(f"{where}: a tool_use block needs a user message with its tool_result after it", where)
    if not any(block.type == "text" and block.text for _, block in turn.blocks):
        raise RequestError("messages: the final message is the assistant's and has no text to continue", "messages")


# Wishes for the answer


def _tool(tool: ClientTool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        text = f"{where}: {tool.type[:40]} is not supported: give tools of your own, with name and input_schema"
        raise RequestError(text, where, "unsupported_parameter")
    if tool.input_schema is None:
        field = f"{where}.input_schema"
        raise RequestError(f"{field} is missing: give the JSON schema of an object", field)
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    given = {name: value for name, value in function.items() if value is not None}
    return {"type": "function", "function": {**given, **({"strict": True} if tool.strict else {})}}


def _choice(asked: ToolChoice | None, names: Sequence[str]) -> Any:
    if asked is None:
        return None
    if asked.type == "tool":
        if asked.name not in names:
            text = f"tool_choice.name must be one of the tools: {', '.join(names)}"
            raise RequestError(text[:300], "tool_choice.name")
        return {"type": "function", "function": {"name": asked.name}}
    if asked.type not in _CHOICES:
        raise RequestError("tool_choice.type must be auto, any, tool or none", "tool_choice.type")
    return _CHOICES[asked.type]


def _thinking(asked: ThinkingConfig | None) -> dict[str, bool]:
    """Return the variables that switch thinking in chat templates; each template has one of them."""
    if asked is None:
        return {}
    if asked.type not in _THINKING:
        raise RequestError(f"thinking.type must be one of {', '.join(_THINKING)}", "thinking.type")
    return dict.fromkeys(("enable_thinking", "thinking"), _THINKING[asked.type])


def _effort(asked: str | None) -> str | None:
    if asked is None:
        return None
    if asked not in _EFFORTS:
        raise RequestError(f"output_config.effort must be one of {', '.join(_EFFORTS)}", "output_config.effort")
    return _EFFORTS[asked]


def _wanted(asked: OutputFormat | None, older: OutputFormat | None) -> StructuredOutputs | None:
    """Return the form of the answer; a request has two fields for it."""
    if asked and older:
        raise RequestError("output_format and output_config.format both ask for a form: leave one out", "output_format")
    return _form(asked, "output_config.format") or _form(older, "output_format")


def _form(asked: OutputFormat | None, where: str) -> StructuredOutputs | None:
    if asked is None:
        return None
    if asked.type != "json_schema":
        raise RequestError(f"{where}.type must be json_schema", f"{where}.type")
    if asked.schema is None:
        raise RequestError(f"{where}.schema is missing: give a JSON schema", f"{where}.schema")
    return StructuredOutputs(json=asked.schema, source=f"{where}.schema")
