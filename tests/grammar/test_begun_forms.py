"""Forms that the prompt has begun: the output goes on there, and both together have the form."""

import json
import random

import pytest
from sharpest import sharpest
from test_call_grammar import NAMES, TOOLS, forms_of, marks_of, speaker
from walks import demo

from gapless.base.errors import RequestError
from gapless.base.params import SamplingParams
from gapless.base.structured import StructuredOutputs
from gapless.text.replies import ReplyForms
from gapless.text.reply_tables import TOOL_TABLES
from gapless.text.tools import NO_TOOLS, check_tools, formed

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}


def asked_of(begun, reasoning="none", voice=None, **form):
    replies = ReplyForms((voice or demo()).tokenizer, "none", reasoning)
    params = SamplingParams(structured_outputs=StructuredOutputs(**form))
    return formed(params, NO_TOOLS, replies, begun).structured_outputs


@pytest.mark.parametrize(
    ("form", "begun", "good", "bad"),
    [
        ({"json": CITY}, "", ['{"city":"Oslo","days":1}'], ['Oslo","days":1}']),
        ({"json": CITY}, '{"city": "', ['Oslo","days":1}'], ['{"city":"Oslo","days":1}', '"days":1}']),
        ({"json": CITY}, '{"city": "Os', ['lo", "days": 1}'], ["lo"]),
        ({"json": CITY}, '{"city":"Oslo","days":1', ["}"], ["", "23}"]),
        ({"json": CITY}, '{"city":"Oslo","days":1}', [""], [" ", "{}"]),
        ({"json": CITY}, "Here it is:\n", ['{"city":"Oslo","days":1}'], ['"days":1}']),
        ({"json": CITY}, 'Sure! {"city": "', ['Oslo","days":1}'], ['{"city":"Oslo","days":1}']),
        ({"json": {"type": "array", "items": {"type": "null"}}}, "[null", [",null]", "]"], ["[]", "null"]),
        ({"json_object": True}, '{"a": [', ["1]}"], ["1}"]),
        ({"regex": "[a-c]{3}"}, "ab", ["c"], ["abc"]),
        ({"regex": "[a-c]{3}"}, "Letters: ", ["abc"], ["c"]),
        ({"choice": ["no", "yes"]}, "y", ["es"], ["yes", "no"]),
        ({"choice": ["no", "yes"]}, "It is ", ["yes", "no"], ["es"]),
        ({"grammar": 'start: "x" word\nword: /[a-z]+/'}, "xa", ["b"], ["xb1"]),
        ({"structural_tag": json.dumps({"triggers": ["<f"], "structures": [
            {"begin": "<f>", "schema": CITY, "end": "</f>"}]})}, 'Hm <f>{"city":"', ['a","days":1}</f>'], ['a"}</f>']),
    ],
)  # fmt: skip
def test_a_form_goes_on_where_the_prompt_ends(form, begun, good, bad):
    asked = asked_of(begun, **form)
    assert [text for text in good if not demo().accepts(asked, text)] == []
    assert [text for text in bad if demo().accepts(asked, text)] == []


@pytest.mark.parametrize("begun", ['{"town": "', '{"city": 5', "[", '{"city":"Oslo","days":1} and', "Sure: {}"])
def test_json_that_the_prompt_has_begun_otherwise_is_refused(begun):
    with pytest.raises(RequestError, match=r"response_format: the final message begins an output that is not") as found:
        demo().matcher(asked_of(begun, json=CITY, source="response_format"))
    assert found.value.param == "response_format"


def test_a_form_is_compiled_once_however_it_was_begun():
    grammars, schema = demo().grammars, {"const": "once and for all"}
    before = grammars.compiled
    for begun in ("", '"once', '"once and', "[{", ""):
        asked = StructuredOutputs(json=schema, begun=begun)
        if begun == "[{":
            with pytest.raises(RequestError):
                demo().matcher(asked)
        else:
            assert demo().accepts(asked, '"once and for all"'.removeprefix(begun))
    assert grammars.compiled == before + 1


