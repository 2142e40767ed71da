"""Tools of a chat request: checked, and turned into the form that calls must have where one is asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, NamedTuple

from gapless.base.errors import RequestError
from gapless.base.params import SamplingParams
from gapless.base.structured import MAX_FORM_BYTES, StructuredOutputs
from gapless.text.call_grammar import CallGrammar, Function
from gapless.text.replies import ReplyForms
from gapless.text.reply_parser import ReplyFormat
from gapless.text.schema_words import plain_schema, without_nulls

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
_NONE: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Parameters of a function without the field: it takes none"""


class ToolUse(NamedTuple):
    """A request's settings for tools."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """Tools that may be called, as the chat template is given them; none where the choice is none"""
    schemas: Mapping[str, Mapping[str, Any]] = {}
    """Schemas of their parameters, by function name"""
    fields: Mapping[str, str] = {}
    """The fields of the request that hold these schemas, by function name"""
    strict: frozenset[str] = frozenset()
    """Names of the tools that must be called with arguments of their schema"""
    must: bool = False
    """Whether one of them must be called"""
    named: bool = False
    """Whether the request names the one that must be called"""
    parallel: bool = True
    """Whether there may be several calls"""


NO_TOOLS = ToolUse()
_TEXT_ALONE = ReplyFormat()


def check_tools(
    tools: Sequence[Any] | None, choice: Any, parallel: bool | None, places: Sequence[int] | None = None
) -> ToolUse:
    """Return a request's settings for tools. Raises RequestError naming the field.

    `choice` is the request's tool_choice: none, auto, required, a function, or allowed_tools. `places` are the indices
    that the tools have in the request, where it has others too.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice needs tools: name the functions that may be called", "tool_choice")
        return NO_TOOLS
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools has {len(tools)} entries, at most {MAX_TOOLS} are allowed", "tools")
    text = json.dumps(tools)
    if len(text) > MAX_FORM_BYTES:
        raise RequestError(f"tools are larger than {MAX_FORM_BYTES:,} bytes", "tools")
    functions, fields, plain = {}, {}, []
    for i, tool in zip(places or range(len(tools)), tools, strict=True):
        function = _function(tool, f"tools[{i}]")
        if ": null" in text:  # few have one, and looking for it takes a while
            function = _without_nulls(function)
        _check_parameters(function.get("parameters", _NONE), f"tools[{i}].function.parameters")
        plain.append({**tool, "function": function})
        if function["name"] in functions:
            field = f"tools[{i}].function.name"
            raise RequestError(f"{field}: two tools are called {function['name']!r}", field)
        functions[function["name"]], fields[function["name"]] = function, f"tools[{i}].function.parameters"
    names, must = _chosen(choice, functions)
    kept = tuple(tool for tool in plain if tool["function"]["name"] in names)
    schemas = {name: {**functions[name].get("parameters", _NONE), "type": "object"} for name in names}
    strict = frozenset(name for name in names if functions[name].get("strict"))
    named = isinstance(choice, Mapping) and choice["type"] == "function"
    return ToolUse(kept, schemas, fields, strict, must, named, parallel is not False) if names else NO_TOOLS


