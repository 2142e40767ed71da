"""Golden replies of every family, and what a reply's events add up to."""

import json
import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from gapless.text.reply_parser import (
    CallArguments,
    CallBegun,
    Content,
    Reasoning,
    ReplyEvent,
    ReplyFormat,
    ReplyParser,
)
from gapless.text.reply_tables import REASONING_TABLES, TOOL_TABLES


class Call(NamedTuple):
    name: str
    arguments: str
    call_id: str | None = None


class Reply(NamedTuple):
    """What a client sees in the end."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


class Golden(NamedTuple):
    """A reply as a model writes it, and what it means."""

    tools: str | None
    reasoning: str | None
    text: str
    means: Reply
    prompt: str = ""


def added_up(events: Iterable[ReplyEvent]) -> Reply:
    """Join fragments; every call is begun once, in order, and its arguments come before the next begins."""
    content, reasoning, calls = "", "", []
    for event in events:
        match event:
            case Content(text):
                content += text
            case Reasoning(text):
                reasoning += text
            case CallBegun(index, name, call_id):
                assert index == len(calls)
                calls.append(Call(name, "", call_id))
            case CallArguments(index, text):
                assert index == len(calls) - 1 and text
                calls[-1] = calls[-1]._replace(arguments=calls[-1].arguments + text)
    return Reply(content, reasoning, tuple(calls))


def feed(parser: ReplyParser, parts: Sequence[str]) -> list[ReplyEvent]:
    events = [event for part in parts for event in parser.push(part)]
    return [*events, *parser.finish()]


def random_parts(text: str, rng: random.Random) -> list[str]:
    cuts = sorted(rng.randint(0, len(text)) for _ in range(rng.randint(1, 8)))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def form_of(golden: Golden, added: dict[str, int] | None = None) -> ReplyFormat:
    tools = None if golden.tools is None else TOOL_TABLES[golden.tools]
    reasoning = None if golden.reasoning is None else REASONING_TABLES[golden.reasoning]
    return ReplyFormat(tools, reasoning, added)


FUNCTIONS: dict[str, Any] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "wind": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
            "where": {"$ref": "#/$defs/Place"},
            "note": {"type": ["string", "null"]},
        },
        "$defs": {"Place": {"type": "object", "properties": {"lat": {"type": "number"}}}},
    },
    "write": {
        "properties": {
            "text": {"type": "string"},
            "zip": {"type": "string"},
            "size": {"type": ["number", "string"]},
            "code": {"$ref": "#/$defs/Code"},
            "kind": {"enum": ["1", "2"]},
        },
        "$defs": {"Code": {"type": "string"}},
    },
    "now": {"properties": {}},
}

HARD = "He said \"{[}],\" \\ </x> <b> 'ok'\n\ttab 你好 🎉"
"""A string that looks like much else."""
NESTED = '{"city": "Köln \\"{]\\" 🎉", "where": {"lat": 1.50, "tags": ["a}", {}, []]}}'
"""Arguments whose text must come out unchanged."""
SIMPLE = '{"city": "Rome"}'


def _json(**arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


def _two(content: str = "", reasoning: str = "", ids: tuple[str | None, str | None] = (None, None)) -> Reply:
    return Reply(content, reasoning, (Call("get_weather", NESTED, ids[0]), Call("now", "{}", ids[1])))


_TYPED = _json(city=HARD, days=3, wind=True, where={"lat": 1.5}, note="12")
"""Arguments of each type of the schema; the text of `note` would be a number without it."""
_TYPED_CALLS = (Call("get_weather", _TYPED.replace('"12"', '"No, 12"')), Call("now", "{}"))
_ROWS = (("city", HARD), ("days", "3"), ("wind", "true"), ("where", '{"lat": 1.5}'), ("note", "No, 12"))


def _rows(before: str, after: str) -> str:
    return "".join(before.replace("KEY", key) + value + after for key, value in _ROWS)


def _dsml(section: str) -> str:
    rows = "".join(
        f'<｜DSML｜parameter name="{key}" string="{"true" if key in ("city", "note") else "false"}">{value}'
        "</｜DSML｜parameter>\n"
        for key, value in _ROWS
    )
    return (
        f"Let me look.\n\n<｜DSML｜{section}>\n"
        f'<｜DSML｜invoke name="get_weather">\n{rows}</｜DSML｜invoke>\n'
        f'<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜{section}>'
    )


_V3 = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
_V31 = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
_CALLS = "<｜tool▁calls▁begin｜>{}<｜tool▁calls▁end｜>"
_KIMI = "<|tool_call_begin|>functions.{}<|tool_call_argument_begin|>{}<|tool_call_end|>"

GOLDEN = {
    "hermes": Golden(
        "hermes",
        "think",
        "<think>\nShall I?\n</think>\n\nLet me look.\n"
        f'<tool_call>\n{{"name": "get_weather", "arguments": {NESTED}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        _two("Let me look.", "Shall I?"),
    ),
    "hermes text after a call": Golden(
        "hermes",
        None,
        f'<tool_call>{{"name": "get_weather", "arguments": {SIMPLE}}}</tool_call>\nDone.\n',
        Reply("Done.\n", "", (Call("get_weather", SIMPLE),)),
    ),
    "hermes arguments first": Golden(
        "hermes",
        None,
        'Now.\n<tool_call>\n{"arguments": {"city": "</tool_call>"}, "id": [1], "name": "get_weather"}\n</tool_call>',
        Reply("Now.", "", (Call("get_weather", '{"city": "</tool_call>"}'),)),
    ),
    "hermes arguments in a string": Golden(
        "hermes",
        None,
        '<tool_call>{"name": "get_weather", "arguments": "{\\"city\\": \\"R\\u00f6m\\"}"}</tool_call>'
        '<tool_call>{"name": "now", "arguments": null}</tool_call><tool_call>{"name": "now"}</tool_call>',
        Reply(calls=(Call("get_weather", '{"city": "Röm"}'), Call("now", "{}"), Call("now", "{}"))),
    ),
    "hermes first arguments of two": Golden(
        "hermes",
        None,
        '<tool_call>{"arguments": {"a": 1}, "parameters": {"b": 2}, "name": "now", "name": "then"}</tool_call>',
        Reply(calls=(Call("now", '{"a": 1}'),)),
    ),
    "qwen3_coder": Golden(
        "qwen3_coder",
        "think",
        "Think.\n</think>\n\nLet me look.\n\n<tool_call>\n<function=get_weather>\n"
        + _rows("<parameter=KEY>\n", "\n</parameter>\n")
        + "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        Reply("Let me look.", "Think.", _TYPED_CALLS),
        prompt="<|im_start|>assistant\n<think>\n",
    ),
    "qwen3_coder line breaks": Golden(
        "qwen3_coder",
        None,
        "<tool_call>\n<function=write>\n<parameter=text>\n\n a\n\n</parameter>\n<parameter=zip>\n007\n</parameter>\n"
        "<parameter=other>\n[1,\n 2]\n</parameter>\n<parameter=free>\nTrue\n</parameter>"
        "<parameter=size>5</parameter><parameter=code>6</parameter><parameter=kind>1</parameter></function></tool_call>",
        Reply(
            calls=(
                Call(
                    "write",
                    '{"text": "\\n a\\n", "zip": "007", "other": [1,\n 2], "free": "True", "size": 5,'
                    ' "code": "6", "kind": "1"}',
                ),
            )
        ),
    ),
    "llama3_json": Golden(
        "llama3_json",
        None,
        f'<|python_tag|>{{"name": "get_weather", "parameters": {NESTED}}}; {{"name": "now", "parameters": {{}}}}',
        _two(),
    ),
    "llama3_json bare": Golden(
        "llama3_json",
        None,
        'In C: {"a"; {"name": "Al", "age": 3} and { 1 }. '
        f'{{"type": "function", "name": "get_weather", "parameters": {SIMPLE}}}',
        Reply('In C: {"a"; {"name": "Al", "age": 3} and { 1 }.', "", (Call("get_weather", SIMPLE),)),
    ),
    "pythonic": Golden(
        "pythonic",
        None,
        f"[get_weather(city={HARD!r}, days=3, wind=True, where={{'lat': 1.5}}, note=\"No, 12\"), now()]",
        Reply(calls=_TYPED_CALLS),
    ),
    "pythonic tags": Golden(
        "pythonic",
        None,
        "<|python_start|>[write(text='\\x41\\u00e9\\'\\n', zip=None, at=(1, -2.5))]<|python_end|>",
        Reply(calls=(Call("write", '{"text": "Aé\'\\n", "zip": null, "at": [1, -2.5]}'),)),
    ),
    "pythonic not": Golden("pythonic", None, "[link](url) and [f(a=1)] ", Reply("[link](url) and [f(a=1)] ")),
    "mistral_v3": Golden(
        "mistral_v3",
        None,
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {NESTED}, "id": "abcdefgh1"}}, '
        '{"name": "now", "arguments": {}}]',
        _two(),
    ),
    "mistral": Golden(
        "mistral",
        "mistral",
        f"[THINK]Shall I?[/THINK]Let me look.[TOOL_CALLS]get_weather[ARGS]{NESTED}[TOOL_CALLS]now[ARGS]{{}}",
        _two("Let me look.", "Shall I?"),
    ),
    "mistral ids": Golden(
        "mistral",
        None,
        f"[TOOL_CALLS]get_weather[CALL_ID]abcdefgh1[ARGS]{NESTED}[TOOL_CALLS]now{{}}",
        _two(ids=("abcdefgh1", None)),
    ),
    "deepseek_v3": Golden(
        "deepseek_v3",
        "think",
        "Hm.</think>Let me look." + _CALLS.format(_V3.format("get_weather", NESTED) + "\n" + _V3.format("now", "{}")),
        _two("Let me look.", "Hm."),
        prompt="<｜Assistant｜><think>",
    ),
    "deepseek_v31": Golden(
        "deepseek_v31",
        "think",
        "Let me look." + _CALLS.format(_V31.format("get_weather", NESTED) + _V31.format("now", "{}")),
        _two("Let me look."),
        prompt="<｜Assistant｜></think>",
    ),
    "deepseek_v32": Golden("deepseek_v32", "think", _dsml("function_calls"), Reply("Let me look.", "", _TYPED_CALLS)),
    "deepseek_v4": Golden("deepseek_v4", "think", _dsml("tool_calls"), Reply("Let me look.", "", _TYPED_CALLS)),
    "glm45": Golden(
        "glm45",
        "think",
        "\n<think>Shall I?</think>\nLet me look.\n<tool_call>get_weather\n"
        + _rows("<arg_key>KEY</arg_key>\n<arg_value>", "</arg_value>\n")
        + "</tool_call>\n<tool_call>now</tool_call>",
        Reply("Let me look.", "Shall I?", _TYPED_CALLS),
    ),
    "kimi_k2": Golden(
        "kimi_k2",
        "think",
        "<think>Shall I?</think>Let me look.<|tool_calls_section_begin|>"
        + _KIMI.format("get_weather:0", NESTED)
        + _KIMI.format("now:1", "{}")
        + "<|tool_calls_section_end|>",
        _two("Let me look.", "Shall I?", ("functions.get_weather:0", "functions.now:1")),
    ),
    "minimax_m2": Golden(
        "minimax_m2",
        "think",
        'Shall I?\n</think>\n\nLet me look.\n<minimax:tool_call>\n<invoke name="get_weather">\n'
        + _rows('<parameter name="KEY">', "</parameter>\n")
        + '</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        Reply("Let me look.", "Shall I?", _TYPED_CALLS),
        prompt="]~b]ai\n<think>\n",
    ),
    "minimax_m1": Golden(
        "minimax_m1",
        None,
        f'<tool_calls>\n{{"name": "get_weather", "arguments": {NESTED}}}\n{{"name": "now", "arguments": {{}}}}\n'
        "</tool_calls>",
        _two(),
    ),
    "harmony": Golden(
        "harmony",
        "harmony",
        "<|channel|>analysis<|message|>Shall I?<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>Let me look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{NESTED}<|call|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        _two("Let me look.", "Shall I?"),
    ),
    "harmony answer": Golden(
        "harmony",
        "harmony",
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis to=python code<|message|>"
        "1 + 1<|call|><|start|>assistant<|channel|>final<|message|>It is\n2. <|return|>",
        Reply("It is\n2.", "One.\n1 + 1"),
    ),
    "no tables": Golden(None, None, " <think>a</think> {}\n\n", Reply(" <think>a</think> {}\n\n")),
    "thinking again": Golden(
        None, "think", "<think>a\n\n b</think>\n<think>c</think> d <think> e\n", Reply("d <think> e\n", "a\n\n b\nc")
    ),
}
