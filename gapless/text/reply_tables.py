"""Forms of replies as data: how each family of models writes its reasoning and its tool calls.

A table is a list of moves (state, terminal, next state); gapless.text.reply_parser runs it. Adding a family adds a
record here. The forms are the families' chat templates'.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import NamedTuple

from gapless.base.structured import Thinking


class ReplyState(Enum):
    """Meaning of a reply's text until the next terminal."""

    __hash__ = object.__hash__  # an Enum's own runs in Python, and states are looked up for each token
    CONTENT = auto()
    REASONING = auto()
    BETWEEN = auto()
    """Inside a section of calls and outside each call: the text is dropped."""
    HEADER = auto()
    """The head of a message, whose words decide the state of its body."""
    CHANNEL = auto()
    """The body of a message; ReplyTable.channels has its state."""
    NAME = auto()
    ENVELOPE = auto()
    """A JSON object that holds the function's name and its arguments."""
    ARGUMENTS = auto()
    """A JSON object of arguments."""
    PARAMETERS = auto()
    """Inside a call, between two parameters: the text is dropped."""
    KEY = auto()
    VALUE = auto()
    """Plain text, typed by the function's schema."""
    STRING_VALUE = auto()
    JSON_VALUE = auto()
    PYTHON_VALUE = auto()


class Move(NamedTuple):
    """The text `terminal` leads from `state` to the state `to`."""

    state: ReplyState
    terminal: str
    to: ReplyState
    kept: bool = False
    """The terminal is also the first text of the next state."""
    first: bool = False
    """Written as plain text it counts only before any content."""


class ParameterForm(NamedTuple):
    """How one parameter of a call is written. `{key}` stands for its name."""

    before: str
    after: str
    between: str = ""
    before_string: str = ""
    """Text before a string instead, when that differs."""
    python: bool = False
    """Values are Python literals; otherwise strings are written as they are, and other values as JSON."""


class CallForm(NamedTuple):
    """How calls are written, for a grammar that makes a model call a function.

    `{name}` stands for the function, `{index}` for the number of calls before this one. A reply with two
    calls is `opening`, call, `between`, call, `closing`; a call is `before`, arguments, `after`.
    """

    trigger: str
    """First text of calls in a reply."""
    before: str
    after: str
    opening: str = ""
    between: str = ""
    closing: str = ""
    parameter: ParameterForm | None = None
    """None: the arguments are a JSON object."""
    plain: str = ""
    """First text of a reply without calls."""


class ReplyTable(NamedTuple):
    """How a family of models writes its tool calls, or its reasoning."""

    name: str
    moves: tuple[Move, ...] = ()
    marks: tuple[str, ...] = ()
    """Texts that all occur in a chat template of this family."""
    form: CallForm | None = None
    start: ReplyState = ReplyState.CONTENT
    after: ReplyState = ReplyState.BETWEEN
    """State after JSON that is complete."""
    sure: bool = True
    """Calls begin with a terminal that no other text has; otherwise text unlike a call is content."""
    name_pattern: str = "(?P<name>.*)"
    """Regular expression for the text at the name; a group `id` is the call's id."""
    trims: bool = False
    """A value begins and ends with a line break that is not part of it."""
    channels: tuple[tuple[str, ReplyState], ...] = ()
    """State of a message's body by a text in its head, first match first; content when none matches."""
    opening: str = ""
    """The prompt may begin the reply with this text, and then that begins with reasoning."""
    thinking: Thinking | None = None
    """How reasoning is written, for a grammar that begins after it."""


_S = ReplyState
_C, _R, _B, _H = _S.CONTENT, _S.REASONING, _S.BETWEEN, _S.HEADER
_NAME, _E, _A, _P, _K, _V = _S.NAME, _S.ENVELOPE, _S.ARGUMENTS, _S.PARAMETERS, _S.KEY, _S.VALUE


def _moves(*rows: tuple[ReplyState, str, ReplyState]) -> tuple[Move, ...]:
    return tuple(Move(*row) for row in rows)


