"""Chat templates: messages to a prompt, compiled once, rendered in a bounded time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Template, TemplateError

from gapless.base.errors import CheckpointError, RequestError
from gapless.text.history import canonical
from gapless.text.reading import Reading, read
from gapless.text.sandbox import Environment, deadline_in, rendered

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
MAX_VARIABLES = 1 << 20
"""Most characters of the variables that a request brings, as JSON"""
MAX_RENDER_SECONDS = 2.0
"""How long a render may take, in its thread's own time"""
PROBE_SECONDS = 0.5
"""How long all probes of a template may take"""
_OWNED = {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"}
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
        self.default, self.names = named["default"], tuple(named)
        self.source = "\n".join(named.values())
        """The text of them all, whose marks show how the model writes calls."""
        self._special = dict(special or {})
        environment = Environment()
        self._owned = {*_OWNED, *SPECIAL_NAMES, *self._special, *environment.globals}
        try:
            self._compiled = {key: environment.from_string(text) for key, text in named.items()}
        except (TemplateError, RecursionError) as error:
            raise CheckpointError(f"{name} does not compile: {error or type(error).__name__}") from error
        self._readings = {key: self._read(template) for key, template in self._compiled.items()}

    def _read(self, template: Template) -> Reading:
        deadline = deadline_in(PROBE_SECONDS)
        return read(lambda chat, tools: _render(template, self._values(chat, tools), deadline))

    def _values(
        self, chat: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None, opened: bool = True
    ) -> dict[str, Any]:
        """Return what every template is given."""
        own = {"messages": chat, "tools": tools, "add_generation_prompt": opened}
        return {**self._special, "documents": None, **own}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        seconds: float = MAX_RENDER_SECONDS,
    ) -> str:
        """The prompt of a conversation.

        Messages are JSON objects with a role; content is a string or a list of text parts. `variables` reach the
        template by name. `seconds` bounds the render's own time. Raises RequestError naming the message that is
        wrong, also for what the template itself refuses.
        """
        chat = canonical(messages)
        if continue_final_message:
            _mark_final(chat, add_generation_prompt)
        key = "tool_use" if tools and "tool_use" in self._compiled else "default"
        written = [self._readings[key].written(message) for message in chat]
        values = self._values(written, [_tool(tool) for tool in tools] if tools else None, add_generation_prompt)
        values |= self.check_variables(variables or {})
        text = _render(self._compiled[key], values, deadline_in(seconds))
        return _cut_final(text) if continue_final_message else text

    def check_variables(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a client's variables for the template: JSON alone, and none that replaces ours."""
        field = "chat_template_kwargs"
        try:
            text = json.dumps(given)
            values: Any = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{field} must hold JSON values alone: {error}"[:300], field) from error
        if not isinstance(values, dict):
            raise RequestError(f"{field} must be an object", field)
        if len(text) > MAX_VARIABLES:
            raise RequestError(f"{field} has {len(text):,} characters as JSON, at most {MAX_VARIABLES:,} go", field)
        if owned := sorted(self._owned & values.keys()):
            why = "not a variable that requests may set: leave it out, and use the request's own field if it has one"
            raise RequestError(f"{field}.{owned[0]} is {why}", field, "unsupported_parameter")
        return values


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool without the fields that are null."""
    function = tool.get("function")
    kept = {name: value for name, value in tool.items() if value is not None}
    if isinstance(function, Mapping):
        kept["function"] = {name: value for name, value in function.items() if value is not None}
    return kept


def _render(template: Template, values: Mapping[str, Any], deadline: float) -> str:
    try:
        return rendered(template, values, deadline)
    except Exception as error:  # whatever a template does wrong with these messages is this request's fault only
        text = str(error)[:200] or type(error).__name__
        raise RequestError(f"the chat template refused these messages: {text}", "messages", "chat_template") from error


def _mark_final(chat: list[dict[str, Any]], add_generation_prompt: bool) -> None:
    if add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    texts = chat[-1].get("content", [""])
    if not texts[-1]:
        raise RequestError("the final message has no content to continue", "continue_final_message")
    texts[-1] += _CONTINUE


def _cut_final(text: str) -> str:
    """The prompt up to the end of the final message, without what the template closes it with."""
    at = text.rfind(_CONTINUE.strip())
    if at < 0:
        raise RequestError("the chat template does not print the final message", "continue_final_message")
    kept = text[:at]
    # A template that trims the message took the space after the tag with it, and the message's own as well.
    return kept if text[at:].startswith(_CONTINUE) else kept.rstrip()
