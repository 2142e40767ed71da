"""Conversations that clients write in several ways are one prompt, which is what transformers makes of the way that
the template reads."""

import itertools
import json

import pytest
import templates
import transformers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from sharpest import sharpest
from vocabularies import SPECIAL, byte_level

from gapless.base.errors import RequestError
from gapless.text.chat import ChatTemplate
from gapless.text.history import canonical

TEXT = '{"city": "Köln", "days": 2}'
OBJECT = {"city": "Köln", "days": 2}
USER = {"role": "user", "content": "weather?"}
ID = "call_0123456789abcdef01234567"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}


def called(arguments, content, **more):
    call = {"id": ID, "type": "function", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", **content, "tool_calls": [call], **more}


def result(content="7", **more):
    return {"role": "tool", "tool_call_id": ID, "content": content, **more}


def theirs(template, messages, **options):
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level().backend, **SPECIAL)
    tokenizer.chat_template = template
    return tokenizer.apply_chat_template(messages, tokenize=False, **options)


def ours(template, messages, **options):
    return ChatTemplate(template, SPECIAL).render(messages, add_generation_prompt=False, **options)


SILENCES = [{}, {"content": None}, {"content": ""}, {"content": []}, {"content": [{"type": "text", "text": ""}]}]
CALLS = [TEXT, OBJECT]
# What of a call each template reads
READ = {
    "LLAMA3": OBJECT, "QWEN": OBJECT, "EITHER": OBJECT, "HERMES": OBJECT, "GRANITE": OBJECT, "XML": OBJECT, "R1": TEXT,
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_a_call_in_every_spelling_is_what_transformers_makes_of_the_right_one(name):
    template = getattr(templates, name)
    wanted = theirs(template, [USER, called(READ[name], {"content": ""}), result()])
    assert ("Köln" in wanted) and "f" in wanted
    for arguments, silence in itertools.product(CALLS, SILENCES):
        assert ours(template, [USER, called(arguments, silence), result()]) == wanted, (arguments, silence)


@pytest.mark.parametrize("silence", SILENCES)
@pytest.mark.parametrize("arguments", CALLS)
def test_a_template_that_asks_for_null_is_given_null(arguments, silence):
    messages = [USER, called(TEXT, {"content": None}), result()]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    wanted = environment.from_string(templates.OLD_R1).render(messages=messages)
    assert TEXT in wanted
    assert ours(templates.OLD_R1, [USER, called(arguments, silence), result()]) == wanted


def test_ids_are_short_where_the_template_takes_no_others():
    text = ours(templates.MISTRAL, [USER, called(TEXT, {}), result(), called(TEXT, {}), result()])
    ids = {part[:9] for part in text.replace('"call_id": "', '"id": "').split('"id": "')[1:]}
    assert len(ids) == 1 and ids.pop().isalnum() and ID not in text
    mine = json.loads(json.dumps([USER, called(TEXT, {}), result()]).replace(ID, "abcDEF123"))
    suited = json.loads(json.dumps([USER, called(OBJECT, {}), result()]).replace(ID, "abcDEF123"))
    assert ours(templates.MISTRAL, mine) == theirs(templates.MISTRAL, suited)
    assert ID in ours("{% for m in messages %}{% for c in m.tool_calls %}{{ c | tojson }}{% endfor %}{% endfor %}",
                      [USER, called(TEXT, {}), result()])  # fmt: skip


WORDS = [[{"type": "text", "text": "How "}, {"type": "text", "text": "are you?"}], "How are you?"]


@pytest.mark.parametrize(
    ("name", "suited"),
    [
        ("GUARD", WORDS[0]), ("MIXED", WORDS[0]), ("FIRST_PART", [{"type": "text", "text": WORDS[1]}]),
        ("LLAMA3", WORDS[1]), ("QWEN", WORDS[1]), ("R1", WORDS[1]), ("GRANITE", WORDS[1]),
    ],
)  # fmt: skip
def test_content_is_handed_on_as_the_template_reads_it(name, suited):
    template = getattr(templates, name)
    chat = [{"role": role, "content": suited} for role in ("user", "assistant", "user")]
    assert ours(template, [{**one, "content": WORDS[0]} for one in chat]) == theirs(template, chat)
    whole = WORDS[1] if suited == WORDS[1] else [{"type": "text", "text": WORDS[1]}]
    text = ours(template, [{**one, "content": WORDS[1]} for one in chat])
    assert text == theirs(template, [{**one, "content": whole} for one in chat]) and text.count(WORDS[1]) == 3


def test_each_role_has_a_reading_of_its_own():
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert ours(templates.MIXED, chat) == theirs(templates.MIXED, [chat[0], {"role": "user", "content": [
        {"type": "text", "text": "hi"}]}])  # fmt: skip


@pytest.mark.parametrize(
    "shown", ["m.content[0].text", "'' + m.content[0]['text']", "m.content | map(attribute='text') | join"]
)
def test_a_template_that_takes_no_conversation_without_a_system_message_is_read(shown):
    template = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}{% for m in messages %}"
        "{% if m.tool_calls %}{{ m.tool_calls[0].function.name + m.tool_calls[0].function.arguments }}"
        "{% else %}<{{ m.role }}>{{ " + shown + " }}{% endif %}{% endfor %}"
    )
    chat = [{"role": role, "content": f"as {role}"} for role in ("system", "user", "assistant", "user")]
    parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in chat]
    assert ours(template, chat) == ours(template, parts) == theirs(template, parts)
    assert ours(template, [*chat, called(OBJECT, {})]).endswith("f" + TEXT)