_HERMES = ReplyTable(
    "hermes",
    _moves((_C, "<tool_call>", _E), (_E, "</tool_call>", _C), (_C, "</tool_call>", _C)),
    marks=("<tool_call>", "</tool_call>", "arguments"),
    form=CallForm(
        "<tool_call>", '<tool_call>\n{"name": "{name}", "arguments": ', "}\n</tool_call>", between="\n"
    ),
    after=_C,
)  # fmt: skip
_QWEN3_CODER = ReplyTable(
    "qwen3_coder",
    _moves(
        (_C, "<tool_call>", _B), (_C, "<function=", _NAME), (_C, "</tool_call>", _C),
        (_B, "<function=", _NAME), (_B, "</tool_call>", _C),
        (_NAME, ">", _P), (_NAME, "</function>", _C),
        (_P, "<parameter=", _K), (_P, "</function>", _C), (_P, "</tool_call>", _C),
        (_K, ">", _V),
        (_V, "</parameter>", _P), (_V, "<parameter=", _K), (_V, "</function>", _C), (_V, "</tool_call>", _C),
    ),
    marks=("<function=", "<parameter="),
    form=CallForm(
        "<tool_call>", "<tool_call>\n<function={name}>\n", "</function>\n</tool_call>", between="\n",
        parameter=ParameterForm("<parameter={key}>\n", "\n</parameter>\n"),
    ),
    trims=True,
)  # fmt: skip
_LLAMA3_JSON = ReplyTable(
    "llama3_json",
    (Move(_C, "{", _E, kept=True), Move(_C, "<|python_tag|>", _B), Move(_B, "{", _E, kept=True)),
    marks=('{"name": function name, "parameters":',),
    form=CallForm('{"name": ', '{"name": "{name}", "parameters": ', "}", between="; "),
    sure=False,
)
_PYTHONIC = ReplyTable(
    "pythonic",
    (
        Move(_C, "[", _NAME, first=True),
        *_moves(
            (_C, "<|python_start|>", _B), (_C, "<|python_end|>", _C),
            (_B, "[", _NAME), (_B, ",", _NAME), (_B, "]", _C),
            (_NAME, "(", _K),
            (_K, "=", _S.PYTHON_VALUE), (_K, ",", _K), (_K, ")", _B),
        ),
    ),
    marks=("[func_name1(",),
    form=CallForm(
        "[", "{name}(", ")", opening="[", between=", ", closing="]",
        parameter=ParameterForm("{key}=", "", between=", ", python=True),
    ),
    sure=False,
)  # fmt: skip
_MISTRAL_V3 = ReplyTable(
    "mistral_v3",
    (*_moves((_C, "[TOOL_CALLS]", _B), (_B, "]", _C)), Move(_B, "{", _E, kept=True)),
    marks=("[TOOL_CALLS]",),
    form=CallForm(
        "[TOOL_CALLS]", '{"name": "{name}", "arguments": ', "}", opening="[TOOL_CALLS] [", between=", ", closing="]"
    ),
)
_MISTRAL = ReplyTable(
    "mistral",
    (
        *_moves(
            (_C, "[TOOL_CALLS]", _NAME), (_NAME, "[CALL_ID]", _NAME), (_NAME, "[ARGS]", _A), (_A, "[TOOL_CALLS]", _NAME)
        ),
        Move(_NAME, "{", _A, kept=True),
    ),
    marks=("[TOOL_CALLS]", "[ARGS]"),
    form=CallForm("[TOOL_CALLS]", "[TOOL_CALLS]{name}[ARGS]", ""),
    after=_C,
    name_pattern=r"(?P<name>\S*)(\s+(?P<id>\S*))?",
)  # fmt: skip
_CALLS, _CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_DEEPSEEK_ENDS = _moves(
    (_A, _CALL_END, _B), (_A, _CALLS_END, _C), (_B, _CALL_END, _B), (_B, _CALLS_END, _C), (_C, _CALLS, _B)
)
_DEEPSEEK_V3 = ReplyTable(
    "deepseek_v3",
    (
        *_DEEPSEEK_ENDS,
        *_moves((_C, _CALL, _B), (_B, _CALL, _B), (_B, _SEP, _NAME), (_NAME, "```json", _A)),
        Move(_NAME, "{", _A, kept=True),
    ),
    marks=(_CALL, _SEP, "```json"),
    form=CallForm(
        _CALLS, f"{_CALL}function{_SEP}{{name}}\n```json\n", f"\n```{_CALL_END}",
        opening=_CALLS, between="\n", closing=_CALLS_END,
    ),
)  # fmt: skip
_DEEPSEEK_V31 = ReplyTable(
    "deepseek_v31",
    (*_DEEPSEEK_ENDS, *_moves((_C, _CALL, _NAME), (_B, _CALL, _NAME), (_NAME, _SEP, _A))),
    marks=(_CALL, _SEP),
    form=CallForm(_CALLS, f"{_CALL}{{name}}{_SEP}", _CALL_END, opening=_CALLS, closing=_CALLS_END),
)


