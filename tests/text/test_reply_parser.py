"""ReplyParser: every split of a reply gives the same content, reasoning and calls, for every family."""

import json
import random
import re

import pytest
from replies import FUNCTIONS, GOLDEN, HARD, NESTED, SIMPLE, Call, Golden, Reply, added_up, feed, form_of, random_parts
from sharpest import sharpest

from gapless.text import reply_parser
from gapless.text.reply_parser import (
    CallArguments,
    CallBegun,
    ReplyFormat,
)
from gapless.text.reply_tables import REASONING_TABLES, TOOL_TABLES, Move, ReplyTable
from gapless.text.reply_tables import ReplyState as S

NAMES = sorted(GOLDEN)
SHARPEST = ("hermes", "qwen3_coder", "pythonic", "harmony")
SPECIAL = re.compile(r"<[|｜][^<]*[|｜]>|\[/?[A-Z_]+\]")
"""Terminals that are special tokens of the models that write them."""


def parsed(golden: Golden, parts: list[str]) -> Reply:
    return added_up(feed(form_of(golden).parser(FUNCTIONS, golden.prompt), parts))


def test_every_family_has_a_golden_reply() -> None:
    assert {golden.tools for golden in GOLDEN.values()} >= set(TOOL_TABLES)
    assert {golden.reasoning for golden in GOLDEN.values()} >= set(REASONING_TABLES)


@pytest.mark.parametrize("name", NAMES)
def test_a_golden_reply_has_its_meaning_by_characters_and_in_every_split_in_two(name: str) -> None:
    golden = GOLDEN[name]
    assert parsed(golden, list(golden.text)) == golden.means
    for at in range(len(golden.text) + 1):
        assert parsed(golden, [golden.text[:at], golden.text[at:]]) == golden.means, at


def in_tokens(text: str, added: dict[str, int], rng: random.Random) -> list[tuple[int, str]]:
    """Cut a reply into tokens: the added ones whole, any other text at random."""
    tokens, at = [], 0
    while at < len(text):
        literal = next((literal for literal in added if text.startswith(literal, at)), None)
        end = at + (len(literal) if literal else 1)
        while literal is None and end < len(text) and rng.random() < 0.6:
            if any(text.startswith(other, end) for other in added):
                break
            end += 1
        tokens.append((added[literal] if literal else 7, text[at:end]))
        at = end
    return tokens


def special(golden: Golden) -> dict[str, int]:
    """Ids of the terminals that such a model's tokenizer has as special tokens."""
    form = form_of(golden)
    terminals = {move.terminal for table in (form.tools, form.reasoning) for move in table.moves}
    return {terminal: 100 + i for i, terminal in enumerate(sorted(terminals)) if SPECIAL.fullmatch(terminal)}


@pytest.mark.parametrize("name", [name for name in NAMES if special(GOLDEN[name])])
def test_special_tokens_are_terminals(name: str) -> None:
    golden = GOLDEN[name]
    added = special(golden)
    form = form_of(golden, added)
    for i in range(30):
        tokens = in_tokens(golden.text, added, random.Random(i))
        parser = form.parser(FUNCTIONS, golden.prompt)
        events = [e for token, text in tokens for e in (parser.push(text) if token == 7 else parser.push("", text))]
        assert added_up([*events, *parser.finish()]) == golden.means, i


def test_a_terminal_written_in_plain_tokens_is_text_where_the_tokenizer_has_it_whole() -> None:
    parser = ReplyFormat(TOOL_TABLES["hermes"], None, {"<tool_call>": 5, "</tool_call>": 6}).parser()
    text = 'a <tool_call>{"name": "now"}</tool_call>'
    assert added_up(parser.push(text) + parser.finish()) == Reply(text)


def test_a_special_token_ends_the_beginning_of_a_terminal_before_it() -> None:
    parser = ReplyFormat(TOOL_TABLES["qwen3_coder"], None, {"<tool_call>": 5, "</tool_call>": 6}).parser()
    events = parser.push("a <func", "<tool_call>") + parser.push("<function=now></function>", "</tool_call>")
    assert added_up(events + parser.finish()) == Reply("a <func", "", (Call("now", "{}"),))