MARKS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize("reasoning", MARKS)
def test_thinking_that_the_prompt_has_begun_anywhere_ends_before_the_form(reasoning, tokens):
    open_, close = MARKS[reasoning]
    voice = speaker(MARKS[reasoning] if tokens else ())
    for begun, good, bad in [
        (f"{open_}\nLet me see, ", [f"ok{close}\n\nyes"], ["yes", *[f"{open_}ok{close}yes"] * tokens]),
        (f"{open_}hm{close}\n\n", ["yes"], [f"{open_}ok{close}yes"]),
        (f"{open_}hm{close}\n\ny", ["es"], ["yes", f"{open_}ok{close}yes"]),
        (f"{open_}a{close}b{open_}c" if tokens else f"{open_}c", [f"d{close}yes"], ["yes"]),
        ("y", ["es"], [f"{open_}ok{close}es", "yes"]),
        ("", ["yes", f"{open_}ok{close}yes"], ["es"]),
    ]:
        asked = asked_of(begun, reasoning, voice, choice=["yes"])
        assert [text for text in good if not voice.accepts(asked, text)] == [], begun
        assert [text for text in bad if voice.accepts(asked, text)] == [], begun


def test_messages_of_harmony_go_on_in_their_form():
    marks = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>")
    voice = speaker(marks, special=True)
    last = "<|channel|>final<|message|>"
    for begun, good, bad in [
        ("", [f"{last}yes", f"<|channel|>analysis<|message|>hm<|end|><|start|>assistant{last}yes"], ["yes"]),
        (f"{last}y", ["es"], [f"{last}yes", "yes"]),
        ("<|channel|>analysis<|message|>h", [f"m<|end|><|start|>assistant{last}yes"], ["yes", f"{last}yes"]),
    ]:
        asked = asked_of(begun, "harmony", voice, choice=["yes"])
        assert [text for text in good if not voice.accepts(asked, text)] == [], begun
        assert [text for text in bad if voice.accepts(asked, text)] == [], begun


def written(name, city="Oslo"):
    """A call of look_up as the form has it."""
    form = TOOL_TABLES[name].form
    begin = form.opening + form.before.replace("{name}", "look_up").replace("{index}", "0")
    if form.parameter is None:
        return begin + json.dumps({"city": city, "days": 3}, separators=(",", ":")) + form.after + form.closing
    row, said = form.parameter, []
    for key, value in (("city", f"'{city}'" if form.parameter.python else city), ("days", "3")):
        before = row.before_string if key == "city" and row.before_string else row.before
        said.append(before.replace("{key}", key) + (value.replace("'", '"') if row.python else value) + row.after)
    return begin + row.between.join(said) + form.after + form.closing


@pytest.mark.parametrize("tokens", sharpest([True, False]))
@pytest.mark.parametrize("choice", ["required", *sharpest(["auto"], keep=0)])
@pytest.mark.parametrize("name", NAMES)
def test_a_call_goes_on_where_the_prompt_ends(name, choice, tokens):
    voice = speaker(marks_of(name) if tokens else ())
    forms, text = forms_of(voice, name), written(name)
    use = check_tools(TOOLS, choice, False)
    rng = random.Random(name)
    assert voice.accepts(formed(SamplingParams(), use, forms, "").structured_outputs, text)
    for at in rng.sample(range(text.index("look_up") + 7, len(text)), 4):
        cut = [
            mark for mark in voice.vocabulary.added if any(text.startswith(mark, at - i) for i in range(1, len(mark)))
        ]
        if cut:
            continue
        asked = formed(SamplingParams(), use, forms, text[:at]).structured_outputs
        assert voice.accepts(asked, text[at:]), text[:at]
        assert not voice.accepts(asked, text), text[:at]


def test_text_before_required_calls_is_no_part_of_them():
    voice = speaker(marks_of("hermes"))
    use = check_tools(TOOLS, "required", False)
    for begun, good in (
        ("Let me look. ", written("hermes")),
        ("Well. " + written("hermes")[:40], written("hermes")[40:]),
    ):
        asked = formed(SamplingParams(), use, forms_of(voice, "hermes"), begun).structured_outputs
        assert voice.accepts(asked, good)
    asked = formed(SamplingParams(), use, forms_of(voice, "hermes"), '<tool_call>{"name": "other"').structured_outputs
    with pytest.raises(RequestError, match="the final message begins an output that is not of this form"):
        voice.matcher(asked)
