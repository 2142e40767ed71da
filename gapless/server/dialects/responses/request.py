"""The fields of POST /v1/responses, checked, and the engine's request made of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, UnsetType

from gapless.base.errors import RequestError
from gapless.base.params import SamplingParams, check_logprobs
from gapless.base.structured import StructuredOutputs
from gapless.server.dialects.responses.input import messages_of
from gapless.server.errors import unsupported
from gapless.server.forms import schema_form, two_forms
from gapless.server.protocol import GenerationRequest

LOGPROBS = "message.output_text.logprobs"
"""Supported values of `include`. Its other values name things that this server never has, and are ignored."""
_WHOLE = ": nothing is stored here, so send the whole conversation in input"
_REFUSED = {
    "previous_response_id": _WHOLE,
    "conversation": _WHOLE,
    "prompt": ": prompts are not stored here, so send their text in instructions and input",
    "background": ": an answer is sent once, to the client that waits for it, so leave it out",
    "context_management": ": leave it out, and shorten input yourself",
    "prompt_logprobs": ": a response has no field for them",
    "return_token_ids": ": a response has no field for them",
    "return_meta_info": ": a response has no choices, whose it is",
}
_SPELLINGS = {"messages": "input", "prompt": "input", "logprobs": "top_logprobs", "max_tokens": "max_output_tokens"}
"""Names of fields in errors, as a chat request has them and as this one has."""
_NO_GROUP = re.compile(r"\\.|\[\^?\]?(?:[^\]\\]+|\\.)*(?:\]|\\?\Z)", re.DOTALL)
"""Escapes and classes of a regular expression"""
_PATH = re.compile(r"[\w.\[\]]*")
_NOT_HERE = re.compile(r"\.(function|allowed_tools)\b")
"""Levels of a chat request's fields that this one does not have."""


class TextFormat(msgspec.Struct, omit_defaults=True):
    type: Literal["text", "json_object", "json_schema"]
    schema: msgspec.Raw | UnsetType = UNSET
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningOptions(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class ResponsesRequest(GenerationRequest):
    """A conversation in full: of the fields that name something stored, none may be set."""

    EXAMPLE: ClassVar[dict[str, Any]] = {"input": "What is 12 + 30?", "max_output_tokens": 32}
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: list[str] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    context_management: Any = None

    def check(self) -> None:
        """Raise RequestError for what needs a store, and for what would change the conversation."""
        for name, mend in _REFUSED.items():
            value = getattr(self, name)
            if value is not None and value is not False:
                raise unsupported(name, mend)
        if self.truncation == "auto":
            raise unsupported("truncation", " but as disabled: shorten input yourself")
        if self.n not in (None, 1):
            raise unsupported("n", ": a response has one output")
        self.usage_wanted()

    def messages(self) -> list[dict[str, Any]]:
        """Return the conversation as chat messages. Raises RequestError, or msgspec's, naming the item and field."""
        return messages_of(self.instructions, self.input)

    def params(self, defaults: Mapping[str, Any]) -> SamplingParams:
        return self.sampling(defaults, self.max_tokens if self.max_output_tokens is None else self.max_output_tokens)

    def wanted_logprobs(self) -> int | None:
        check_logprobs("top_logprobs", self.top_logprobs)
        return self.top_logprobs or 0 if self.top_logprobs or LOGPROBS in (self.include or ()) else None

    def form(self) -> StructuredOutputs | None:
        asked = self.text.format if self.text else None
        other: StructuredOutputs | None = super().form()
        if asked is None:
            return other
        form = _text_form(asked)
        if self.response_format is not None or (form and other):
            raise two_forms(form.where if form else "text.format", other.where if other else "response_format")
        return form or other

    def variables(self) -> dict[str, Any]:
        """Values for the chat template by name."""
        effort = self.reasoning.effort if self.reasoning else None
        return {**({} if effort is None else {"reasoning_effort": effort}), **(self.chat_template_kwargs or {})}

    def chat_tools(self, strict: bool) -> dict[int, Any]:
        """Return the tools in the shape of chat requests, by place; `strict` is the default of functions."""
        return {i: _chat_tool(tool, f"tools[{i}]", strict) for i, tool in self.callable_tools().items()}

    def callable_tools(self) -> dict[int, Any]:
        """Return the tools without the types that OpenAI's servers run: agents offer these to any server."""
        return {i: tool for i, tool in enumerate(self.tools or ()) if not _is_hosted(tool)}

    def chat_choice(self) -> Any:
        """Return the tool_choice in the shape of chat requests."""
        choice = self.tool_choice
        custom = isinstance(choice, Mapping) and choice.get("type") == "custom"
        return {**choice, "type": "function"} if custom else choice

    def custom_names(self) -> frozenset[str]:
        """Return the names of the tools that take text, once the tools have been checked."""
        return frozenset(tool["name"] for tool in self.callable_tools().values() if tool["type"] == "custom")


def _text_form(asked: TextFormat) -> StructuredOutputs | None:
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return StructuredOutputs(json_object=True, source="text.format")
    return schema_form(asked.schema or None, "text.format.schema")


def _is_hosted(tool: Any) -> bool:
    kind = tool.get("type") if isinstance(tool, Mapping) else None
    return isinstance(kind, str) and kind not in ("function", "custom")


def _chat_tool(tool: Any, where: str, strict: bool) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where} must be an object with type and name", where)
    kind, said = tool.get("type"), tool.get("strict")
    function = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    if kind == "custom":
        function["parameters"], function["strict"] = _custom_schema(tool.get("format"), f"{where}.format")
    elif kind == "function":
        function["strict"] = strict if said is None else said
    else:
        raise RequestError(f"{where}.type must be function or custom, or that of a tool to ignore", f"{where}.type")
    return {"type": "function", "function": function}


def _custom_schema(form: Any, where: str) -> tuple[dict[str, Any], bool]:
    """Return the parameters of a function that takes one text of this format, and whether they must be kept to."""
    text: dict[str, Any] = {"type": "string"}
    if not isinstance(form, Mapping | None):
        raise RequestError(f"{where} must be an object with a type", where)
    if form and form.get("type") != "text":
        kind = form.get("type"), form.get("syntax")
        if kind != ("grammar", "regex") or not isinstance(form.get("definition"), str):
            text_or = "of type text, or of type grammar with syntax regex and a definition"
            raise RequestError(f"{where} must be {text_or}: no other can be kept to here", where)
        if _closes_before_it_opens(form["definition"]):
            field = f"{where}.definition"
            raise RequestError(f"{field}: unopened group: write \\) for the character", field)
        text["pattern"] = f"^(?:{form['definition']})$"
    schema = {"type": "object", "properties": {"input": text}, "required": ["input"], "additionalProperties": False}
    return schema, "pattern" in text


def _closes_before_it_opens(regex: str) -> bool:
    """Return whether a group that the regex does not open ends in it; set in a group, it would match otherwise."""
    steps = (1 if one == "(" else -1 for one in _NO_GROUP.sub("", regex) if one in "()")
    return any(depth < 0 for depth in accumulate(steps))


@contextmanager
def own_names() -> Iterator[None]:
    """Give errors the names that fields have in this API."""
    try:
        yield
    except RequestError as error:
        text = str(error)
        if error.param and text.startswith(error.param):  # the rest of it may hold the client's own words
            text = _PATH.sub(lambda path: _own(path[0]), text, count=1)
        raise RequestError(text, error.param and _own(error.param), error.code) from None


def _own(path: str) -> str:
    return _SPELLINGS.get(path) or _NOT_HERE.sub("", path)