def test_a_result_of_parts_is_read_by_templates_of_text_and_of_parts():
    of_parts = "{% for m in messages %}{% if m.role == 'tool' %}{% for p in m.content %}{{ p.text }};{% endfor %}" \
               "{% else %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}" \
               "{% endif %}{% endfor %}"  # fmt: skip
    messages = [USER, called(TEXT, {}), result([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])]
    assert ours(of_parts, messages).endswith("a;b;")
    assert "<tool_response>\nab\n" in ours(templates.QWEN, messages)
    assert "<tool_response>\n\n" in ours(templates.QWEN, [*messages[:2], result([])])


EMPTIES = [
    {"tool_calls": []}, {"tool_calls": None}, {"name": None}, {"name": ""}, {"refusal": None}, {"refusal": ""},
    {"function_call": None}, {"audio": None}, {"annotations": []}, {"annotations": None}, {"tool_call_id": None},
    {"reasoning_content": None}, {"reasoning_content": ""}, {"reasoning": "", "thinking": []}, {"tool_calls": {}},
]  # fmt: skip
SHOWS = (
    "{% for m in messages %}{% for key in m %}{{ key }},{% endfor %}{% if 'tool_calls' in m %}{{ 1 / 0 }}{% endif %}"
    "{{ m.content }};{% endfor %}"
)


@pytest.mark.parametrize("empty", EMPTIES, ids=str)
@pytest.mark.parametrize("role", sharpest(["assistant", "user", "system"]))
def test_a_field_that_holds_nothing_is_not_there(empty, role):
    plain = [{"role": role, "content": "yes?"}, USER]
    assert ours(SHOWS, [{**plain[0], **empty}, USER]) == ours(SHOWS, plain) == theirs(SHOWS, plain)


@pytest.mark.parametrize("field", ["strict", "description", "parameters"])
def test_nulls_of_a_tool_and_lists_of_no_tools_are_not_there(field):
    template = "{% if tools is not none %}{{ tools | tojson }}{% endif %}"
    null = {**TOOL, "function": {**{k: v for k, v in TOOL["function"].items() if k != field}, field: None}}
    assert "null" not in ours(template, [USER], tools=[null])
    assert ours(template, [USER], tools=[]) == ours(template, [USER]) == ""


BROKEN = ['{"city', '{"city": "Par', "[1", "[1, 2]", '"Paris"', "3", "true", "Paris", '{"a": NaN}', '{"a": "\\ud800"}',
          '{"a": 1}}', '{"a":' * 2000, "'{}'"]  # fmt: skip


