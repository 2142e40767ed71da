"""Replies that the prompt has begun: wherever it ends, the reply goes on there, for every family."""

import pytest
from replies import FUNCTIONS, GOLDEN, Call, Golden, Reply, added_up, feed, form_of
from sharpest import sharpest
from test_reply_parser import special

from gapless.text.replies import ReplyForms, last_words
from gapless.text.reply_parser import ReplyFormat, ReplyParser
from gapless.text.reply_tables import HARMONY_REPLY, REASONING_TABLES, TOOL_TABLES


def fed(parser: ReplyParser, form: ReplyFormat, text: str) -> Reply:
    """What a reply of this text means, in which marks that are tokens come as such."""
    events, at = [], 0
    for found in form.in_text.finditer(text):
        events += parser.push(text[at : found.start()], found[0])
        at = found.end()
    return added_up([*events, *feed(parser, [text[at:]])])


@pytest.mark.parametrize("tokens", sharpest([True, False]))
@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_a_reply_goes_on_wherever_the_prompt_ends(name: str, tokens: bool) -> None:
    golden = GOLDEN[name]
    form = form_of(golden, special(golden) if tokens else None)
    inside = {at for found in form.in_text.finditer(golden.text) for at in range(found.start() + 1, found.end())}
    opening, wanted = form.reasoning.opening, golden.means
    prompt = opening if opening and opening in golden.prompt else "" if opening else golden.prompt
    for at in sorted(set(range(len(golden.text) + 1)) - inside):
        if opening and at and golden.text[:at].rstrip().endswith("d " + opening):
            continue  # it is text of the answer here, and might be more
        after = fed(form.parser(FUNCTIONS, prompt + golden.text[:at]), form, golden.text[at:])
        assert wanted.content.strip().endswith(after.content.strip()), at
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
        ("think", "Well, <think>b", " c</think>d", Reply("d", " c")),
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
    marks = {move.terminal for move in REASONING_TABLES[reasoning].moves} if tokens and "</thi" not in begun else set()
    form = form_of(Golden(None, reasoning, text, means), {mark: 100 + i for i, mark in enumerate(sorted(marks))})
    assert fed(form.parser({}, begun), form, text) == means
    for at in range(0 if tokens else len(text) + 1):
        assert added_up(feed(form.parser({}, begun), [text[:at], text[at:]])) == means, at


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
        ("<u>hi<a><think>\n", [{"content": "hi"}], False, "<think>\n"),
        ("<u>n<a><think>\n", [{"content": "n"}], False, "<think>\n"),
        ("<u>think<a><think>\n\n</think>\n\n", [{"content": "think"}], False, "<think>\n\n</think>\n\n"),
        ("<u>/<a></think>", [{"content": " / "}], False, "</think>"),
        ("<u>a<assistant><think>\n", [{"content": "a"}], False, "<think>\n"),
        ("<u>><a><think>\nLet", [{"content": ">"}, {"content": "Let"}], True, "<think>\nLet"),
        ("<u><think><a><think>\n", [{"content": "<think>"}], False, "<think>\n"),
        ("<u>Use <think><a>", [{"content": "Use <think>"}], False, ""),
        ("<u>Use <think>", [{"content": "Use <think>"}], False, ""),
        ("<u>hi<a>", [{"content": "hi"}], False, ""),
        ("<a>call<a>", [{"role": "assistant", "tool_calls": [{}], "content": None}], False, ""),
    ],
)
def test_the_beginning_of_a_reply_is_told_from_other_text_of_the_prompt(prompt, messages, continued, begun) -> None:
    forms = ReplyForms.__new__(ReplyForms)
    forms.reasoning, forms.tools = REASONING_TABLES["think"], None
    assert forms.begun(last_words(prompt, messages, continued)) == begun


def test_messages_of_harmony_begin_after_the_head_of_the_last_one() -> None:
    forms = ReplyForms.__new__(ReplyForms)
    forms.reasoning, forms.tools = REASONING_TABLES["harmony"], None
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    assert forms.begun(last_words(prompt, [{"content": "Hi"}], False)) == ""
    for text in ("a", "is", "tant", "assistant", "start", "<"):
        prompt = f"<|start|>user<|message|>{text}<|end|><|start|>assistant"
        assert forms.begun(last_words(prompt, [{"content": text}], False)) == ""
    asked = "<|start|>assistant<|message|>b<|end|><|start|>user<|message|>Hi<|end|>"
    assert forms.begun(last_words(asked, [{"content": "Hi"}], False)) == ""
    prompt = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    said = "<|channel|>final<|message|>Well"
    assert forms.begun(last_words(prompt + said, [{"content": "Hi"}, {"content": "Well"}], True)) == said