def test_of_two_terminals_at_one_place_the_longer_counts_in_every_split() -> None:
    moves = (
        Move(S.CONTENT, "<a>", S.REASONING),
        Move(S.CONTENT, "<a>b>", S.CONTENT),
        Move(S.REASONING, "|", S.CONTENT),
    )
    form = ReplyFormat(ReplyTable("two", moves))
    for text, means in (("x<a>b>y", Reply("x\ny")), ("x<a>by|z", Reply("x\nz", "by")), ("x<a>", Reply("x"))):
        for at in range(len(text) + 1):
            assert added_up(feed(form.parser(), [text[:at], text[at:]])) == means, (text, at)


def test_a_call_may_begin_before_the_reasoning_was_closed() -> None:
    form = ReplyFormat(TOOL_TABLES["hermes"], REASONING_TABLES["think"], {"<tool_call>": 5, "</tool_call>": 6})
    parser = form.parser({}, "<think>\n")
    events = parser.push("Hm.\n", "<tool_call>") + parser.push('{"name": "now"}', "</tool_call>")
    assert added_up(events + parser.finish()) == Reply("", "Hm.", (Call("now", "{}"),))


# What is held back


def test_text_is_held_back_only_while_it_may_begin_a_terminal() -> None:
    parser = ReplyFormat(TOOL_TABLES["hermes"], REASONING_TABLES["think"]).parser()
    steps = [("Hi", "Hi"), (" ", ""), ("<", ""), ("b", " <b"), (">", ">"), ("<tool_", ""), ("x", "<tool_x")]
    for text, given in steps:
        assert "".join(e.text for e in parser.push(text)) == given


def test_an_object_in_prose_is_held_back_only_until_a_key_that_no_call_has() -> None:
    parser = ReplyFormat(TOOL_TABLES["llama3_json"]).parser()
    steps = [("{", ""), ('"name"', ""), (': "Al",', ""), (' "age"', '{"name": "Al", "age"'), (": 3", ": 3"), ("}", "}")]
    for text, given in steps:
        assert "".join(e.text for e in parser.push(text)) == given


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_sent_before_the_arguments_and_these_as_they_come(name: str) -> None:
    golden = GOLDEN[name]
    parser = form_of(golden).parser(FUNCTIONS, golden.prompt)
    whole = [(char, parser.push(char)) for char in golden.text]
    for _, events in whole:
        assert len(events) <= 4
    fragments = [event.text for _, events in whole for event in events if isinstance(event, CallArguments)]
    for call in golden.means.calls:
        if call.name == "get_weather" and call.arguments == NESTED:
            assert len(fragments) >= len(NESTED), "verbatim JSON comes character by character"
        if (
            call.arguments.startswith(json.dumps({"city": HARD}, ensure_ascii=False)[:-1])
            and golden.tools != "pythonic"
        ):
            assert len(fragments) >= len(HARD), "a string comes character by character"


def test_the_name_of_a_hermes_call_comes_with_its_closing_quote() -> None:
    parser = ReplyFormat(TOOL_TABLES["hermes"]).parser()
    assert parser.push('<tool_call>{"name": "no') == []
    assert parser.push('w"') == [CallBegun(0, "now", None)]
    assert parser.push(', "arguments": {"a"') == [CallArguments(0, '{"a"')]
    assert parser.push(": 1}") == [CallArguments(0, ": 1}")]
    assert parser.push("}") == []


# Broken replies


