"""A checkpoint's response_template becomes a table that reads its replies, or is refused with the field's name."""

import copy
import json

import pytest
from replies import FUNCTIONS, GOLDEN, NESTED, Call, Reply, added_up, feed

from gapless.base.errors import CheckpointError
from gapless.text.reply_parser import ReplyFormat
from gapless.text.response_template import compile_response_template

HERMES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>",
            "close": "</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"\s*(?:<\|im_end\|>|<\|endoftext\|>)", "content": "text"},
    },
}
NAMED = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
CODER = {
    "fields": {
        "tool_calls": {
            "open_pattern": r"\s*<tool_call>\s*<function=(?P<name>[^>\n]+)>",
            "close_pattern": r"</function>\s*</tool_call>",
            "repeats": True,
            "content": "xml-inline",
            "content_args": {
                "tag_pattern": r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>",
                "value_parser": {"name": "json", "args": {"allow_non_json": True}},
            },
            "transform": NAMED,
        },
        "reasoning_content": {"open": "<think>", "close": "</think>"},
        "content": {"content": "text"},
    }
}
ARGUMENTS = {
    "fields": {
        "tool_calls": {
            "open_pattern": r"<call>\s+call:(?P<name>\w+)\[args\]",
            "close": "</call>",
            "content": "json",
            "transform": NAMED,
        }
    }
}


@pytest.mark.parametrize(("template", "family"), [(HERMES, "hermes"), (CODER, "qwen3_coder")])
def test_a_template_reads_the_golden_replies_of_its_family_in_every_split(template: dict, family: str) -> None:
    form = ReplyFormat(*compile_response_template(template))
    for name in (name for name in GOLDEN if name.split()[0] == family):
        golden = GOLDEN[name]
        for at in range(len(golden.text)):
            parser = form.parser(FUNCTIONS, golden.prompt)
            assert added_up(feed(parser, [golden.text[:at], golden.text[at:]])) == golden.means, (name, at)


def test_a_name_in_the_opening_is_followed_by_arguments_alone() -> None:
    tools, reasoning = compile_response_template(ARGUMENTS)
    assert reasoning is None
    text = f"Hm. <call>\ncall:get_weather[args]{NESTED}</call><call> call:now[args]{{}}</call>"
    means = Reply("Hm.", "", (Call("get_weather", NESTED), Call("now", "{}")))
    for parts in ([text], list(text)):
        assert added_up(feed(ReplyFormat(tools, reasoning).parser(), parts)) == means


def test_a_value_that_is_not_closed_ends_with_the_call() -> None:
    text = "<tool_call><function=write><parameter=text>a</function></tool_call>b"
    reply = added_up(feed(ReplyFormat(*compile_response_template(CODER)).parser(FUNCTIONS), [text]))
    assert reply == Reply("b", "", (Call("write", '{"text": "a"}'),))


def change(template: dict, field: str, **values: object) -> dict:
    changed = copy.deepcopy(template)
    changed["fields"].setdefault(field, {}).update(values)
    return changed


REFUSED = [
    (change(HERMES, "tool_calls", open_pattern="<(a|b)>"), "tool_calls.open_pattern"),
    (change(HERMES, "tool_calls", transform_each=True), "tool_calls.transform"),
    (change(HERMES, "tool_calls", content_args={"unquoted_keys": True}), "tool_calls.content"),
    (change(HERMES, "tool_calls", close=["a", "b"]), "tool_calls.close"),
    (change(HERMES, "thinking", content="json"), "thinking"),
    (change(HERMES, "content", open="<answer>"), "content"),
    (change(HERMES, "sources", open="<s>", close="</s>"), "sources"),
    (change(CODER, "tool_calls", open_pattern=r"<call>(?P<name>\w+)"), "tool_calls.open_pattern"),
    (change(CODER, "tool_calls", open_pattern=r"<call>(?P<name>\w+)(?P<id>\w+)>"), "tool_calls.open_pattern"),
    (change(CODER, "tool_calls", open_pattern=r"<call>(?P<name>\w+).*?<m>"), "tool_calls.open_pattern"),
    (change(CODER, "tool_calls", content_args={"tag_pattern": "x*"}), "tool_calls.content_args.tag_pattern"),
    (change(CODER, "tool_calls", content_args={"merge_duplicates": True}), "tool_calls.content_args"),
    (change(CODER, "tool_calls", content="kv-lines"), "tool_calls.content"),
    ({"fields": []}, "fields"),
    ({"fields": {"thinking": "<think>"}}, "thinking"),
    (None, "fields"),
]


@pytest.mark.parametrize(("template", "field"), REFUSED, ids=range(len(REFUSED)))
def test_a_template_that_no_table_can_say_is_refused_with_the_field(template: object, field: str) -> None:
    json.dumps(template)
    with pytest.raises(
        CheckpointError, match=f"field {field.replace('.', '[.]')} cannot be used: .*--tool-call-parser"
    ):
        compile_response_template(template)
