"""Chat templates: messages to a prompt, compiled once, rendered on a budget."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template, TemplateError

from gapless.base.errors import CheckpointError, RequestError
from gapless.text.budget import BUDGET, Budget, check_chars
from gapless.text.sandbox import Environment

_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send a message's reasoning; templates read the first, some the second."""
_CONTINUE = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """The templates of one model, by name; "default" is always there.

    Raises CheckpointError when one does not compile. `special` are the special tokens the templates may name.
    """

    def __init__(
        self,
        sources: Mapping[str, str] | str,
        special: Mapping[str, str] | None = None,
        name: str = "the chat template",
    ) -> None:
        named = {"default": sources} if isinstance(sources, str) else sources
        self.source = named["default"]
        self._special = dict(special or {})
        environment = Environment()
        try:
            self._compiled = {key: environment.from_string(text) for key, text in named.items()}
        except (TemplateError, RecursionError) as error:
            raise CheckpointError(f"{name} does not compile: {error or type(error).__name__}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        seconds: float | None = None,
    ) -> str:
        """The prompt of a conversation.

        Messages are JSON objects with a role; content is a string or a list of text parts. `variables` reach the
        template by name. `seconds` bounds the render's own time. Raises RequestError naming the message that is
        wrong, also for what the template itself refuses.
        """
        chat = plain_messages(messages)
        if continue_final_message:
            _mark_final(chat, add_generation_prompt)
        values = {
            **self._special,
            **(variables or {}),
            "messages": chat,
            "tools": [dict(tool) for tool in tools] if tools is not None else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        template = self._compiled.get("tool_use" if tools else "default", self._compiled["default"])
        text = _render(template, values, Budget() if seconds is None else Budget(seconds=seconds))
        return _cut_final(text) if continue_final_message else text


def _render(template: Template, values: Mapping[str, Any], budget: Budget) -> str:
    token = BUDGET.set(budget)
    try:
        pieces, size = [], 0
        for piece in template.generate(values):
            size += len(piece)
            check_chars(size)
            pieces.append(piece)
        return "".join(pieces)
    except Exception as error:  # whatever a template does wrong with these messages is this request's fault only
        text = str(error)[:200] or type(error).__name__
        raise RequestError(f"the chat template refused these messages: {text}", "messages", "chat_template") from error
    finally:
        BUDGET.reset(token)


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Checked copies of the messages: text parts joined, absent fields left out, tool arguments as objects."""
    if not isinstance(messages, (list, tuple)) or not messages:
        raise RequestError("messages must be a list with at least one message", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object with role and content", where)
    plain = {key: value for key, value in message.items() if value is not None}
    if plain.get("content") == []:
        del plain["content"]
    if not isinstance(plain.get("tool_call_id", ""), str):
        raise RequestError(f"{where}.tool_call_id must be a string", f"{where}.tool_call_id")
    if not isinstance(plain.get("role"), str) or not plain["role"]:
        raise RequestError(f"{where}.role must be a non-empty string", f"{where}.role")
    refusal = plain.pop("refusal", None)
    if not isinstance(refusal, str | None):
        raise RequestError(f"{where}.refusal must be a string", f"{where}.refusal")
    if "content" in plain:
        plain["content"] = _content(plain["content"], f"{where}.content")
    elif refusal is not None:
        plain["content"] = refusal
    elif plain["role"] == "assistant" and any(name in plain for name in _REASONING):
        plain["content"] = ""  # an answer that was cut off while it reasoned, sent back
    elif plain["role"] != "assistant" or not plain.get("tool_calls"):
        raise RequestError(f"{where}.content is missing: it must be a string or a list of parts", f"{where}.content")
    if "tool_calls" in plain:
        plain["tool_calls"] = _tool_calls(plain["tool_calls"], f"{where}.tool_calls")
    return _with_reasoning(plain)


def _content(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise RequestError(f"{where} must be a string or a list of parts", where)
    return "".join(_part(part, f"{where}[{i}]") for i, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} must be an object with type and text", where)
    if part.get("type") not in ("text", "input_text", "output_text", "refusal"):
        raise RequestError(f"{where}.type must be text: this model reads text only", f"{where}.type")
    field = "refusal" if part["type"] == "refusal" else "text"
    text = part.get(field)
    if not isinstance(text, str):
        raise RequestError(f"{where}.{field} must be a string", f"{where}.{field}")
    return text


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """OpenAI clients send arguments as JSON text; templates print them as objects."""
    if not isinstance(calls, (list, tuple)):
        raise RequestError(f"{where} must be a list", where)
    return [_tool_call(call, f"{where}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}.function must be an object with a name", f"{where}.function")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where}.function.arguments must be a JSON object", f"{where}.function.arguments")
    return {**call, "function": {**function, "arguments": arguments}}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    given = next((message[name] for name in _REASONING if name in message), None)
    return message if given is None else {"thinking": given, **message, "reasoning_content": given}


def _mark_final(chat: list[dict[str, Any]], add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    if not chat[-1].get("content"):
        raise RequestError("the final message has no content to continue", "continue_final_message")
    chat[-1]["content"] += _CONTINUE


def _cut_final(text: str) -> str:
    """The prompt up to the end of the final message, without what the template closes it with."""
    at = text.rfind(_CONTINUE.strip())
    if at < 0:
        raise RequestError("the chat template does not print the final message", "continue_final_message")
    kept = text[:at]
    # A template that trims the message took the space after the tag with it, and the message's own as well.
    return kept if text[at:].startswith(_CONTINUE) else kept.rstrip()