@pytest.mark.parametrize("broken", sharpest(BROKEN, keep=3))
@pytest.mark.parametrize("name", [*READ, "OLD_R1", "MISTRAL"])
def test_arguments_that_are_no_object_are_their_text_or_marked(broken, name):
    text = ours(getattr(templates, name), [USER, called(broken, {}), result("not executed"), USER])
    if name in ("R1", "OLD_R1", "EITHER"):
        assert broken in text and "INVALID_JSON" not in text
    else:
        assert "INVALID_JSON" in text and (json.dumps(broken, ensure_ascii=False) in text or name == "XML")
    text.encode()
    marked = [USER, called({"INVALID_JSON": broken}, {}), result("not executed"), USER]  # as /v1/messages answers
    assert ours(getattr(templates, name), marked) == text


@pytest.mark.parametrize("nothing", [None, "", " ", "null", "{}", {}])
@pytest.mark.parametrize("name", ["QWEN", "R1"])
def test_arguments_that_are_nothing_are_an_empty_object(nothing, name):
    assert "{}" in ours(getattr(templates, name), [USER, called(nothing, {}), result()])


@pytest.mark.parametrize(
    ("spelled", "plain"),
    [
        ([{"role": "developer", "content": "x"}, USER], [{"role": "system", "content": "x"}, USER]),
        ([USER, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": TEXT}},
          {"role": "function", "name": "f", "content": "7"}],
         [USER, called(TEXT, {}), result(name="f")]),
        ([USER, {"role": "assistant", "tool_calls": [
            {"id": ID, "type": "custom", "custom": {"name": "f", "input": "a b"}}]}, result()],
         [USER, called({"input": "a b"}, {}), result()]),
        ([USER, called(TEXT, {}, reasoning="hm"), result()],
         [USER, called(TEXT, {}, reasoning_content="hm"), result()]),
        ([USER, called(TEXT, {}, thinking=[{"type": "text", "text": "h"}, {"type": "text", "text": "m"}]), result()],
         [USER, called(TEXT, {}, reasoning_content="hm"), result()]),
        ([USER, {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, "a"]}],
         [USER, {"role": "assistant", "content": "a", "reasoning_content": "hm"}]),
        ([USER, {"role": "assistant", "content": "", "refusal": "no"}], [USER, {"role": "assistant", "content": "no"}]),
        ([USER, {"role": "assistant", "tool_calls": [
            {"function": {"arguments": TEXT, "name": "f"}, "id": ID, "index": None}]}, result()],
         [USER, called(TEXT, {}), result()]),
    ],
)  # fmt: skip
def test_older_and_other_spellings_are_those_of_today(spelled, plain):
    def shown(messages):
        text = json.dumps([{**one, "tool_calls": [call["function"] for call in one.get("tool_calls", ())]}
                           for one in canonical(messages)])  # fmt: skip
        return text.replace('"call_1"', f'"{ID}"')

    assert json.loads(shown(spelled)) == json.loads(shown(plain))


