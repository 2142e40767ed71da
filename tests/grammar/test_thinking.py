"""A form of output begins after the model's thinking, which is free."""

import json

import pytest
from test_call_grammar import speaker

from gapless.base.params import SamplingParams
from gapless.base.structured import StructuredOutputs
from gapless.text.replies import ReplyForms
from gapless.text.tools import NO_TOOLS, formed

TAG = {"begin": "<f>", "schema": {}, "end": "</f>"}
FORMS = [
    ({"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}}, '{"a":1}'),
    ({"json_object": True}, '{"a":"b"}'),
    ({"regex": "[a-c]{2}"}, "ab"),
    ({"choice": ["no", "yes"]}, "yes"),
    ({"grammar": 'start: "x" word\nword: /[a-z]+/'}, "xyz"),
    ({"structural_tag": json.dumps({"triggers": ["<f"], "structures": [TAG]})}, "a<f>1</f>b"),
]
TOKENS = ("<think>", "</think>")


def form_after(prompt: str, tokens: bool, **form) -> tuple:
    """Return a speaker, and the form as the server hands it to the engine."""
    voice = speaker(TOKENS if tokens else ())
    params = SamplingParams(structured_outputs=StructuredOutputs(**form))
    replies = ReplyForms(voice.tokenizer, "none", "think")
    return voice, formed(params, NO_TOOLS, replies, prompt).structured_outputs


@pytest.mark.parametrize("tokens", [True, False])
@pytest.mark.parametrize(("form", "output"), FORMS)
def test_every_form_begins_after_thinking_and_not_before(form, output, tokens):
    voice, asked = form_after("", tokens, **form)
    for text in (output, f"<think>Let me {{see}}: 你?\n</think>\n\n{output}", f"<think></think>{output}"):
        assert voice.accepts(asked, text), text
    for text in (f"<think>hm{output}", "<think>hm</think>", f"<think>hm</think>{output}</think>"):
        assert not voice.accepts(asked, text) or form.keys() == {"structural_tag"}, text


def test_marks_count_as_tokens_only_and_no_output_ends_while_thinking():
    voice, asked = form_after("<think>", True, json_object=True)
    matcher, (begin, end) = voice.matcher(asked), map(voice.tokenizer.token_id, TOKENS)
    allowed = voice.allowed(matcher)
    assert end in allowed and not {begin, voice.eos} & set(allowed)
    assert len(allowed) == voice.size - 3, "thinking is free but for its beginning and the two special tokens"
    spelled = [voice.tokenizer.token_id(char) for char in "</think>"]
    matcher.advance(spelled)
    assert len(voice.allowed(matcher)) == len(allowed), "a mark that is spelled is text"
    matcher.advance([end])
    matcher.advance(voice.tokenizer.encode('{"', False))
    assert not {begin, end} & set(voice.allowed(matcher)), "a string holds no marks"
    matcher.rollback(3)
    assert len(voice.allowed(matcher)) == len(allowed), "drafts that crossed the end of thinking can be taken back"
