"""A budget of thinking: after so many tokens of it only its end may come, whether its marks are tokens or text."""

import pytest
from test_call_grammar import speaker

from gapless.base.errors import RequestError
from gapless.base.params import SamplingParams
from gapless.base.structured import StructuredOutputs
from gapless.text.replies import ReplyForms
from gapless.text.tools import NO_TOOLS, formed

MARKS = ("<think>", "</think>")
CHOICE = StructuredOutputs(choice=["yes"])
both = pytest.mark.parametrize("tokens", [True, False], ids=["tokens", "text"])


class Voice:
    """A matcher of a request with this budget, as the engine makes it."""

    def __init__(self, budget: int, form: StructuredOutputs | None, tokens: bool, begun: str = "", table="think"):
        self.speaker = speaker(MARKS if tokens else (), special=False)
        params = SamplingParams(max_tokens=None, structured_outputs=form, thinking_token_budget=budget)
        replies = ReplyForms(self.speaker.tokenizer, "none", table)
        self.params = formed(params, NO_TOOLS, replies, begun)
        if (asked := self.params.structured_outputs) is not None:
            grammars = self.speaker.grammars
            self.matcher = grammars.within_budget(grammars.matcher(asked, (self.speaker.eos,)), asked)

    def allowed(self) -> set[int]:
        return set(self.speaker.allowed(self.matcher).tolist())

    def ids(self, text: str) -> list[int]:
        return self.speaker.tokenizer.encode(text, False)

    def say(self, text: str) -> None:
        for token in self.ids(text):
            assert token in self.allowed(), f"{text!r}: token {token} may not come"
            self.matcher.advance([token])

    def must_say(self, text: str) -> None:
        for token in self.ids(text):
            assert self.allowed() == {token}, text
            self.matcher.advance([token])


@both
@pytest.mark.parametrize("form", [CHOICE, None], ids=["form", "none"])
@pytest.mark.parametrize("begun", ["", "<think>\n"])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_the_end_of_thinking_follows_after_so_many_tokens(budget, begun, form, tokens):
    voice = Voice(budget, form, tokens, begun)
    voice.say("" if begun else "<think>")
    voice.say("hm, so"[:budget])
    voice.must_say("</think>")
    voice.say("\nyes")
    assert voice.speaker.eos in voice.allowed()


@both
@pytest.mark.parametrize("form", [CHOICE, None], ids=["form", "none"])
def test_thinking_that_ends_sooner_is_not_touched(form, tokens):
    voice, free = (Voice(budget, form, tokens) for budget in (10, 1_000_000))
    for text in ("<think>hm", "</think>", "yes"):
        for token in voice.ids(text):
            assert voice.allowed() == free.allowed()
            for one in (voice, free):
                one.matcher.advance([token])
    assert voice.speaker.eos in voice.allowed()


@both
def test_without_a_form_every_token_may_come_but_where_the_end_is_due(tokens):
    voice = Voice(2, None, tokens)
    every = set(range(voice.speaker.size))
    for text in ("<think>", "a", "b"):
        assert voice.allowed() == every
        voice.say(text)
    voice.must_say("</think>")
    voice.say("any text, <think>")
    assert voice.allowed() == every
    unthinking = Voice(0, None, tokens)
    unthinking.say("no thought, and then")
    assert unthinking.allowed() == every


@both
@pytest.mark.parametrize("form", [CHOICE, None], ids=["form", "none"])
def test_drafts_that_crossed_the_budget_can_be_taken_back(form, tokens):
    voice = Voice(3, form, tokens)
    voice.say("<think>ab")
    before, copy = voice.allowed(), voice.matcher.copy()
    drafts = voice.ids("c</think>")
    voice.matcher.advance(drafts)
    voice.matcher.rollback(len(drafts))
    assert voice.allowed() == before
    voice.say("c")
    voice.must_say("</think>")
    voice.matcher = copy
    voice.say("d")
    voice.must_say("</think>")


def test_text_marks_are_found_across_tokens_and_forced_whole():
    voice = Voice(4, None, tokens=False)
    voice.say("<think>a/th")
    voice.must_say("</think>")
    begun = Voice(4, None, tokens=False)
    begun.say("<think>abc<")
    begun.must_say("/think>")  # an end that the model has begun is that end
    assert len(begun.allowed()) == begun.speaker.size


def test_a_budget_without_an_end_of_thinking_is_refused_by_name_or_dropped():
    with pytest.raises(RequestError, match="no known reasoning: name its form with --reasoning-parser") as refused:
        Voice(5, None, True, table="none")
    assert refused.value.param == "thinking_token_budget"
    ended = Voice(5, None, True, "<think>\n\n</think>\n\n").params
    assert ended.structured_outputs is ended.thinking_token_budget is None, "the prompt has ended it: no masks"
    short = SamplingParams(max_tokens=5, thinking_token_budget=5)
    short = formed(short, NO_TOOLS, ReplyForms(speaker(()).tokenizer, "none", "think"), "")
    assert short.structured_outputs is short.thinking_token_budget is None, "the output ends before: no masks"
    for budget, good in ((-2, False), (-1, True), (1.5, False), (True, False)):
        if good:
            assert SamplingParams(thinking_token_budget=budget).thinking_token_budget is None
        else:
            with pytest.raises(RequestError, match="thinking_token_budget"):
                SamplingParams(thinking_token_budget=budget)
    assert Voice(5, None, True).params.replace(min_tokens=3).min_tokens == 3
    for field in ({"ignore_eos": True}, {"allowed_token_ids": [1]}):
        with pytest.raises(RequestError, match="does not go with thinking_token_budget"):
            Voice(5, None, True).params.replace(**field)