def _dsml(name: str, section: str) -> ReplyTable:
    begin, end, invoke_end, parameter_end = (
        f"<{tag}>" for tag in (f"｜DSML｜{section}", f"/｜DSML｜{section}", "/｜DSML｜invoke", "/｜DSML｜parameter")
    )
    invoke, parameter = '<｜DSML｜invoke name="', '<｜DSML｜parameter name="'
    values = (_S.STRING_VALUE, _S.JSON_VALUE)
    return ReplyTable(
        name,
        _moves(
            (_C, begin, _B), (_B, invoke, _NAME), (_B, end, _C), (_NAME, '">', _P),
            (_P, parameter, _K), (_P, invoke_end, _B), (_P, end, _C),
            (_K, '" string="true">', values[0]), (_K, '" string="false">', values[1]),
            *((value, parameter_end, _P) for value in values), *((value, invoke_end, _B) for value in values),
        ),
        marks=("｜DSML｜", section),
        form=CallForm(
            begin, f'{invoke}{{name}}">\n', invoke_end, opening=f"{begin}\n", between="\n", closing=f"\n{end}",
            parameter=ParameterForm(
                f'{parameter}{{key}}" string="false">', f"{parameter_end}\n",
                before_string=f'{parameter}{{key}}" string="true">',
            ),
        ),
    )  # fmt: skip


_GLM45 = ReplyTable(
    "glm45",
    _moves(
        (_C, "<tool_call>", _NAME), (_NAME, "<arg_key>", _K), (_NAME, "</tool_call>", _C),
        (_K, "</arg_key>", _P), (_P, "<arg_value>", _V), (_V, "</arg_value>", _P), (_P, "<arg_key>", _K),
        (_P, "</tool_call>", _C), (_V, "</tool_call>", _C),
    ),
    marks=("<arg_key>", "<arg_value>"),
    form=CallForm(
        "<tool_call>", "<tool_call>{name}\n", "</tool_call>", between="\n",
        parameter=ParameterForm("<arg_key>{key}</arg_key>\n<arg_value>", "</arg_value>\n"),
    ),
)  # fmt: skip
_SECTION, _SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
_KIMI_K2 = ReplyTable(
    "kimi_k2",
    _moves(
        (_C, _SECTION, _B), (_C, "<|tool_call_begin|>", _NAME), (_B, "<|tool_call_begin|>", _NAME),
        (_NAME, "<|tool_call_argument_begin|>", _A), (_A, "<|tool_call_end|>", _B), (_A, _SECTION_END, _C),
        (_B, "<|tool_call_end|>", _B), (_B, _SECTION_END, _C),
    ),
    marks=(_SECTION,),
    form=CallForm(
        _SECTION, "<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>", "<|tool_call_end|>",
        opening=_SECTION, closing=_SECTION_END,
    ),
    name_pattern=r"(?P<id>(?:functions\.)?(?P<name>.*?)(?::\d+)?)",
)  # fmt: skip
_MINIMAX_M2 = ReplyTable(
    "minimax_m2",
    _moves(
        (_C, "<minimax:tool_call>", _B), (_B, '<invoke name="', _NAME), (_B, "</minimax:tool_call>", _C),
        (_NAME, '">', _P), (_P, '<parameter name="', _K), (_K, '">', _V), (_V, "</parameter>", _P),
        (_V, "</invoke>", _B), (_P, "</invoke>", _B), (_P, "</minimax:tool_call>", _C),
    ),
    marks=("<minimax:tool_call>",),
    form=CallForm(
        "<minimax:tool_call>", '<invoke name="{name}">\n', "</invoke>\n",
        opening="<minimax:tool_call>\n", closing="</minimax:tool_call>",
        parameter=ParameterForm('<parameter name="{key}">', "</parameter>\n"),
    ),
)  # fmt: skip
_MINIMAX_M1 = ReplyTable(
    "minimax_m1",
    (
        *_moves((_C, "<tool_calls>", _B), (_B, "</tool_calls>", _C), (_E, "</tool_calls>", _C)),
        Move(_B, "{", _E, kept=True),
    ),
    marks=("<tool_calls>", "arguments"),
    form=CallForm(
        "<tool_calls>", '{"name": "{name}", "arguments": ', "}\n", opening="<tool_calls>\n", closing="</tool_calls>"
    ),
)
_HARMONY_MOVES = (
    *_moves(*((_H, mark, _H) for mark in ("<|channel|>", "<|constrain|>", "<|start|>", "<|end|>", "<|call|>"))),
    Move(_H, "<|message|>", _S.CHANNEL),
    *_moves(
        *(
            (state, mark, _H)
            for state in (_C, _R, _A)
            for mark in ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")
        )
    ),
)
HARMONY_MESSAGE = "<|start|>"
HARMONY_REPLY = f"{HARMONY_MESSAGE}assistant"
"""The head of a reply's messages, up to what the grammar of one begins with"""
_HARMONY_ANSWER = "<|channel|>final<|message|>"
_HARMONY_CALL = "<|channel|>commentary to=functions."
_HARMONY = ReplyTable(
    "harmony",
    _HARMONY_MOVES,
    marks=("<|channel|>", "<|message|>", "to=functions."),
    form=CallForm(
        _HARMONY_CALL,
        f"{_HARMONY_CALL}{{name}} <|constrain|>json<|message|>",
        "<|call|>",
        between=HARMONY_REPLY,
        plain=_HARMONY_ANSWER,
    ),
    start=_H,
    after=_H,
    channels=(("to=functions.", _A),),
)


