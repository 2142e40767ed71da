"""Calls drawn from the masks of their grammar parse back into calls that are valid by their schemas, for every form."""

import json
import random
from functools import cache

import jsonschema
import numpy as np
import pytest
from sharpest import sharpest
from tokenizers import AddedToken
from vocabularies import SPECIAL, byte_level
from walks import Speaker

from gapless.base.errors import RequestError
from gapless.base.params import SamplingParams
from gapless.base.structured import StructuredOutputs
from gapless.text.replies import ReplyForms, ReplyReader
from gapless.text.reply_parser import CallArguments, CallBegun, Content, Reasoning
from gapless.text.reply_tables import REASONING_TABLES, TOOL_TABLES
from gapless.text.tokenizer import Tokenizer
from gapless.text.tools import MAX_TOOLS, check_tools, formed

SHARPEST = ("hermes", "qwen3_coder", "pythonic", "harmony")
"""Forms of calls that differ most: JSON in marks, a tag a parameter, Python, and messages"""
NAMES = sharpest([*SHARPEST, *(name for name in TOOL_TABLES if name not in SHARPEST)], keep=len(SHARPEST))
TEXT = {"type": "string", "maxLength": 12}
FUNCTIONS = {
    "look_up": {
        "type": "object",
        "properties": {
            "city": TEXT,
            "unit": {"$ref": "#/$defs/unit"},
            "days": {"type": "integer", "minimum": 0, "maximum": 99},
            "exact": {"type": "boolean"},
            "tags": {"type": "array", "items": TEXT, "maxItems": 2},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
        "$defs": {"unit": {"type": "string", "enum": ["C", "F", "a </b>"]}},
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}
MARKS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "glm45": ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
    "deepseek_v32": ("｜DSML｜",),
    "pythonic": ("<|python_start|>", "<|python_end|>"),
    "harmony": ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>"),
}
"""Texts that models of a form have as tokens; for others, those that begin with a bracket and end with one"""
TOOLS = [{"type": "function", "function": {"name": n, "parameters": s, "strict": True}} for n, s in FUNCTIONS.items()]


@cache
def speaker(marks: tuple[str, ...], special: bool = False) -> Speaker:
    """A vocabulary of bytes and these tokens."""
    backend = byte_level().backend
    backend.add_tokens([AddedToken(mark, special=special, normalized=False) for mark in marks])
    return Speaker(Tokenizer(backend, special=SPECIAL), padding=0)


def marks_of(name: str) -> tuple[str, ...]:
    moves = TOOL_TABLES[name].moves
    texts = sorted({move.terminal for move in moves})
    return MARKS.get(name, tuple(text for text in texts if len(text) > 1 and text[0] in "<[" and text[-1] in ">]"))


class Drawn:
    """A reply that was drawn from masks, as tokens, and what the parser makes of it."""

    def __init__(self, speaker: Speaker, forms: ReplyForms, seed: int, prompt: str = "", **choice) -> None:
        tools = choice.get("tools", TOOLS)
        use = check_tools(tools, choice.get("choice", "required"), choice.get("parallel"))
        params = formed(SamplingParams(structured_outputs=choice.get("form")), use, forms, prompt)
        rng, matcher = random.Random(seed), speaker.matcher(params.structured_outputs)
        end, self.tokens = speaker.eos, []
        tables = [table for table in (forms.tools, forms.reasoning) if table]
        self._marks = [move.terminal for table in tables for move in table.moves]
        form = forms.tools.form
        begins = {name: form.before.replace("{name}", name).replace("{index}", "0") for name in FUNCTIONS}
        self._marks += [form.opening + begin for begin in begins.values()]
        self._marks += [form.after + form.closing, form.after + form.between + begins["now"]] * 5
        self._marks += [form.parameter.after] * 5 if form.parameter else []
        self._spelled = []
        while len(self.tokens) < 6_000:
            allowed = speaker.allowed(matcher)
            assert len(allowed), speaker.tokenizer.decode(self.tokens, False)
            token = self._choose(speaker, allowed, rng)
            matcher.advance([token])
            if token == end:
                break
            self.tokens.append(token)
        self.text = b"".join(speaker.bytes[token] for token in self.tokens).decode()
        assert token == end, f"no end of {self.text[-200:]!r}"
        reader = ReplyReader(forms.format(tools=True), use.schemas, prompt)
        events, shown = [], 0
        for i, token in enumerate(self.tokens):
            text = b"".join(speaker.bytes[t] for t in self.tokens[: i + 1]).decode(errors="ignore")
            events += reader.feed([token], text[shown:])
            shown = len(text)
        events += reader.finish()
        self.reasoning = "".join(event.text for event in events if isinstance(event, Reasoning))
        self.content = "".join(event.text for event in events if isinstance(event, Content))
        self.names = [event.name for event in events if isinstance(event, CallBegun)]
        pieces = [event for event in events if isinstance(event, CallArguments)]
        self.arguments = ["".join(e.text for e in pieces if e.index == i) for i in range(len(self.names))]

    def _choose(self, speaker: Speaker, allowed: np.ndarray, rng: random.Random) -> int:
        """Mostly plain text; now and then a mark, as a token or spelled, or the end."""
        while self._spelled:
            token = self._spelled.pop(0)
            if token in allowed:
                return token
            self._spelled.clear()
        if len(self.tokens) > 10 and speaker.eos in allowed and rng.random() < 0.3:
            return speaker.eos
        if rng.random() < 0.3:
            self._spelled = speaker.tokenizer.encode(rng.choice([*self._marks, '"', "}", "]"]), False)
            return self._choose(speaker, allowed, rng)
        plain = [token for token in allowed if speaker.bytes[token].isascii()]
        return int(rng.choice(plain if len(allowed) > 3 else allowed))

    def check(self, must: bool) -> None:
        """Every call is whole and valid, and nothing of a call is left in the text."""
        assert self.names or not must, self.text
        for name, arguments in zip(self.names, self.arguments, strict=True):
            assert name in FUNCTIONS, self.text
            jsonschema.validate(json.loads(arguments), FUNCTIONS[name])


def forms_of(speaker: Speaker, name: str, reasoning: str = "none") -> ReplyForms:
    return ReplyForms(speaker.tokenizer, name, reasoning)


@pytest.mark.parametrize("tokens", sharpest(["marks are tokens", "marks are special", "marks are text"]))
@pytest.mark.parametrize("name", NAMES)
def test_calls_drawn_from_masks_are_calls_of_their_schemas(name, tokens):
    voice = speaker(() if "text" in tokens else marks_of(name), "special" in tokens)
    forms = forms_of(voice, name)
    for seed in range(12):
        drawn = Drawn(voice, forms, seed, parallel=seed % 4 > 0)
        drawn.check(must=True)
        assert not drawn.content, drawn.text
        assert seed % 4 or len(drawn.names) == 1
    assert any(len(Drawn(voice, forms, seed).names) > 1 for seed in range(1, 100)), "there may be several calls"


@pytest.mark.parametrize("tokens", sharpest(["marks are text", "marks are tokens"]))
@pytest.mark.parametrize("name", NAMES)
def test_strict_calls_between_free_text_are_calls_of_their_schemas(name, tokens):
    voice = speaker(() if "text" in tokens else marks_of(name))
    forms = forms_of(voice, name)
    for seed in range(12):
        drawn = Drawn(voice, forms, seed, choice="auto", parallel=seed % 4 > 0)
        drawn.check(must=False)
        assert seed % 4 or len(drawn.names) <= 1, "one call at most where calls may not be parallel"


ANSWER = {
    "type": "object",
    "properties": {"sum": {"type": "integer"}},
    "required": ["sum"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("tokens", sharpest(["marks are text", "marks are tokens"]))
@pytest.mark.parametrize("name", NAMES)
def test_a_reply_of_a_form_beside_free_calls_is_calls_or_has_the_form(name, tokens):
    voice = speaker(() if "text" in tokens else marks_of(name))
    forms, kinds = forms_of(voice, name), set()
    for seed in range(12):
        drawn = Drawn(voice, forms, seed, choice="auto", form=StructuredOutputs(json=ANSWER))
        drawn.check(must=not drawn.content)
        if drawn.content:
            jsonschema.validate(json.loads(drawn.content), ANSWER)
        kinds.add((bool(drawn.names), bool(drawn.content)))
    assert kinds == {(True, False), (False, True)}


@pytest.mark.parametrize(
    ("name", "function", "what"),
    [
        ("qwen3_coder", {"properties": {"a": {"type": "string", "pattern": "x"}}}, "the keyword 'pattern' of"),
        ("qwen3_coder", {"properties": {"a": {}}}, "the type of 'a'"),
        ("glm45", {"properties": {"a": {"type": ["string", "integer"]}}}, "the type of 'a'"),
        ("glm45", {"properties": {"a": {"enum": ["x</arg_value>"]}}}, "the value 'x</arg_value>' of 'a'"),
        ("minimax_m2", {"properties": {'a">': {"type": "integer"}}}, "the parameter name"),
        ("pythonic", {"anyOf": [{"required": ["a"]}], "properties": {"a": {"type": "integer"}}}, "the keyword 'anyOf'"),
        ("deepseek_v32", {"required": ["b"]}, "the required 'b'"),
        *(("qwen3_coder", {"properties": {"a": schema, "b": {"type": "integer"}}}, said) for schema, said in (
            ({"anyOf": [{"const": "a"}, {"type": "string", "pattern": "x"}]}, "the keyword 'anyOf'"),
            ({"enum": ["a", "b"], "pattern": "x", "type": "string"}, "the keyword"),
            ({"enum": ["a", "b"], "type": "string", "minLength": 4}, "the value"),
            ({"enum": [1, "</parameter>"]}, "the value"),
            ({"type": "array", "items": {"$ref": "#/properties/b"}}, "a reference to another place"),
            ({"type": "object", "properties": {"n": {"$ref": "#"}}}, "a reference to another place"),
        )),
    ],
)  # fmt: skip
def test_parameters_that_a_form_of_calls_cannot_say_are_refused_by_name(name, function, what):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", **function}}}
    with pytest.raises(RequestError, match=r"tools\[1\]\.function\.parameters: f: ") as found:
        formed(SamplingParams(), check_tools([TOOLS[1], tool], "required", None), forms_of(speaker(()), name), "")
    assert what in str(found.value) and found.value.param == "tools[1].function.parameters"


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_as_many_functions_as_a_request_may_have_can_be_required(name):
    properties = {f"p{i}": {"type": "string" if i % 2 else "integer"} for i in range(5)}
    parameters = {"type": "object", "properties": properties, "required": ["p0"]}
    tools = [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": parameters}} for i in range(MAX_TOOLS)
    ]
    assert len(Drawn(speaker(()), forms_of(speaker(()), name), 1, tools=tools, parallel=False).names) == 1


THINKING = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]"), "harmony": MARKS["harmony"]}
TABLE = {"think": "qwen3_coder", "mistral": "mistral", "harmony": "harmony"}


@pytest.mark.parametrize(
    ("reasoning", "tokens"),
    sharpest([("harmony", True), ("think", False), ("think", True), ("mistral", True), ("mistral", False)], keep=2),
)
def test_thinking_before_calls_is_free_and_the_calls_are_not(reasoning, tokens):
    marks = tuple(sorted({*THINKING[reasoning], *marks_of(TABLE[reasoning])}))
    voice = speaker(marks if tokens else ())
    forms = forms_of(voice, TABLE[reasoning], reasoning)
    opening = REASONING_TABLES[reasoning].opening
    drawn = [Drawn(voice, forms, seed, f"{opening}\n" * (seed % 2)) for seed in range(20)]
    for one in drawn:
        one.check(must=True)
    assert any(one.reasoning for one in drawn[1::2]) or not opening, "thinking that the prompt began has to end"
    if tokens:
        assert any(one.reasoning for one in drawn[::2]) and not all(one.reasoning for one in drawn[::2])
