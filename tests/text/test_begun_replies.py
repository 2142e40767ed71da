"""Replies that the prompt has begun: wherever it ends, the reply goes on there, for every family."""

import pytest
from replies import FUNCTIONS, GOLDEN, Call, Golden, Reply, added_up, feed, form_of
from test_reply_parser import special

from gapless.text.replies import ReplyForms, last_words
from gapless.text.reply_parser import ReplyFormat
from gapless.text.reply_tables import HARMONY_REPLY, REASONING_TABLES, TOOL_TABLES


def halves(golden: Golden, form: ReplyFormat, at: int) -> tuple[Reply, Reply]:
    """What the first `at` characters mean by themselves, and what a reply that goes on there means."""
    begun, rest = golden.prompt + golden.text[:at], golden.text[at:]
    parser, tokens, events, end = form.parser(FUNCTIONS, begun), form.in_text, [], 0
    for found in tokens.finditer(rest):
        events += parser.push(rest[end : found.start()], found[0])
        end = found.end()
    events += feed(parser, [rest[end:]])
    return added_up(feed(form.parser(FUNCTIONS, golden.prompt), [golden.text[:at]])), added_up(events)


@pytest.mark.parametrize("tokens", [False, True])
@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_a_reply_goes_on_wherever_the_prompt_ends(name: str, tokens: bool) -> None:
    golden = GOLDEN[name]
    form = form_of(golden, special(golden) if tokens else None)
    inside = {at for found in form.in_text.finditer(golden.text) for at in range(found.start() + 1, found.end())}
    for at in sorted(set(range(len(golden.text) + 1)) - inside):
        _, after = halves(golden, form, at)
        wanted = golden.means
        assert wanted.content.endswith(after.content.strip()), at
        assert wanted.reasoning.endswith(after.reasoning.strip()), at
        whole = [call._replace(call_id=None) for call in wanted.calls]
        found = [call._replace(call_id=None) for call in after.calls]
        assert found == whole[len(whole) - len(found) :], (at, golden.text[:at])
        if not golden.text[at:].strip():
            assert not after.content.strip() and not after.reasoning


@pytest.mark.parametrize(
    ("reasoning", "begun", "text", "means"),
    [
        ("think", "<think>\nLet me see, ", "ok</think>\n\nHi", Reply("Hi", "ok")),
        ("think", "<think>\nLet me see, ", "ok", Reply("", "ok")),
        ("think", "<think>\n", "ok</think>Hi", Reply("Hi", "ok")),
        ("think", "<think>\nhm\n</think>\n\n", "Hi", Reply("Hi")),
        ("think", "<think>\nhm\n</think>\n\nHello", " you", Reply(" you")),
        ("think", "</think>", "Hi", Reply("Hi")),
        ("think", "Hello", " you", Reply(" you")),
        ("think", "<think>hm</think>a <think>b", " c</think>d", Reply("d", " c")),
        ("think", "<think>hm </thi", "nk>Hi", Reply("Hi")),
        ("think", "<think>hm </thi", "s way</think>Hi", Reply("Hi", "s way")),
        ("mistral", "[THINK]a [b", " c[/THINK]d", Reply("d", " c")),
        ("harmony", "<|channel|>analysis<|message|>Let me", f" see<|end|>{HARMONY_REPLY}<|channel|>final<|message|>Hi",
         Reply("Hi", " see")),
        ("harmony", "<|channel|>final<|message|>Hello", " you", Reply(" you")),
        ("harmony", "<|channel|>ana", "lysis<|message|>hm", Reply("", "hm")),
    ],
)  # fmt: skip
@pytest.mark.parametrize("tokens", [False, True])
def test_reasoning_that_the_prompt_has_begun_goes_on(reasoning, begun, text, means, tokens) -> None:
    golden = Golden(None, reasoning, text, means)
    marks = [mark for mark in special(golden) if not (tokens and "</thi" in begun)]
    form = form_of(golden, {mark: 100 + i for i, mark in enumerate(marks)} if tokens else None)
    for at in range(len(text) + 1):
        parser, events = form.parser({}, begun), []
        if tokens:
            end = 0
            for found in form.in_text.finditer(text):
                events += parser.push(text[end : found.start()], found[0])
                end = found.end()
            events += feed(parser, [text[end:]])
        else:
            events = feed(parser, [text[:at], text[at:]])
        assert added_up(events) == means, at


def test_a_call_that_gives_up_is_content_without_what_the_prompt_has_of_it() -> None:
    for tools, begun, text in (("llama3_json", "{", '"a": 1}'), ("hermes", '<tool_call>{"x', '": 1} b')):
        parser = ReplyFormat(TOOL_TABLES[tools]).parser({}, begun)
        assert added_up(feed(parser, list(text))) == Reply(text)


def test_calls_before_the_open_one_are_the_prompts() -> None:
    one, two = (f'<tool_call>{{"name": "f", "arguments": {{"a": {a}}}}}</tool_call>' for a in (1, 2))
    parser = ReplyFormat(TOOL_TABLES["hermes"]).parser({}, f"Yes.{one}{two[:-14]}")
    assert parser.open_call == 0
    assert added_up(feed(parser, [two[-14:], one])) == Reply(calls=(Call("f", '{"a": 2}'), Call("f", '{"a": 1}')))


USER = {"role": "user", "content": "Use <think> and <tool_call>"}


@pytest.mark.parametrize(
    ("prompt", "messages", "continued", "begun"),
    [
        ("<u>Use <think> and <tool_call><a>", [USER], False, ""),
        ("<u>Use <think> and <tool_call><a><think>\n", [USER], False, "<think>\n"),
        ("<u>Use <think> and <tool_call><a>\n<think>Okay, ", [USER], False, "<think>Okay, "),
        ("<u>Use <think> and <tool_call><a></think>", [USER], False, "</think>"),
        ("<u>Use <think> and <tool_call><a>Well", [USER, {"role": "assistant", "content": "Well"}], True, "Well"),
        ("<u>Use <think> and <tool_call><a>Well", [USER, {"role": "assistant", "content": " Well "}], True, "Well"),
        ("<u>Hi<a><think>a</think>Hi", [{"content": "Hi"}, {"content": "Hi"}], True, "<think>a</think>Hi"),
        ("<a>Hi", [{"content": [{"type": "text", "text": "H"}, "i"]}], True, "Hi"),
        ("<u>CHANGED<a><think>\n", [{"content": "changed"}], False, "<think>\n"),
        ("<u>Hi<a>CHANGED", [{"content": "Hi"}, {"content": "<think>b"}], True, "<think>b"),
        ("<a>call<a>", [{"role": "assistant", "tool_calls": [{}], "content": None}], False, ""),
    ],
)
def test_the_beginning_of_a_reply_is_told_from_other_text_of_the_prompt(prompt, messages, continued, begun) -> None:
    forms = ReplyForms.__new__(ReplyForms)
    forms.reasoning, forms.tools = REASONING_TABLES["think"], None
    assert forms.begun(*last_words(prompt, messages, continued)) == begun


def test_messages_of_harmony_begin_after_the_head_of_the_last_one() -> None:
    forms = ReplyForms.__new__(ReplyForms)
    forms.reasoning, forms.tools = REASONING_TABLES["harmony"], None
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    assert forms.begun(*last_words(prompt, [{"content": "Hi"}], False)) == ""
    said = "<|channel|>final<|message|>Well"
    assert forms.begun(*last_words(prompt + said, [{"content": "Hi"}, {"content": "Well"}], True)) == said
