"""What each kind of form allows and refuses."""

import random
import re

import pytest
from walks import SPEAKERS, demo

from gapless.base.errors import RequestError
from gapless.base.structured import MAX_FORM_BYTES, StructuredOutputs
from gapless.grammar.lark import MAX_GBNF_BYTES

RECORD = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TAG = {"triggers": ["<f"], "structures": [{"begin": "<f=x>", "schema": RECORD, "end": "</f>"}]}
SPECIAL_TAG = {"triggers": ["<|im_start|>"], "structures": [{"begin": "<|im_start|>", "schema": RECORD, "end": "!"}]}
BOTH_TAGS = {name: TAG[name] + SPECIAL_TAG[name] for name in TAG}
REGEXES = [
    r"\d{3}-[a-z]+",
    r"(ja|nein)( (ja|nein)){0,3}",
    r"[^\n]{5,20}",
    r"-?[1-9][0-9]*\.[0-9]{2} €",
    r"^a+b?$",
    "😀*x",
]


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        ({"json": RECORD}, ['{"a":1}', '{"a": 1, "b": 2}', '{\n  "a": 1\n}'], ['{"a":1', '{"b":2}', '{   "a":1}']),
        ({"json": RECORD, "disable_additional_properties": True}, ['{"a":1}'], ['{"a": 1, "b": 2}']),
        ({"json": RECORD, "disable_any_whitespace": True}, ['{"a":1}'], ['{"a": 1}', '{\n"a":1}']),
        ({"json": RECORD, "whitespace_pattern": "[ ]?"}, ['{"a":1}', '{"a": 1}'], ['{"a":  1}', '{"a":\n1}']),
        ({"json_object": True}, ["{}", '{"x": [1, {"y": null}]}'], ["[1]", "1"]),
        ({"choice": ["yes", "no way"]}, ["yes", "no way"], ["no", "yes "]),
        ({"regex": r"\d{3}-[a-z]+"}, ["123-ab"], ["12-ab", "123-ab ", "", "１23-ab"]),
        ({"regex": r"[\d/]+\D\\d"}, ["1/2x\\d"], ["1/23\\d"]),
        ({"grammar": 'start: "a"+ b\nb: /[0-9]+/'}, ["aa12"], ["12", "aa"]),
        ({"grammar": 'root ::= "x" item+\nitem ::= [0-9] | "(" item ")"'}, ["x1(2)"], ["x", "x("]),
        ({"grammar": 'start: <|im_start|> "a"'}, ["<|im_start|>a"], ["a"]),
        ({"structural_tag": TAG}, ["hi", 'a <f=x>{"a":1}</f> b <f=x>{"a": 2}</f>', "a < b"], ["<f=y>", '<f=x>{"b"']),
        (
            {"structural_tag": TAG, "disable_additional_properties": True},
            ['<f=x>{"a":1}</f>'],
            ['<f=x>{"a":1, "b":2}</f>'],
        ),
        ({"structural_tag": BOTH_TAGS}, ["hi", 'a <f=x>{"a":1}</f> <|im_start|>{"a":1}!'], ["<|im_start|>a", "<f=y>"]),
        ({"structural_tag": SPECIAL_TAG}, ["hi", 'a <|im_start|>{"a":1}! b'], ["<|im_start|>a"]),
    ],
)
def test_a_form_allows_these_outputs_and_not_those(fields, good, bad):
    form = StructuredOutputs(**fields)
    assert [text for text in good if not demo().accepts(form, text)] == []
    assert [text for text in bad if demo().accepts(form, text)] == []


@pytest.mark.parametrize("speaker", SPEAKERS)
@pytest.mark.parametrize("regex", REGEXES)
def test_outputs_drawn_under_a_regex_match_it(speaker, regex):
    for seed in range(10):
        text = SPEAKERS[speaker]().say(StructuredOutputs(regex=regex), seed)
        assert re.fullmatch(regex, text), text


def test_outputs_drawn_under_a_choice_are_all_of_its_texts_and_no_others():
    texts = ['say "hi" \\', "é\n", "\u2028", "", "start", "😀 \t\x01", "a", "ab", "</s>"]
    form = StructuredOutputs(choice=texts)
    assert all(demo().accepts(form, text) for text in texts)
    drawn = {demo().say(form, seed) for seed in range(200)}
    assert drawn <= set(texts) and len(drawn) > 4


def test_a_choice_of_thousands_is_taken():
    rng = random.Random(0)
    texts = [f"{rng.getrandbits(40):x}" for _ in range(5_000)]
    assert demo().say(StructuredOutputs(choice=texts), 1) in texts


