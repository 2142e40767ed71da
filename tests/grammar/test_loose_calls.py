"""Beside strict functions others stay as they are: any call of theirs that the parser reads may be written."""

import json

import jsonschema
import pytest
from sharpest import sharpest
from test_call_grammar import FUNCTIONS, NAMES, TOOLS, Drawn, forms_of, marks_of, speaker

from gapless.base.params import SamplingParams
from gapless.text import call_grammar
from gapless.text.reply_tables import TOOL_TABLES
from gapless.text.tools import check_tools, formed

LOOSE = [TOOLS[1], {"type": "function", "function": {**TOOLS[0]["function"], "strict": False}}]
"""`now` is strict, `look_up` is not."""


def form_of(voice, name, tools=LOOSE, choice="auto"):
    return formed(SamplingParams(), check_tools(tools, choice, None), forms_of(voice, name), "").structured_outputs


@pytest.mark.parametrize("tokens", sharpest(["marks are tokens", "marks are text"]))
@pytest.mark.parametrize("name", NAMES)
def test_arguments_of_a_function_that_is_not_strict_are_any_object(name, tokens):
    voice = speaker(() if "text" in tokens else marks_of(name))
    forms, other, seen = forms_of(voice, name), 0, set[str]()
    for seed in range(20):
        drawn = Drawn(voice, forms, seed, choice="auto", tools=LOOSE)
        seen.update(drawn.names)
        for called, arguments in zip(drawn.names, drawn.arguments, strict=True):
            value = json.loads(arguments)
            assert isinstance(value, dict), drawn.text
            if called == "now":
                assert value == {}, drawn.text
            else:
                other += not jsonschema.Draft202012Validator(FUNCTIONS["look_up"]).is_valid(value)
    assert other or "look_up" not in seen, "no schema holds them"


CALLS = {
    "hermes": '<tool_call>\n{"name": "look_up", "arguments": {"days": "3", "more": [1, {}]}}\n</tool_call>',
    "qwen3_coder": "<tool_call>\n<function=look_up>\n<parameter=days>\n3\n</parameter>\n<parameter=to whom>\n"
    'say "hi\n\n</parameter>\n<parameter=city>\nRome\n</parameter>\n</function>\n</tool_call>',
    "glm45": "<tool_call>look_up\n<arg_key>tags</arg_key>\n<arg_value>[1]</arg_value>\n</tool_call>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="look_up">\n'
    '<｜DSML｜parameter name="x" string="true">"</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="city" string="false">{"a": 1}</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "pythonic": "[look_up(days=-1.5, city='it\\'s', any=[None, {'a': \"b\"}], tags=word)]",
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_with_other_parameters_in_another_order_is_allowed(name):
    voice = speaker(marks_of(name))
    assert voice.accepts(form_of(voice, name), CALLS[name])
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in LOOSE]
    assert not voice.accepts(form_of(voice, name, strict), CALLS[name])
    assert not voice.accepts(form_of(voice, name, choice="required"), CALLS[name])


class Counted(dict):
    """Added tokens that count how often they are gone through."""

    looks = 0

    def items(self):
        self.looks += 1
        return super().items()


def test_the_added_tokens_of_a_tokenizer_are_gone_through_once_for_all_tools():
    added = Counted({"<tool_call>": 3, **{f"<|reserved_{i}|>": 100 + i for i in range(1_000)}})
    for count in (1, 100):
        functions = [call_grammar.Function(f"f{i}", {"type": "object"}, True, f"tools[{i}]") for i in range(count)]
        added.looks = 0
        grammar = call_grammar.CallGrammar(TOOL_TABLES["hermes"], functions, added, "tools")
        assert "<[3]>" in grammar.calls(many=True) and added.looks == 1
        assert list(grammar.added) == ["<tool_call>"]
