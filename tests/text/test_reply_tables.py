"""Tables of replies: the form that a grammar would hold a model to is the one that the parser reads."""

import json
from pathlib import Path

import pytest
from replies import FUNCTIONS, HARD, Call, Reply, added_up, feed

import gapless.demo
from gapless.text.reply_parser import ReplyFormat
from gapless.text.reply_tables import REASONING_TABLES, TOOL_TABLES, CallForm, choose_tables
from gapless.text.tokenizer import Tokenizer

CALLS = [
    ("get_weather", {"city": HARD, "days": 3, "wind": True, "where": {"lat": 1.5, "tags": ["a", "}"]}}),
    ("write", {"text": "a\nb", "zip": "007"}),
]


def written(form: CallForm, index: int, name: str, arguments: dict) -> str:
    """The text of a call as the form says."""
    begin = form.before.replace("{name}", name).replace("{index}", str(index))
    if form.parameter is None:
        return begin + json.dumps(arguments, ensure_ascii=False) + form.after
    row, rows = form.parameter, []
    for key, value in arguments.items():
        text = isinstance(value, str)
        before = row.before_string if text and row.before_string else row.before
        said = repr(value) if row.python else value if text else json.dumps(value)
        rows.append(before.replace("{key}", key) + said + row.after)
    return begin + row.between.join(rows) + form.after


@pytest.mark.parametrize("name", sorted(TOOL_TABLES))
def test_calls_written_by_the_form_are_read_by_the_table(name: str) -> None:
    table = TOOL_TABLES[name]
    form = table.form
    assert form is not None
    text = form.opening + form.between.join(written(form, i, *call) for i, call in enumerate(CALLS)) + form.closing
    assert text.startswith(form.trigger)
    calls = tuple(Call(function, json.dumps(arguments, ensure_ascii=False)) for function, arguments in CALLS)
    reply = added_up(feed(ReplyFormat(table).parser(FUNCTIONS), [text]))
    assert reply._replace(calls=tuple(call._replace(call_id=None) for call in reply.calls)) == Reply(calls=calls)


# A line of each family's public chat template that writes calls or asks for them, and one that writes reasoning.
TEMPLATES = {
    ("hermes", None): "within <tool_call></tool_call> XML tags:\n<tool_call>\n{\\\"arguments\\\": <a>}",
    ("qwen3_coder", "think"): "'\n<tool_call>\n<function=' + name + '>\n' }}{{- '<parameter=' + k + '>\n' }}</think>",
    ("llama3_json", None): 'in the format {"name": function name, "parameters": dictionary of argument name',
    ("pythonic", None): "Use exact format: [func_name1(param1=value1, param2=value2), func_name2(...)]",
    ("mistral_v3", None): '{{- "[TOOL_CALLS] [" }}{{- out[:-1] }}',
    ("mistral", "mistral"): "'[THINK]' + t + '[/THINK]' }}{{- '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    ("deepseek_v3", "think"): "</think>'<｜tool▁call▁begin｜>' + type + '<｜tool▁sep｜>' + name + '\n' + '```json'",
    ("deepseek_v31", "think"): "{{'<｜tool▁call▁begin｜>'+ name + '<｜tool▁sep｜>' + arguments }}{{'</think>'}}",
    ("deepseek_v32", None): "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"$FUNCTION_NAME\">",
    ("deepseek_v4", None): "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"$TOOL_NAME\">",
    ("glm45", "think"): "'<tool_call>' + tc.name }}<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}</arg_value></think>",
    ("kimi_k2", None): "<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{{ a }}",
    ("minimax_m2", "think"): "{%- set toolcall_begin_token = '<minimax:tool_call>' -%}<think>' ~ r ~ '</think>",
    ("minimax_m1", None): 'respond with <tool_calls></tool_calls> XML tags:\n{"name": <tool-name>, "arguments": <a>}',
    ("harmony", "harmony"): "'to=functions.' + name + '<|channel|>commentary json<|message|>' }}<|channel|>analysis",
    (None, None): "{% for message in messages %}{{ message.content }}{% endfor %}",
}  # fmt: skip


@pytest.mark.parametrize("names", TEMPLATES, ids=str)
def test_a_chat_template_names_its_tables_by_their_marks(names: tuple[str | None, str | None]) -> None:
    assert tuple(table and table.name for table in choose_tables(TEMPLATES[names])) == names


def test_every_table_is_chosen_for_some_template() -> None:
    assert {tools for tools, _ in TEMPLATES} == {*TOOL_TABLES, None}
    assert {reasoning for _, reasoning in TEMPLATES} == {*REASONING_TABLES, None}


def test_calls_that_the_demo_template_writes_are_read_back() -> None:
    tokenizer = Tokenizer.from_dir(Path(gapless.demo.__file__).parent / "weights")
    calls = [{"function": {"name": name, "arguments": json.dumps(arguments)}} for name, arguments in CALLS]
    prompt = tokenizer.chat([{"role": "user", "content": "Hi"}], add_generation_prompt=True)
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes.", "tool_calls": calls}]
    text = tokenizer.chat(messages, add_generation_prompt=False).removeprefix(prompt).removesuffix("<|im_end|>\n")
    reply = added_up(feed(ReplyFormat(TOOL_TABLES["hermes"]).parser(), [text]))
    assert (reply.content, [(call.name, json.loads(call.arguments)) for call in reply.calls]) == ("Yes.", CALLS)