BROKEN = {
    "hermes no json": ("hermes", "A <tool_call>\nnot json\n</tool_call> b", Reply("A <tool_call>\nnot json\nb")),
    "hermes no name": ("hermes", 'A <tool_call>{"x": 1} b', Reply('A <tool_call>{"x": 1} b')),
    "hermes mark twice": (
        "hermes",
        f'<tool_call>\n<tool_call>\n{{"name": "now", "arguments": {SIMPLE}}}\n</tool_call>',
        Reply("<tool_call>", "", (Call("now", SIMPLE),)),
    ),
    "hermes cut in the mark": ("hermes", "A <tool_c", Reply("A <tool_c")),
    "hermes cut before the name": ("hermes", '<tool_call>{"name": "no', Reply('<tool_call>{"name": "no')),
    "hermes cut in the arguments": (
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": "b',
        Reply(calls=(Call("now", '{"a": "b'),)),
    ),
    "hermes cut before the arguments": ("hermes", '<tool_call>{"name": "now", ', Reply(calls=(Call("now", ""),))),
    "hermes brace missing": (
        "hermes",
        f'<tool_call>{{"name": "now", "arguments": {SIMPLE}\n</tool_call>x',
        Reply("x", calls=(Call("now", SIMPLE),)),
    ),
    "hermes inner brace missing": (
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": 1\n</tool_call>x',
        Reply("x", calls=(Call("now", '{"a": 1\n'),)),
    ),
    "qwen cut in a string": (
        "qwen3_coder",
        "<tool_call><function=write><parameter=text>\nab\n",
        Reply(calls=(Call("write", '{"text": "ab'),)),
    ),
    "qwen cut in a number": (
        "qwen3_coder",
        "<tool_call><function=get_weather><parameter=days>1",
        Reply(calls=(Call("get_weather", '{"days": 1'),)),
    ),
    "qwen cut in the name": (
        "qwen3_coder",
        "A\n<tool_call>\n<function=get",
        Reply("A\n<tool_call>\n<function=get"),
    ),
    "qwen nothing in the section": (
        "qwen3_coder",
        "A <tool_call>b</tool_call> c",
        Reply("A <tool_call>b</tool_call> c"),
    ),
    "qwen ends missing": (
        "qwen3_coder",
        "<function=write><parameter=text>a<parameter=zip>1</function>B",
        Reply("B", calls=(Call("write", '{"text": "a", "zip": "1"}'),)),
    ),
    "qwen wrong types": (
        "qwen3_coder",
        "<function=get_weather><parameter=days>many</parameter><parameter=where>{1</parameter>"
        "<parameter=wind>None</parameter><parameter=note>null</parameter><parameter=new>NaN</parameter></function>",
        Reply(
            calls=(Call("get_weather", '{"days": "many", "where": "{1", "wind": null, "note": null, "new": "NaN"}'),)
        ),
    ),
    "qwen number where a string or null should be": (
        "qwen3_coder",
        "<function=get_weather><parameter=note>12</parameter></function>",
        Reply(calls=(Call("get_weather", '{"note": "12"}'),)),
    ),
    "pythonic nonsense": (
        "pythonic",
        "[f(a=1 2, b=[1, c=...)] x",
        Reply("", calls=(Call("f", '{"a": "1 2", "b": "[1, c=...)"'),)),
    ),
    "pythonic cut": ("pythonic", "[f(a='b', c='d", Reply(calls=(Call("f", '{"a": "b", "c": \'d'),))),
    "llama python code": ("llama3_json", "<|python_tag|>print(1)", Reply("<|python_tag|>print(1)")),
    "llama cut": ("llama3_json", '{"name": "f", "para', Reply('{"name": "f", "para')),
    "mistral second one broken": (
        "mistral_v3",
        '[TOOL_CALLS][{"name": "f", "arguments": {}}, {bad}]',
        Reply("{bad}]", calls=(Call("f", "{}"),)),
    ),
    "mistral no arguments": ("mistral", "[TOOL_CALLS]f", Reply("[TOOL_CALLS]f")),
    "mistral arguments that are no json": ("mistral", "[TOOL_CALLS]f[ARGS]a {", Reply(calls=(Call("f", "a {"),))),
    "mistral arguments that are no json before another call": (
        "mistral",
        '[TOOL_CALLS]f[ARGS]a, "b [TOOL_CALLS]g[ARGS]{}',
        Reply(calls=(Call("f", 'a, "b '), Call("g", "{}"))),
    ),
    "deepseek cut": (
        "deepseek_v31",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
        Reply(calls=(Call("f", "{"),)),
    ),
    "harmony without a head": ("harmony", "Hello {", Reply("Hello {")),
    "harmony cut in a head": ("harmony", "<|channel|>final<|message|>A<|end|><|start|>assi", Reply("A")),
}


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_reply_is_content_or_a_call_with_the_arguments_as_they_are(name: str) -> None:
    tools, text, means = BROKEN[name]
    golden = Golden(tools, "harmony" if tools == "harmony" else None, text, means)
    for at in range(len(text) + 1):
        assert parsed(golden, [text[:at], text[at:]]) == means, at


PIECES = [
    "Hello", "\n", " ", "{", '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "parameters": {"b": "</x>"}}',
    '"', "\\", "}", "]", "[", "(", ")", "f(a=1, b='x')", "=", ",", "write", "functions.f:0", "text", "é你🎉", "1", ":",
    "```json", '{"a": "<x>"}', '"name"', "analysis", "commentary to=functions.f ", "final", "arguments", "</tool",
]  # fmt: skip


