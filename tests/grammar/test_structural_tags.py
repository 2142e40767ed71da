"""Structural tags: what each format allows and refuses, and outputs that are drawn under trees of them."""

import json
import random
import re
from typing import Any

import pytest
from walks import demo

from gapless.base.errors import RequestError
from gapless.base.structured import StructuredOutputs
from gapless.grammar.tags import FORMATS, tag_grammar

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


def triggered(*tags: dict[str, Any], triggers: Any = ("<f",), **more: Any) -> dict[str, Any]:
    return {"type": "triggered_tags", "triggers": triggers and [*triggers], "tags": [*tags], **more}


def listed(**more: Any) -> dict[str, Any]:
    tags = [tag("<a>", regex("[0-9]+"), "</a>"), tag("<b>", JSON, "</b>")]
    return {"type": "tags_with_separator", "tags": tags, "separator": ", ", **more}


def form(tree: Any) -> StructuredOutputs:
    return StructuredOutputs(structural_tag={"type": "structural_tag", "format": tree})


JSON = {"type": "json_schema", "json_schema": RECORD}
ANY = {"type": "any_text", "excludes": []}
CALL, TIME = tag("<f=x>", JSON, "</f>"), tag("<f=time>", regex("[0-9]+"), "</f>")
THINK = tag("<think>", ANY, "</think>")


CASES: list[tuple[dict[str, Any], list[str], list[str]]] = [
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
    (regex(""), [""], ["a"]),
    (times("repeat", JSON, min=0, max=0), [""], ['{"a":1}']),
    (times("optional", ANY), ["", "so"], [MARK]),
    (tag("<a>", const("yes"), MARK), [f"<a>yes{MARK}"], [f"<a>{MARK}", "<a>yes"]),
    (tag(MARK, regex("[0-9]+"), ["!", MARK]), [f"{MARK}1!", f"{MARK}12{MARK}"], [f"{MARK}!", f"{MARK}{MARK}"]),
    (tag("<a>", ANY, f"</a>{MARK}"), [f"<a>x</a>{MARK}", f"<a></a>{MARK}"], [f"<a>x{MARK}", "<a>x</a>"]),
    (tag("<a>", ANY, ["</a>", MARK]), ["<a>x</a>", f"<a>x{MARK}", f"<a>{MARK}"], ["<a>x", f"<a>x</a>{MARK}"]),
    (several("sequence", regex("[a-z]+"), const(f"x{MARK}")), [f"abx{MARK}"], [f"x{MARK}", f"ab{MARK}"]),
    (several("sequence", JSON, regex("[a-z]*"), const("abc")), ['{"a":1}xabc', '{"a":1}abc'], ['{"a":1}x', "abc"]),
    (several("sequence", regex("[a-z]+"), const("abc"), JSON), ['xabc{"a":1}'], ['abc{"a":1}', "xabc"]),
    (tag("<a>", several("or", JSON, ANY), "</a>"), ['<a>{"a":1}</a>', "<a>so</a>"], ["<a>", "so</a>"]),
    (tag("<a>", several("sequence", JSON, ANY), ""), ['<a>{"a":1}', '<a>{"a":1} so'], ["<a>so"]),
    (triggered(tag(f"f:{MARK}", regex("[0-9]"), MARK), triggers=[f"f:{MARK}"]), ["so", f"x f:{MARK}1{MARK} y"], [MARK]),
    (triggered(CALL, TIME, triggers=["<f=x", "<f=t"]), ['a<f=time>1</f>b<f=x>{"a":1}</f>', "<f=y>"], ["<f=x"]),
    (several("sequence", triggered(CALL, at_least_one=True, stop_after_first=True), JSON),
     ['<f=x>{"a":1}</f>{"a":2}'], ['<f=x>{"a":1}</f>']),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "good", "bad"), CASES)