@pytest.mark.parametrize("field", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_under_any_name_is_read_under_any(field, read):
    template = "{% for m in messages %}{{ m.content }}{{ m." + read + " }}{% endfor %}"
    assert ours(template, [{"role": "assistant", "content": "a", field: "hm"}]) == "ahm"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "user", "content": None}, "content"), ({"role": "user", "content": []}, "content"),
        ({"role": "tool", "content": None}, "content"), ({"role": "assistant", "content": None}, "content"),
        ({"role": "assistant", "content": [], "tool_calls": []}, "content"), ({"role": ["user"]}, "role"),
        ({"role": "assistant", "content": "", "tool_calls": "x"}, "tool_calls"),
        ({"role": "assistant", "content": "", "tool_calls": [3]}, "tool_calls[0]"),
        ({"role": "assistant", "content": "", "function_call": {"arguments": "{}"}}, "function_call"),
        ({"role": "assistant", "content": "a", "reasoning_content": 3}, "reasoning_content"),
        ({"role": "tool", "content": "a", "tool_call_id": 3}, "tool_call_id"),
        ({"role": "user", "content": [{"type": "thinking", "thinking": "hm"}]}, "content"),
        ({"role": "user", "content": ()}, "content"), ({"content": "x"}, "role"), ({"role": "user"}, "content"),
        ({"role": "user", "content": 3}, "content"), ({"role": "user", "content": [3]}, "content[0]"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "content[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": 1}]}, "content[0].text"),
        ({"role": "assistant", "refusal": 3}, "refusal"),
        ({"role": "assistant", "content": [{"type": "refusal", "text": "no"}]}, "content[0].refusal"),
        ({"role": "assistant", "tool_calls": [{}]}, "tool_calls[0].function"),
    ],
)  # fmt: skip
def test_a_message_that_cannot_be_read_is_named(message, field):
    for before in ([], [USER]):
        with pytest.raises(RequestError) as caught:
            ours(templates.QWEN, [*before, message])
        assert caught.value.param == f"messages[{len(before)}].{field}"


@pytest.mark.parametrize(("messages", "field"), [([], "messages"), ("hello", "messages"), (["hello"], "messages[0]")])
def test_a_conversation_that_is_none_is_refused_by_name(messages, field):
    with pytest.raises(RequestError) as caught:
        ours(templates.QWEN, messages)
    assert caught.value.param == field


@pytest.mark.process
def test_a_template_that_takes_all_its_time_is_probed_in_bounded_time():
    slow = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
    assert ChatTemplate({"default": "{{ messages[0].content }}", "tool_use": slow}).render([USER]) == "weather?"


VARIABLES = [
    {"enable_thinking": None}, {"date_string": "1 Jan 2026"}, {"thinking_budget": 100}, {"add_vision_id": True},
    {"documents": [{"title": "t", "text": "d"}]}, {"custom_tools": [{"a": [1, None, 2.5]}]}, {"x": {}}, {},
]  # fmt: skip


@pytest.mark.parametrize("variables", VARIABLES, ids=str)
def test_any_variable_reaches_the_template(variables):
    names = ["enable_thinking", "date_string", "thinking_budget", "add_vision_id", "documents", "custom_tools", "x"]
    shows = "".join(f"{{% if {name} is defined %}}{{{{ {name} | tojson }}}}{{% endif %}}," for name in names)
    assert ours(shows, [USER], variables=variables) == theirs(shows, [USER], **variables)


OWN = [
    "messages", "tools", "add_generation_prompt", "continue_final_message", "bos_token", "pad_token", "chat_template",
    "tokenize", "raise_exception", "namespace",
]  # fmt: skip


@pytest.mark.parametrize("name", OWN)
def test_a_variable_of_the_renderer_is_refused_by_name(name):
    with pytest.raises(RequestError, match=rf"chat_template_kwargs\.{name} ") as caught:
        ours(templates.QWEN, [USER], variables={name: "x"})
    assert caught.value.param == "chat_template_kwargs"


DEEP: list = []
for _ in range(100_000):
    DEEP = [DEEP]


@pytest.mark.parametrize("variables", [{"a": object()}, {"a": {1, 2}}, {"a": DEEP}, {"a": "x" * 2_000_000}, [1], "x"],
                         ids=["object", "set", "deep", "long", "list", "text"])  # fmt: skip
def test_variables_that_are_no_json_or_too_large_are_refused(variables):
    with pytest.raises(RequestError, match="chat_template_kwargs"):
        ours(templates.QWEN, [USER], variables=variables)


@pytest.mark.parametrize("name", ["GUARD", "MIXED", "FIRST_PART"])
def test_a_final_message_of_parts_is_continued(name):
    template = getattr(templates, name)
    chat = [USER, {"role": "assistant", "content": "so it is"}]
    made = ours(template, chat, continue_final_message=True)
    assert made.endswith("so it is") and "weather?" in made