def test_whitespace_has_an_end_by_default():
    matcher = demo().matcher(StructuredOutputs(json_object=True))
    matcher.advance(demo().tokenizer.encode("{", False))
    spaces = {token for token, text in enumerate(demo().bytes) if text and not text.strip(b" \n\t\r")}
    count = 0
    while blank := spaces & set(demo().allowed(matcher).tolist()):
        matcher.advance([min(blank)])
        count += 1
        assert count < 30
    assert count


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        *(
            ({"json": schema}, keyword)
            for schema, keyword in [
                ({"type": "array", "uniqueItems": True}, '"uniqueItems"'),
                ({"type": "array", "contains": {"type": "integer"}}, '"contains"'),
                ({"not": {"type": "null"}}, '"not"'),
                ({"if": {"type": "string"}, "then": {"maxLength": 1}}, '"if", "then"'),
                ({"type": "object", "dependentRequired": {"a": ["b"]}}, '"dependentRequired"'),
                ({"type": "object", "propertyNames": {"pattern": "a"}}, '"propertyNames"'),
                ({"unevaluatedProperties": False}, '"unevaluatedProperties"'),
                ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 3}]}, "oneOf"),
                ({"type": "string", "format": "colour"}, "format: colour"),
                ({"$ref": "http://example.com/schema"}, "example.com"),
                ({"$ref": "#/$defs/missing"}, "/$defs/missing"),
                ({"type": "string", "minLength": 5, "maxLength": 3}, "minLength"),
                ({"type": "strin"}, "strin"),
                ({"properties": []}, "properties"),
                ({"enum": []}, "Unsatisfiable"),
                ({"type": "string", "pattern": "(?=a)"}, "look-around"),
                ({"$ref": "#"}, "cannot be honoured"),
                ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, '"uniqueItems"'),
                ('{"type":', "EOF"),
                ('{"items":' * 1_000 + "{}" + "}" * 1_000, "recursion limit"),
            ]
        ),
        ({"json": '{"items":' * 1_000 + "{}" + "}" * 1_000, "disable_additional_properties": True}, "recursion"),
        ({"json": RECORD, "whitespace_pattern": "(a"}, "whitespace_pattern"),
        ({"regex": "(?=a)b"}, "look-around"),
        ({"regex": "(a"}, "unclosed group"),
        ({"regex": "a\\"}, "incomplete escape"),
        ({"regex": "\\\\\\"}, "incomplete escape"),
        ({"regex": "(" * 5_000 + "a" + ")" * 5_000}, "cannot be honoured"),
        ({"grammar": "start: x"}, 'unknown name: "x"'),
        ({"grammar": "start: " + "(" * 3_000 + '"a"' + ")" * 3_000}, "deeply nested"),
        ({"grammar": "hello"}, "Expected token"),
        ({"grammar": "start: <|nothing|>"}, "special token"),
        ({"grammar": "root ::= y"}, "'y' not found"),
        ({"grammar": "root ::= ("}, "Expected"),
        ({"grammar": "root ::= " + "(" * 5_000 + ")" * 5_000}, "cannot be honoured"),
        ({"grammar": "root ::= " + '"a" ' * MAX_GBNF_BYTES}, "16,384 bytes"),
        ({"structural_tag": "{}"}, "triggers"),
        ({"structural_tag": "{"}, "Expecting"),
        ({"structural_tag": {"triggers": ["<"], "structures": [{}]}}, "begin, schema and end"),
        ({"structural_tag": {"triggers": ["<"], "structures": [{"begin": "x", "schema": {}, "end": ""}]}}, "'x'"),
        ({"structural_tag": {"triggers": ["x"], "structures": [{"begin": "x", "schema": 1, "end": ""}]}}, "object"),
        (
            {"structural_tag": {"triggers": ["x"], "structures": [{"begin": "x", "schema": {"not": {}}, "end": ""}]}},
            '"not"',
        ),
    ],
)  # fmt: skip
def test_a_form_that_cannot_be_honoured_is_refused_by_name(fields, text):
    form = StructuredOutputs(**fields)
    with pytest.raises(RequestError, match=re.escape(text)) as caught:
        demo().matcher(form)
    assert caught.value.param == form.where == f"structured_outputs.{form.kind}"
    assert str(caught.value).startswith(form.where)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "fields",
    [
        {"json": {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(2_000)}}},
        {"json": {"enum": [f"value {number}" for number in range(8_000)]}},
        {"json": {"type": "string", "maxLength": 1_000_000}},
        {"json": {"type": "array", "items": {"type": "string"}, "minItems": 10**9}},
        {"regex": "(a{1000}){1000}"},
        {"regex": "(a|b)*a(a|b){100}"},
        {"regex": "(x+x+)+y" * 50},
        {"regex": "a|" * 60_000 + "a"},
        {"grammar": 'start: (("a"{1000}){1000}){1000}'},
        {"grammar": 'start: start start | "a"'},
        {"grammar": 'start: "a"\n' + "\n".join(f'r{number}: "a{number}"' for number in range(5_000))},
        {"json": {"allOf": [{"anyOf": [{"properties": {f"{c}{n}": {}}} for c in "ab"]} for n in range(20)]}},
    ],
    ids=range(12),
)
def test_a_hostile_form_is_compiled_or_refused_within_bounds(fields):
    form = StructuredOutputs(**fields)
    assert len(form.text) <= MAX_FORM_BYTES
    try:
        matcher = demo().matcher(form)
        for _ in range(20):
            matcher.advance(demo().allowed(matcher)[-1:].tolist())
    except RequestError as error:
        assert error.param == form.where


def test_an_object_of_too_many_optional_properties_is_refused_before_it_begins():
    form = StructuredOutputs(json={"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(600)}})
    with pytest.raises(RequestError, match=r"cannot be honoured: .* items"):
        demo().matcher(form)