def test_a_format_allows_these_outputs_and_not_those(tree, good, bad):
    assert [text for text in good if not demo().accepts(form(tree), text)] == []
    assert [text for text in bad if demo().accepts(form(tree), text)] == []


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
        ({"type": "const_string", "value": 1}, "const_string: value must be a text"),
        (regex("("), "unclosed group"),
        (regex("a\\"), "incomplete escape"),
        ({"type": "grammar", "grammar": "root ::= ("}, "Expected"),
        ({"type": "json_schema"}, "schema"),
        ({"type": "json_schema", "json_schema": {"not": {}}}, '"not"'),
        ({**JSON, "style": "qwen_xml"}, "style must be json"),
        ({**JSON, "any_order": True}, "'any_order'"),
        ({"type": "any_text", "max_tokens": 5}, "'max_tokens'"),
        (several("sequence", ANY, const("a")), "any_text must come last"),
        (several("sequence", triggered(CALL), const("a")), "triggered_tags must come last"),
        (tag("<a>", ANY, ["</a>", "</a>!"]), "'</a>!' cannot come"),
        (tag("<a>", ANY, ["", "</a>"]), "end must be a text"),
        (tag("<o>", triggered(CALL), "<f"), "'<f"),
        (triggered(CALL, triggers=["<f", "<g"]), "'<g'"),
        (triggered(CALL, triggers=["<f", "<"]), "'<f' cannot come"),
        (triggered(tag(MARK, JSON, ""), triggers=["<|"]), "inside of a special token"),
        (triggered(CALL, at_least_one="false"), "at_least_one must be true or false"),
        (triggered({"type": "tag", "begin": "<f", "end": "x"}), "found 'None'"),
        (several("sequence"), "elements"),
        (several("sequence", {**const("a"), "least": 1}, const("b")), "'least'"),
        ({"type": "star"}, "type of const_string"),
        (times("repeat", const("a"), min=2, max=1), "min up to max"),
        (times("repeat", const("a"), min=True, max=1), "min up to max"),
        ({"type": "tag", "begin": {"type": "token"}, "content": ANY, "end": "x"}, "begin must be a text"),
        (tag("x", ANY, []), "end must be a text"),
        (tag("x", ANY, [f"{number:03}" for number in range(65)]), "up to 64 texts"),
        (triggered(tag("x", ANY, "y")), "'x'"),
        (triggered(const("x")), "type tag"),
        (triggered(CALL, triggers=None), "triggers must be a list"),
        (triggered(CALL, triggers=["<f", ""]), "triggers must be a list"),
        (triggered(CALL, excludes=["x"]), "'excludes'"),
        ({**listed(), "separator": None}, "separator must be a text"),
    ],
)
def test_a_tree_that_cannot_be_honoured_says_why(tree, text):
    with pytest.raises(RequestError, match=re.escape(text)) as caught:
        demo().matcher(form(tree))
    assert caught.value.param == "structured_outputs.structural_tag"
    assert len(str(caught.value)) < 500


def test_a_tree_as_deep_as_a_form_may_be_is_refused():
    deep = '{"type":"star","content":' * 4_000 + json.dumps(const("a")) + "}" * 4_000
    with pytest.raises(RequestError, match="cannot be honoured"):
        demo().matcher(StructuredOutputs(structural_tag=f'{{"format":{deep}}}'))


def test_every_format_is_tried_here():
    assert set(re.findall(r'"type": "(\w+)"', json.dumps(CASES))) - {"object", "integer"} == set(FORMATS)


def drawn(draw: random.Random, depth: int) -> tuple[dict[str, Any], str]:
    """A tree of regular formats, and the regex that says the same."""
    kind = draw.choice(["const_string", "regex"] + [*FORMATS, *FORMATS] * (depth > 0))
    if kind in ("sequence", "or"):
        parts = [drawn(draw, depth - 1) for _ in range(draw.randint(1, 3))]
        return several(kind, *[tree for tree, _ in parts]), ("|" if kind == "or" else "").join(
            f"(?:{r})" for _, r in parts
        )
    if kind in ("optional", "star", "plus", "repeat"):
        (tree, inner), low = drawn(draw, depth - 1), draw.randint(0, 2)
        more = {"min": low, "max": draw.choice([-1, low, low + 1])} if kind == "repeat" else {}
        high = "" if more.get("max") == -1 else more.get("max")
        count = {"optional": "?", "star": "*", "plus": "+", "repeat": f"{{{low},{high}}}"}[kind]
        return times(kind, tree, **more), f"(?:{inner}){count}"
    if kind == "tag":
        tree, inner = drawn(draw, depth - 1)
        begin, ends = draw.choice(["", "<", "a"]), draw.choice([[""], [">"], ["b", ">"]])
        return tag(begin, tree, ends), f"{begin}(?:{inner})(?:{'|'.join(ends)})"
    if kind == "regex":
        text = draw.choice(["a+", "[ab]*", "b?a", "[^>]"])
        return regex(text), text
    text = draw.choice(["a", "ab", "<a", ""])
    return const(text), text


@pytest.mark.parametrize("seed", range(40))
def test_trees_of_regular_formats_allow_what_the_regex_does_that_says_the_same(seed):
    draw = random.Random(seed)
    tree, pattern = drawn(draw, 3)
    texts = ["", *["".join(draw.choices("ab<>", k=draw.randint(1, 6))) for _ in range(30)]]
    texts += [text for text in (demo().say(form(tree), walk) for walk in range(5)) if len(text) < 200]
    expected = {text: re.fullmatch(pattern, text) is not None for text in texts}
    assert {text: demo().accepts(form(tree), text) for text in texts} == expected, (tree, pattern)


def test_a_grammar_is_about_as_long_as_its_tree():
    nested = regex("a")
    for _ in range(20):
        nested = triggered(tag("<f", nested, ">"), at_least_one=True)
    wide = tag("", several("or", *[ANY] * 300, JSON), [f"{number:03}" for number in range(64)])
    deep = const("a")
    for _ in range(100):
        deep = several("sequence", deep, const("b"))
    for tree in (nested, wide, deep):
        assert len(tag_grammar({"format": tree}, {}, {})) < 20 * len(json.dumps(tree))