@pytest.mark.parametrize("tools", sharpest([*SHARPEST, *sorted({*TOOL_TABLES} - {*SHARPEST})], len(SHARPEST)))
def test_any_junk_is_read_without_an_error_and_alike_however_it_is_split(tools: str) -> None:
    for i in range(120):
        rng = random.Random(i)
        reasoning = "harmony" if tools == "harmony" else rng.choice([None, "think", "mistral"])
        form = form_of(Golden(tools, reasoning, "", Reply()))
        terminals = [move.terminal for table in (form.tools, form.reasoning) for move in table.moves]
        text = "".join(rng.choice(terminals if rng.random() < 0.5 else PIECES) for _ in range(rng.randint(1, 14)))
        prompt = rng.choice(["", "a" + form.reasoning.opening])
        whole = added_up(feed(form.parser(FUNCTIONS, prompt), [text]))
        for parts in (list(text), random_parts(text, rng), random_parts(text, rng)):
            assert added_up(feed(form.parser(FUNCTIONS, prompt), parts)) == whole, (i, text, prompt)


def test_deep_and_long_values_are_strings_when_they_are_no_json() -> None:
    value = "[" * 100_000
    text = (
        f"<function=get_weather><parameter=where>{value}</parameter><parameter=days>{'9' * 5000}</parameter></function>"
    )
    reply = added_up(feed(ReplyFormat(TOOL_TABLES["qwen3_coder"]).parser(FUNCTIONS), [text]))
    assert json.loads(reply.calls[0].arguments) == {"where": value, "days": "9" * 5000}


def test_a_mark_inside_a_string_of_a_json_value_is_text() -> None:
    tags = {"type": "array", "items": {"type": "string"}}
    form = ReplyFormat(TOOL_TABLES["qwen3_coder"])
    text = '<tool_call>\n<function=f>\n<parameter=tags>\n["a</parameter>", "\\"<parameter="]\n</parameter>\n</function>'
    for seed in range(20):
        parser = form.parser({"f": {"properties": {"tags": tags}}})
        reply = added_up(feed(parser, random_parts(text, random.Random(seed))))
        assert json.loads(reply.calls[0].arguments) == {"tags": ["a</parameter>", '"<parameter=']}


def test_lone_surrogates_do_not_reach_the_client() -> None:
    golden = Golden("hermes", None, '<tool_call>{"name": "f\\ud800", "arguments": "\\ud83d\\ude00\\udc00"}', Reply())
    call = parsed(golden, [golden.text]).calls[0]
    assert call == ("f\ufffd", "😀\ufffd", None)


LONG = {
    "llama3_json": "{" * 40_000,
    "hermes": "<tool_call>{" * 4_000,
    "pythonic": "[a" * 20_000,
    "mistral": "[TOOL_CALLS]" + "a" * 40_000 + " b c[ARGS]",
    "harmony": "<|channel|>" * 4_000 + "x" * 40_000,
}


@pytest.mark.parametrize("name", LONG)
@pytest.mark.process
def test_the_work_for_a_long_reply_grows_with_its_length_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is counted are the characters that are looked at for a terminal, and those of names that are matched."""
    seen, names = [], []
    find, match = reply_parser.Terminals.find, re.fullmatch
    monkeypatch.setattr(
        reply_parser.Terminals, "find", lambda self, text, last: (seen.append(len(text)), find(self, text, last))[1]
    )
    monkeypatch.setattr(
        reply_parser.re, "fullmatch", lambda form, text, *flags: (names.append(len(text)), match(form, text, *flags))[1]
    )
    text = LONG[name]
    parser = ReplyFormat(TOOL_TABLES[name]).parser()
    reply = added_up([*parser.push(text), *parser.finish()])
    assert sum(seen) <= 2 * reply_parser.PIECE_CHARS * len(text) and max(names, default=0) <= reply_parser.MAX_WORD
    assert name == "harmony" or reply == Reply(text), "nothing in it is a call"


def test_a_name_of_mistrals_form_is_matched_without_going_back() -> None:
    """A pattern of two runs that may both take a character would try every place between them."""
    pattern = TOOL_TABLES["mistral"].name_pattern
    assert re.fullmatch(pattern, "add")["name"] == "add" and re.fullmatch(pattern, "add")["id"] is None
    assert re.fullmatch(pattern, "add \n id9").groupdict() == {"name": "add", "id": "id9"}
    assert re.fullmatch(pattern, "add id9 more") is None