def think_table(name: str, begin: str, end: str) -> ReplyTable:
    """Return the table of reasoning between these two texts."""
    return ReplyTable(
        name,
        (Move(_C, begin, _R, first=True), *_moves((_R, begin, _R), (_R, end, _C), (_C, end, _C))),
        marks=(end,),
        opening=begin.strip(),
        thinking=Thinking(begin.strip(), end.strip()),
    )


_TOOLS = (
    _HARMONY, _dsml("deepseek_v32", "function_calls"), _dsml("deepseek_v4", "tool_calls"), _DEEPSEEK_V3, _DEEPSEEK_V31,
    _KIMI_K2, _MINIMAX_M2, _GLM45, _QWEN3_CODER, _MISTRAL, _MISTRAL_V3, _MINIMAX_M1, _HERMES, _PYTHONIC, _LLAMA3_JSON,
)  # fmt: skip
_REASONING = (
    ReplyTable(
        "harmony", _HARMONY_MOVES, ("<|channel|>", "analysis"), start=_H,
        channels=(("analysis", _R), ("to=", _R)),
        thinking=Thinking("<|channel|>analysis<|message|>", "<|end|>", HARMONY_REPLY, _HARMONY_ANSWER),
    ),
    think_table("think", "<think>", "</think>"),
    think_table("mistral", "[THINK]", "[/THINK]"),
)  # fmt: skip
TOOL_TABLES: Mapping[str, ReplyTable] = {table.name: table for table in _TOOLS}
"""Forms of tool calls by name, in the order of trials."""
REASONING_TABLES: Mapping[str, ReplyTable] = {table.name: table for table in _REASONING}

_THINK = "deepseek_r1 deepseek_v3 glm45 holo2 kimi_k2 minimax_m2 nemotron_v3 olmo3 qwen3 qwen3_thinking step3"
TOOL_NAMES = {
    "openai": "harmony",
    "gpt_oss": "harmony",
    "qwen": "hermes",
    "qwen25": "hermes",
    "qwen3_xml": "qwen3_coder",
    "llama3": "llama3_json",
    "llama4_json": "llama3_json",
    "llama4_pythonic": "pythonic",
    "deepseekv3": "deepseek_v3",
    "deepseekv31": "deepseek_v31",
    "deepseekv32": "deepseek_v32",
    "deepseekv4": "deepseek_v4",
    "glm": "glm45",
    "glm47": "glm45",
    "minimax": "minimax_m1",
}
"""Forms of tool calls as vLLM and SGLang name them, with _ for -"""
REASONING_NAMES = {"openai_gptoss": "harmony", "gpt_oss": "harmony", **dict.fromkeys(_THINK.split(), "think")}


def choose_tables(template: str) -> tuple[ReplyTable | None, ReplyTable | None]:
    """Return the tables of tool calls and of reasoning whose marks all occur in the text of a chat template."""
    tools, reasoning = (
        next((table for table in tables if all(mark in template for mark in table.marks)), None)
        for tables in (_TOOLS, _REASONING)
    )
    return tools, reasoning
