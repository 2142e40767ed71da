"""A matcher's masks: those of llguidance, and where an output ends."""

import random

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from walks import SPEAKERS, demo

from gapless.base.errors import RequestError
from gapless.base.structured import StructuredOutputs
from gapless.grammar.kept import Grammars
from gapless.grammar.source import write_grammar
from gapless.grammar.vocabulary import make_vocabulary

RECORD = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}}},
    "required": ["name", "tags"],
    "additionalProperties": False,
}
FORMS = {
    "json": StructuredOutputs(json=RECORD),
    "object": StructuredOutputs(json_object=True),
    "regex": StructuredOutputs(regex=r"[0-9]{1,4}(\.[0-9]+)?"),
    "choice": StructuredOutputs(choice=["yes", "no", "not sure"]),
    "grammar": StructuredOutputs(grammar='start: "(" start? ")" | /[a-z]+/'),
}


class Wrapped:
    """A vocabulary as llguidance's Python classes read it."""

    is_tokenizer_wrapper, bos_token_id = True, None

    def __init__(self, speaker):
        self.tokens = [*speaker.bytes, *[b""] * (speaker.size - len(speaker.bytes))]
        self.special_token_ids = sorted(speaker.tokenizer.special_ids)
        self.eos_token_id = speaker.eos
        self._tokenizer = speaker.tokenizer

    def __call__(self, text):
        return self._tokenizer.encode(text, add_special_tokens=False)


@pytest.mark.parametrize("speaker", SPEAKERS)
@pytest.mark.parametrize("form", FORMS)
def test_masks_along_random_walks_hold_the_tokens_that_llguidance_takes(speaker, form):
    """llguidance's Python classes judge each token. Masks of theirs may hold less: one spelling of a text is enough."""
    speaker, form = SPEAKERS[speaker](), FORMS[form]
    reference = LLMatcher(LLTokenizer(Wrapped(speaker), n_vocab=speaker.size), write_grammar(form), log_level=0)
    narrow = np.zeros_like(speaker.words)
    steps = 0
    for seed in range(3):
        rng, ours, theirs = random.Random(seed), speaker.matcher(form), reference.deep_copy()
        for place in range(40):
            allowed = speaker.allowed(ours)
            ends = {speaker.eos} if theirs.is_accepting() else set()
            taken = {token for token in range(speaker.size) if theirs.validate_tokens([token])}
            assert set(allowed.tolist()) == taken - {speaker.eos} | ends
            theirs.unsafe_compute_mask_ptr(narrow.ctypes.data, narrow.nbytes)
            assert not (narrow & ~speaker.words).any()
            token = speaker.choose(allowed, rng, place >= 25)
            ours.advance([token])
            if token == speaker.eos:
                break
            assert theirs.consume_token(token)
            steps += 1
    assert steps > 5


@pytest.mark.parametrize("form", FORMS)
def test_a_walk_taken_back_anywhere_sees_the_same_masks_again(form):
    speaker, form = demo(), FORMS[form]
    rng = random.Random(5)
    for _ in range(10):
        matcher, masks, tokens = speaker.matcher(form), [], []
        while len(tokens) < 50 and tokens[-1:] != [speaker.eos]:
            allowed = speaker.allowed(matcher)
            masks.append(speaker.words.copy())
            tokens.append(speaker.choose(allowed, rng, len(tokens) >= 30))
            matcher.advance(tokens[-1:])
        count = rng.randint(1, len(tokens))
        matcher.rollback(count)
        for place in range(len(tokens) - count, len(tokens)):
            matcher.write_mask(speaker.words)
            assert (speaker.words == masks[place]).all()
            matcher.advance([tokens[place]])


def test_only_end_tokens_are_left_once_the_output_is_complete():
    speaker = demo()
    matcher = speaker.matcher(StructuredOutputs(choice=["yes"]), stop_ids=(31, 70))
    matcher.advance(speaker.tokenizer.encode("yes", False))
    ends = sorted([31, 70, speaker.eos])
    assert speaker.allowed(matcher).tolist() == ends
    for token in ends:
        matcher.advance([token])
        assert speaker.allowed(matcher).tolist() == ends
        matcher.rollback(1)
        assert speaker.allowed(matcher).tolist() == ends


def test_a_stop_id_of_the_request_ends_an_output_that_may_go_on():
    speaker = demo()
    stop = speaker.tokenizer.encode("~", False)[0]
    matcher = speaker.matcher(StructuredOutputs(regex="[0-9]+"), stop_ids=(stop,))
    assert stop not in speaker.allowed(matcher)
    matcher.advance(speaker.tokenizer.encode("12", False))
    assert {stop, speaker.eos} <= set(speaker.allowed(matcher).tolist())
    matcher.advance([stop])
    assert set(speaker.allowed(matcher).tolist()) == {stop, speaker.eos}
    matcher.rollback(1)
    matcher.advance(speaker.tokenizer.encode("3", False))
    assert len(speaker.allowed(matcher)) > 2


def test_a_token_that_no_mask_allowed_raises():
    speaker = demo()
    matcher = speaker.matcher(FORMS["choice"])
    with pytest.raises(RequestError, match=r"structured_outputs\.choice: the output cannot go on"):
        matcher.advance(speaker.tokenizer.encode("maybe", False))
    with pytest.raises(RequestError):
        matcher.write_mask(speaker.words)
    with pytest.raises(RequestError):
        matcher.rollback(1)


def test_a_token_after_the_end_is_a_fault():
    speaker = demo()
    matcher = speaker.matcher(StructuredOutputs(choice=["a"]))
    matcher.advance([*speaker.tokenizer.encode("a", False), speaker.eos])
    with pytest.raises(AssertionError, match="came after the end"):
        matcher.advance(speaker.tokenizer.encode("b", False))


def test_a_form_that_the_vocabulary_cannot_spell_is_refused():
    tokenizer = SPEAKERS["bytes"]().tokenizer
    short = Grammars(make_vocabulary(tokenizer, 100, (0,)))
    missing = next(chr(byte) for byte in range(0x20, 0x7F) if tokenizer.encode(chr(byte), False)[0] >= 100)
    with pytest.raises(RequestError, match="cannot be honoured"):
        short.matcher(StructuredOutputs(choice=[missing]), (0,))


def test_the_mask_must_be_as_long_as_the_vocabulary():
    matcher = demo().matcher(FORMS["json"])
    with pytest.raises(ValueError):
        matcher.write_mask(np.zeros(5, np.int32))


def test_a_pattern_of_white_space_has_a_limit():
    with pytest.raises(RequestError, match=r"whitespace_pattern is larger than 1,000 bytes"):
        StructuredOutputs(json_object=True, whitespace_pattern=" " * 1_001)