def _without_nulls(function: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a function without fields and keywords that are null: they are absent."""
    given = {key: value for key, value in function.items() if value is not None}
    return {**given, "parameters": without_nulls(given["parameters"])} if "parameters" in given else given


def _function(tool: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(tool, Mapping):
        raise RequestError(f"{where} must be an object with type and function", where)
    if tool.get("type") != "function":
        raise RequestError(f"{where}.type must be function, got {str(tool.get('type'))[:40]!r}", f"{where}.type")
    function, where = tool.get("function"), f"{where}.function"
    if not isinstance(function, Mapping):
        raise RequestError(f"{where} must be an object with a name", where)
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(f"{where}.name must be 1 to 64 letters, digits, '_', '-' or '.'", f"{where}.name")
    if not isinstance(function.get("description"), str | None):
        raise RequestError(f"{where}.description must be a string", f"{where}.description")
    if not isinstance(function.get("strict"), bool | None):
        raise RequestError(f"{where}.strict must be true or false", f"{where}.strict")
    return function


def _check_parameters(schema: Any, where: str) -> None:
    """Check what the prompt and the reader of calls go by, also where nothing is held to the schema."""
    types = schema.get("type") or "object" if isinstance(schema, Mapping) else ()
    if types != "object" and not (isinstance(types, list) and "object" in types):
        raise RequestError(f"{where} must be a JSON schema of an object", where)
    if not isinstance(schema.get("properties", {}), Mapping):
        raise RequestError(f"{where}.properties must be an object", where)
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise RequestError(f"{where}.required must be a list of names", where)


def _chosen(choice: Any, functions: Mapping[str, Any]) -> tuple[tuple[str, ...], bool]:
    """Return the functions that may be called, and whether one must be."""
    every = tuple(functions)
    if choice is None or isinstance(choice, str):
        if choice not in (None, "none", "auto", "required"):
            raise RequestError("tool_choice must be none, auto, required or an object", "tool_choice")
        return () if choice == "none" else every, choice == "required"
    if not isinstance(choice, Mapping) or choice.get("type") not in ("function", "allowed_tools"):
        raise RequestError("tool_choice.type must be function or allowed_tools", "tool_choice.type")
    if choice["type"] == "function":
        return (_known(choice, functions, "tool_choice"),), True
    allowed = choice.get("allowed_tools", choice)
    listed = allowed.get("tools") if isinstance(allowed, Mapping) else None
    where = "tool_choice.allowed_tools"
    if not isinstance(listed, list) or not listed:
        raise RequestError(f"{where}.tools must be a list of functions", f"{where}.tools")
    if allowed.get("mode", "auto") not in ("auto", "required"):
        raise RequestError(f"{where}.mode must be auto or required", f"{where}.mode")
    names = {_known(one, functions, f"{where}.tools[{i}]") for i, one in enumerate(listed)}
    return tuple(name for name in every if name in names), allowed.get("mode") == "required"


def _known(choice: Any, functions: Mapping[str, Any], where: str) -> str:
    if isinstance(choice, Mapping) and choice.get("type", "function") not in ("function", "custom"):
        raise RequestError(f"{where}.type must be function", f"{where}.type")
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or name not in functions:
        raise RequestError(f"{where}.function.name must be one of the tools: {', '.join(functions)}"[:300], where)
    return name


def call_form(
    use: ToolUse, reply: ReplyFormat, begun: str, form: StructuredOutputs | None = None
) -> StructuredOutputs | None:
    """Return the form of output that a request with these tools asks for; None where calls may be as they come.

    `begun` is what the prompt has of the reply. `form` is what the request asks of text that is no call. Raises
    RequestError where the model's way to write calls has no such form.
    """
    held, answer = use.must or use.strict, None if form is None else _answer(form)
    if held and form is not None and answer is None:
        text = f"{form.where} and {_source(use)} both ask for a form of output: leave one out"
        raise RequestError(text, form.where)
    if not held and (answer is None or not use.tools or reply.tools.form is None):
        return None
    functions = [_to_call(use, name) for name in use.schemas]
    grammar = CallGrammar(reply.tools, functions, reply.added, _source(use, form))
    if use.must:  # then there is no text
        text = grammar.calls(use.parallel)
    else:
        text = grammar.free(use.parallel) if answer is None else grammar.calls_or(answer, use.parallel)
    plain = use.must or bool(reply.tools.form and reply.tools.form.plain)
    thinking, rest = reply.thinking(begun, calls=plain)
    fields = tuple(function.field for function in functions)
    if answer is not None and form is not None:
        fields += (form.where,)
    source = "tools" if use.must else _source(use, form)
    if not thinking and (use.must or answer is not None):  # text may stand before the calls, and not in their grammar
        rest = reply.begun_call(rest) or ("" if use.must else _begun_json(rest))
    return StructuredOutputs(
        grammar=text, thinking=thinking, marks=reply.marks, parts=fields, source=source, begun=rest
    )  # fmt: skip


def _to_call(use: ToolUse, name: str) -> Function:
    schema, field, exact = use.schemas[name], use.fields[name], use.must or name in use.strict
    return Function(name, _plain(schema, field, name) if exact else schema, exact, field)


def _plain(schema: Any, field: str, name: str = "") -> dict[str, Any]:
    try:
        return plain_schema(schema)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{field} cannot be honoured: {f'{name}: ' * bool(name)}{error}"[:400], field) from error


def _answer(form: StructuredOutputs) -> Mapping[str, Any] | None:
    """Return the schema of a form that is JSON without settings, which may be one of two things that a reply is."""
    settings = form.whitespace_pattern, form.disable_any_whitespace, form.disable_additional_properties
    if form.kind not in ("json", "json_object") or any(settings):
        return None
    try:
        schema = json.loads(form.text)
    except (ValueError, RecursionError):
        return None
    return _plain(schema, form.where) if isinstance(schema, Mapping) else None


def _begun_json(text: str) -> str:
    found = re.search(r"[{\[]", text)
    return text[found.start() :] if found else ""


def _source(use: ToolUse, form: StructuredOutputs | None = None) -> str:
    """Return the fields that a fault of the grammar is in."""
    if use.must or form is None:
        return "tool_choice" if use.must else "tools"
    return f"tools and {form.where}" if use.strict else form.where


def formed(params: SamplingParams, use: ToolUse, replies: ReplyForms, begun: str = "") -> SamplingParams:
    """Return the parameters with the form that calls must have, and what a parser of the reply needs.

    `begun` is what the prompt has of the reply: thinking, a call or a form that it leaves open continues. A form begins
    after the model's thinking. Where calls are required there is no other text, so JSON that is asked for as well binds
    none; where they are free, the reply is calls or the JSON. Raises RequestError where the model has no form of calls,
    or two other forms are asked for.
    """
    if (use.must or use.strict) and replies.tools is None:
        raise RequestError(
            "tools: this model's chat template has no known form of calls, so none can be required or strict: name the "
            "form with --tool-call-parser NAME (tool_call_parser in Python)", "tools")  # fmt: skip
    if begun and params.truncation_side == "right" and params.truncate_prompt_tokens is not None:
        name = "truncation_side"
        raise RequestError(f"{name} right would cut off what the prompt begins of the answer: cut on the left", name)
    reply, form = replies.format(tools=bool(use.tools)) or _TEXT_ALONE, params.structured_outputs
    calls = call_form(use, reply, begun, form)
    if calls is None and form is not None:
        # The caller's own thinking stands where the model has none that is known.
        own = form.thinking if reply is _TEXT_ALONE else None
        thinking, rest = (own, "") if own else reply.thinking(begun)
        if form.kind.startswith("json") and thinking is None:  # other text may stand before it
            rest = _begun_json(rest)
        calls = replace(form, thinking=thinking, marks=reply.marks, begun=rest)
    if bounds_nothing(params):
        params = params.replace(thinking_token_budget=None)
    if params.thinking_token_budget is not None:
        calls = _within_budget(calls, params.thinking_token_budget, reply, replies, begun)
        kept = calls is not None and calls.thinking is not None
        params = params.replace(thinking_token_budget=params.thinking_token_budget if kept else None)
    if any(reply.added[mark] in replies.special_ids for mark in reply.marks):  # it must be seen
        params = params.replace(skip_special_tokens=False)
    return params.replace(structured_outputs=calls)


def bounds_nothing(params: SamplingParams) -> bool:
    """Return whether an output ends before its thinking could be longer than its budget."""
    return (params.thinking_token_budget or 0) >= (params.max_tokens or inf)


def _within_budget(
    form: StructuredOutputs | None, budget: int, reply: ReplyFormat, replies: ReplyForms, begun: str
) -> StructuredOutputs | None:
    """Return the form with a budget of the thinking before it; None where there is neither, since the prompt has ended
    it. Raises RequestError where nothing is known of the model's reasoning."""
    name, free = "thinking_token_budget", form is None
    thinking = form.thinking if form is not None else None
    if thinking is None and (replies.reasoning is None or replies.reasoning.thinking is None):
        text = "this model's chat template has no known reasoning: name its form with --reasoning-parser NAME"
        raise RequestError(f"{name}: {text} (reasoning_parser in Python)", name)
    if form is None:
        thinking, rest = reply.thinking(begun)
        form = StructuredOutputs(regex="(?s:.*)", marks=reply.marks, source=name, begun=rest if thinking else "")
    if thinking is None:
        return None if free else form
    ids = tuple(replies.encode(thinking.end, False))
    return replace(form, thinking=thinking._replace(budget=budget, ids=ids, free=free))
