"""Replies taken apart: the same message however the tokens come, and what the model's way to write calls decides."""

import json
import shutil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.base.errors import ConfigError, RequestError
from gapless.demo import weights_dir
from gapless.server.dialects.chat import delta_of, message_of
from gapless.text.items import Items
from gapless.text.replies import ReplyForms, ReplyReader
from gapless.text.reply_parser import ReplyFormat
from gapless.text.reply_tables import REASONING_NAMES, REASONING_TABLES, TOOL_NAMES, TOOL_TABLES, ReplyTable
from gapless.text.tokenizer import Tokenizer
from gapless.text.tools import call_form, check_tools

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}]
ADDED = {"<think>": 1, "</think>": 2, "<tool_call>": 3, "</tool_call>": 4}
FORM = ReplyFormat(TOOL_TABLES["hermes"], REASONING_TABLES["think"], ADDED)
REPLY = [
    (1, "<think>"), (9, "hm"), (9, " so"), (2, "</think>"), (9, "I add."), (3, "<tool_call>"),
    (9, '{"name": "add", "arg'), (9, 'uments": {"a": 1'), (9, ", "), (9, '"b": 2}}'), (4, "</tool_call>"),
]  # fmt: skip


def message(events):
    """The message of a whole reply."""
    items = Items()
    items.take(events)
    return message_of(items)


def test_a_whole_reply_has_reasoning_content_and_calls():
    reader = ReplyReader(FORM, {}, "")
    said = message(reader.feed([i for i, _ in REPLY], "".join(text for _, text in REPLY)) + reader.finish())
    assert (said["reasoning"], said["reasoning_content"], said["content"]) == ("hm so", "hm so", "I add.")
    assert [(call.function.name, json.loads(call.function.arguments)) for call in said["tool_calls"]] == [
        ("add", {"a": 1, "b": 2})
    ]
    assert reader.called


@settings(derandomize=True, deadline=None)
@given(st.data())
def test_any_split_of_tokens_and_text_gives_the_same_message(data):
    """Tokens come in any groups, and their text any number of characters later, as behind a stop string."""
    ids, text = [i for i, _ in REPLY], "".join(one for _, one in REPLY)
    reader, events, taken, shown = ReplyReader(FORM, {}, ""), [], 0, 0
    while taken < len(ids):
        count = data.draw(st.integers(1, 3))
        reach = len("".join(one for _, one in REPLY[: taken + count]))
        until = data.draw(st.integers(shown, reach)) if taken + count < len(ids) else len(text)
        events += reader.feed(ids[taken : taken + count], text[shown:until])
        taken, shown = taken + count, until
    events += reader.finish()
    whole = ReplyReader(FORM, {}, "")
    expected = message(whole.feed(ids, text) + whole.finish())
    said = message(events)
    assert (said["content"], said["reasoning"]) == (expected["content"], expected["reasoning"])
    assert reader.reasoning_tokens == whole.reasoning_tokens == 3
    assert [call.function for call in said["tool_calls"]] == [call.function for call in expected["tool_calls"]]
    deltas = [delta_of(change) or {} for change in Items().take(events)]
    assert "".join(delta.get("content", "") for delta in deltas) == expected["content"]


def test_tokens_before_the_end_of_the_reasoning_are_counted_and_may_be_left_out():
    reader = ReplyReader(FORM, {}, "", include_reasoning=False)
    events = [event for token, text in REPLY for event in reader.feed([token], text)] + reader.finish()
    said = message(events)
    assert said["content"] == "I add." and "reasoning" not in said
    assert reader.reasoning_tokens == 3  # two words and the closing mark


def test_content_is_null_beside_reasoning_or_calls_alone():
    for count, content in ((4, None), (5, "I add."), (0, "")):
        reader = ReplyReader(FORM, {}, "")
        events = [event for token, text in REPLY[:count] for event in reader.feed([token], text)] + reader.finish()
        assert message(events)["content"] == content
    calls = [*REPLY[:4], *REPLY[5:]]
    reader = ReplyReader(FORM, {}, "")
    said = message(reader.feed([i for i, _ in calls], "".join(text for _, text in calls)) + reader.finish())
    assert said["content"] is None and len(said["tool_calls"]) == 1


@pytest.mark.parametrize("streamed", [True, False])
def test_without_parallel_calls_the_first_one_alone_is_passed_on(streamed):
    calls = [*REPLY, (9, "and"), *REPLY[5:], (9, "done")]
    reader = ReplyReader(FORM, {}, "", parallel=False)
    parts = [([i], text) for i, text in calls] if streamed else [([i for i, _ in calls], "".join(t for _, t in calls))]
    events = [event for ids, text in parts for event in reader.feed(ids, text)] + reader.finish()
    said = message(events)
    assert [json.loads(call.function.arguments) for call in said["tool_calls"]] == [{"a": 1, "b": 2}]
    assert said["content"].split() == ["I", "add.", "and", "done"]


