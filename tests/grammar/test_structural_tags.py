"""Structural tags: what each format allows and refuses, and outputs that are drawn under trees of them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from walks import SPEAKERS, demo

from gapless.base.errors import RequestError
from gapless.base.structured import StructuredOutputs
from gapless.grammar.tags import FORMATS

RECORD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
MARK = "<|im_start|>"


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def regex(pattern: str) -> dict[str, Any]:
    return {"type": "regex", "pattern": pattern}


def tag(begin: str, content: dict[str, Any], end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def several(kind: str, *elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": kind, "elements": [*elements]}


def times(kind: str, content: dict[str, Any], **more: int) -> dict[str, Any]:
    return {"type": kind, "content": content, **more}


def triggered(*tags: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": ["<f"], "tags": [*tags], **more}


def listed(**more: Any) -> dict[str, Any]:
    tags = [tag("<a>", regex("[0-9]+"), "</a>"), tag("<b>", JSON, "</b>")]
    return {"type": "tags_with_separator", "tags": tags, "separator": ", ", **more}


def form(tree: Any) -> StructuredOutputs:
    return StructuredOutputs(structural_tag={"type": "structural_tag", "format": tree})


JSON = {"type": "json_schema", "json_schema": RECORD}
ANY = {"type": "any_text", "excludes": []}
CALL, TIME = tag("<f=x>", JSON, "</f>"), tag("<f=time>", regex("[0-9]+"), "</f>")
THINK = tag("<think>", ANY, "</think>")


@pytest.mark.parametrize(
    ("tree", "good", "bad"),
    [
        (const("Hello."), ["Hello."], ["", "Hello", "Hello.."]),
        (const(f"a{MARK}b"), [f"a{MARK}b"], ["ab", MARK]),
        (JSON, ['{"a": 1}'], ['{"b": 1}', "a"]),
        (regex("a+"), ["a", "aaa"], ["", "ab"]),
        ({"type": "grammar", "grammar": 'root ::= "x" root | "y"'}, ["y", "xxy"], ["x", "yy"]),
        (ANY, ["", "any { <text>\n"], [MARK]),
        (several("sequence", regex("[a-z]+"), const("abc")), ["xabc", "abcabc"], ["abc", "xyz"]),
        (several("sequence", const("So: "), JSON, const("!")), ['So: {"a":1}!'], ['So: {"a":1}', "So: !"]),
        (several("sequence", const("x"), ANY), ["x", "x and all"], ["", "y"]),
        (several("or", const("yes"), const("no"), JSON), ["yes", "no", '{"a":1}'], ["", "yesno"]),
        (times("optional", JSON), ["", '{"a":1}'], ['{"a":1}{"a":1}']),
        (times("star", const("ab")), ["", "ab", "abab"], ["a", "aba"]),
        (times("plus", JSON), ['{"a":1}', '{"a":1}{"a":2}'], [""]),
        (times("repeat", const("ab"), min=1, max=2), ["ab", "abab"], ["", "ababab"]),
        (times("repeat", JSON, min=2, max=-1), ['{"a":1}{"a":2}', '{"a":1}{"a":2}{"a":3}'], ['{"a":1}']),
        (THINK, ["<think></think>", "<think>a < b\n</think>"], ["<think>", "<think>a</think>b"]),
        (tag("<r>", JSON, ["</r>", "</s>"]), ['<r>{"a":1}</r>', '<r>{"a":1}</s>'], ['<r>{"a":1}', '{"a":1}</r>']),
        (tag("", regex(".*"), "<"), ["<", "a<", "<<"], ["", "a"]),
        (tag(MARK, ANY, MARK), [f"{MARK}{MARK}", f"{MARK}so{MARK}"], ["so", f"{MARK}so"]),
        (several("sequence", THINK, JSON), ['<think>{"b</think>{"a":1}'], ["<think></think>", '{"a":1}']),
        (triggered(CALL, TIME), ["", "so <", 'so <f=x>{"a":1}</f> <f=time>12</f>!'], ["<f=y>", "<f=time></f>"]),
        (triggered(CALL, at_least_one=True), ['<f=x>{"a":1}</f>', '<f=x>{"a":1}</f> so'], ["", 'so <f=x>{"a":1}</f>']),
        (triggered(CALL, stop_after_first=True), ["so", 'so <f=x>{"a":1}</f>'], ['<f=x>{"a":1}</f> so']),
        (triggered(CALL, stop_after_first=True, at_least_one=True), ['<f=x>{"a":1}</f>'], ["", 'so <f=x>{"a":1}</f>']),
        (tag("<o>", triggered(CALL), "</o>"), ["<o></o>", '<o>a <f=x>{"a":1}</f> b</o>'], ["<o>", "<o><f=y></o>"]),
        (several("sequence", THINK, triggered(CALL)), ["<think></think>so", '<think></think><f=x>{"a":1}</f>'], ["so"]),
        (listed(), ["", "<a>1</a>", '<a>1</a>, <b>{"a":2}</b>, <a>3</a>'], ["<a>1</a>,", "<a>1</a><a>2</a>", "so"]),
        (listed(at_least_one=True), ["<a>1</a>", "<a>1</a>, <a>2</a>"], [""]),
        (listed(stop_after_first=True), ["", "<a>1</a>"], ["<a>1</a>, <a>2</a>"]),
    ],
)  # fmt: skip
def test_a_format_allows_these_outputs_and_not_those(tree, good, bad):
    assert [text for text in good if not demo().accepts(form(tree), text)] == []
    assert [text for text in bad if demo().accepts(form(tree), text)] == []


@pytest.mark.parametrize("speaker", SPEAKERS)
@pytest.mark.parametrize(
    ("tree", "pattern"),
    [
        (several("sequence", regex("[a-c]{2,4}"), const("-"), times("plus", const("xy"))), "[a-c]{2,4}-(xy)+"),
        (tag("<a>", several("or", const("yes"), regex("no{1,3}")), ["</a>", "!"]), "<a>(yes|no{1,3})(</a>|!)"),
        (listed(at_least_one=True, stop_after_first=True), r'<a>[0-9]+</a>|<b>\{\s*"a"\s*:\s*-?[0-9]+\s*\}</b>'),
    ],
)
def test_outputs_drawn_under_a_tree_of_formats_match_the_regex_that_says_the_same(speaker, tree, pattern):
    for seed in range(5):
        text = SPEAKERS[speaker]().say(form(tree), seed)
        assert re.fullmatch(pattern, text), text


def test_the_older_form_is_triggered_tags_in_other_words():
    older = {"triggers": ["<f"], "structures": [{"begin": "<f=x>", "schema": RECORD, "end": "</f>"}]}
    texts = ["", "so", 'so <f=x>{"a":1}</f> <f=x>{"a":2}</f>', "<f=y>", "<f=x>{}</f>", '<f=x>{"a":1}']
    for text in texts:
        both = StructuredOutputs(structural_tag=older), form(triggered(CALL))
        assert demo().accepts(both[0], text) == demo().accepts(both[1], text), text


def test_objects_are_closed_in_every_format_where_the_form_says_so():
    open_object = {"type": "json_schema", "json_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    tree = {"format": several("sequence", tag("<a>", open_object, "</a>"), open_object)}
    text = '<a>{"a":1}</a>{"a":1, "b":2}'
    assert demo().accepts(StructuredOutputs(structural_tag=tree), text)
    assert not demo().accepts(StructuredOutputs(structural_tag=tree, disable_additional_properties=True), text)


@pytest.mark.parametrize(
    ("tree", "text"),
    [
        (1, "type of const_string"),
        ({"type": "dispatch"}, "'dispatch'"),
        ({"type": "_of"}, "'_of'"),
        ({"type": ["tag"]}, "type of const_string"),
        (const(1), "const_string: value must be a text"),  # type: ignore[arg-type]
        (regex("("), "unclosed group"),
        (regex("a\\"), "incomplete escape"),
        ({"type": "grammar", "grammar": "root ::= ("}, "Expected"),
        ({"type": "json_schema"}, "schema"),
        ({"type": "json_schema", "json_schema": {"not": {}}}, '"not"'),
        ({**JSON, "style": "qwen_xml"}, "style must be json"),
        ({**JSON, "any_order": True}, "'any_order'"),
        ({"type": "any_text", "max_tokens": 5}, "'max_tokens'"),
        (several("sequence", ANY, const("a")), "any_text must be the end"),
        (several("sequence"), "elements"),
        (several("sequence", {**const("a"), "least": 1}, const("b")), "'least'"),
        ({"type": "star"}, "type of const_string"),
        (times("repeat", const("a"), min=2, max=1), "min up to max"),
        (times("repeat", const("a"), min=True, max=1), "min up to max"),
        (tag({"type": "token"}, ANY, "x"), "begin must be a text"),  # type: ignore[arg-type]
        (tag("x", ANY, []), "end must be a text"),
        (triggered(tag("x", ANY, "y")), "'x'"),
        (triggered(const("x")), "type tag"),
        ({**triggered(CALL), "triggers": "<f"}, "triggers must be a list"),
        (triggered(CALL, excludes=["x"]), "'excludes'"),
        ({**listed(), "separator": None}, "separator must be a text"),
    ],
)
def test_what_a_tree_cannot_be_honoured_for_is_said(tree, text):
    with pytest.raises(RequestError, match=re.escape(text)) as caught:
        demo().matcher(form(tree))
    assert caught.value.param == "structured_outputs.structural_tag"
    assert len(str(caught.value)) < 500


def test_a_tree_as_deep_as_a_form_may_be_is_refused():
    deep = '{"type":"star","content":' * 4_000 + json.dumps(const("a")) + "}" * 4_000
    with pytest.raises(RequestError, match="cannot be honoured"):
        demo().matcher(StructuredOutputs(structural_tag=f'{{"format":{deep}}}'))


def test_every_format_is_tried_here():
    source = json.dumps([const(""), regex(""), JSON, ANY, THINK, triggered(CALL), listed()])
    tried = {*re.findall(r'"type": "(\w+)"', source), "grammar", "sequence", "or", "optional", "plus", "star", "repeat"}
    assert set(FORMATS) <= tried