@pytest.mark.parametrize(("named", "reason"), [(False, "tool_calls"), (True, "stop")])
def test_a_call_that_the_request_names_ends_with_stop_as_in_openais_api(named, reason):
    use = check_tools(TOOLS, {"type": "function", "function": {"name": "add"}} if named else "required", None)
    assert use.named is named
    reader = ReplyReader(FORM, {}, "", named=use.named)
    assert reader.finish_reason("stop") == "stop", "there is no call yet"
    reader.feed([i for i, _ in REPLY], "".join(text for _, text in REPLY))
    assert (reader.finish_reason("stop"), reader.finish_reason("length")) == (reason, "length")


def test_the_demo_models_template_is_recognised_and_flags_go_before_it():
    tokenizer = Tokenizer.from_dir(weights_dir())
    forms = ReplyForms(tokenizer, "auto", "auto")
    assert forms.names() == {"tool_call_parser": "hermes", "reasoning_parser": None}
    assert forms.format(tools=False) is None and forms.format(tools=True) is forms.format(tools=True)
    assert ReplyForms(tokenizer, "none", "think").names() == {"tool_call_parser": None, "reasoning_parser": "think"}
    with pytest.raises(ConfigError, match="tool_call_parser: 'qwen9' is none of auto, none, "):
        ReplyForms(tokenizer, "qwen9", "auto")


@pytest.mark.parametrize(
    ("tools", "reasoning", "names"),
    [
        ("openai", "openai_gptoss", ("harmony", "harmony")),
        ("qwen25", "deepseek-r1", ("hermes", "think")),
        ("qwen3_xml", "qwen3", ("qwen3_coder", "think")),
        ("llama4_pythonic", "mistral", ("pythonic", "mistral")),
        ("minimax-m2", "minimax_m2", ("minimax_m2", "think")),
    ],
)
def test_forms_bear_the_names_that_other_engines_give_them(tools, reasoning, names):
    found = ReplyForms(Tokenizer.from_dir(weights_dir()), tools, reasoning).names()
    assert (found["tool_call_parser"], found["reasoning_parser"]) == names


def test_every_name_of_another_engine_stands_for_a_form_that_is_here():
    assert {*TOOL_NAMES.values()} <= TOOL_TABLES.keys() and {*REASONING_NAMES.values()} <= REASONING_TABLES.keys()
    assert not TOOL_NAMES.keys() & TOOL_TABLES.keys() and not REASONING_NAMES.keys() & REASONING_TABLES.keys()


@pytest.mark.parametrize(("marks", "form"), [("[TOOL_CALLS]", "mistral_v3"), ("[TOOL_CALLS][ARGS]", "mistral")])
def test_mistral_is_the_form_of_mistral_that_the_template_has(tmp_path, marks, form):
    shutil.copytree(weights_dir(), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": marks}))
    assert ReplyForms(Tokenizer.from_dir(tmp_path), "mistral", "none").names()["tool_call_parser"] == form


def test_the_response_template_of_a_checkpoint_goes_before_its_chat_template(tmp_path):
    shutil.copytree(weights_dir(), tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tokenizer_config.json"
    field = {"open": "<thought>", "close": "</thought>"}
    config = json.loads(path.read_text()) | {"response_template": {"fields": {"reasoning": field, "content": {}}}}
    path.write_text(json.dumps(config))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert ReplyForms(tokenizer, "auto", "auto").names() == {
        "tool_call_parser": None,
        "reasoning_parser": "response_template",
    }
    reader = ReplyReader(ReplyForms(tokenizer, "auto", "auto").format(tools=False), {}, "")
    said = message(reader.feed([9], "<thought>hm</thought>yes") + reader.finish())
    assert (said["reasoning"], said["content"]) == ("hm", "yes")


def test_calls_are_constrained_only_where_asked():
    free = check_tools(TOOLS, "auto", None)
    assert call_form(free, FORM, "") is None
    must = check_tools(TOOLS, "required", False)
    assert call_form(must, FORM, "").kind == "grammar"
    assert "<[3]>" in call_form(must, FORM, "").text, "an added token is not its text"
    strict = check_tools([{**TOOLS[0], "function": {**TOOLS[0]["function"], "strict": True}}], None, None)
    assert "TEXT" in call_form(strict, FORM, "").text
    described = ReplyFormat(ReplyTable("response_template"))
    with pytest.raises(RequestError, match="no grammar is known") as found:
        call_form(must, described, "")
    assert found.value.param == "tool_choice"
