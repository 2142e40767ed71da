"""The text so far is always the full decode of the ids so far, less a tail that is not settled."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import ALL, byte_fallback, byte_level

from gapless.text.incremental import SEED_TOKENS, Detokenizer

TOKENIZERS = {name: make() for name, make in ALL.items()}
SENTENCES = [
    "hello a b",
    "你你好 a",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 he",  # a family of three, joined
    "e\u0301a\u0300 ll",  # combining marks
    "\U0001f1e9\U0001f1ea\U0001f1eb\U0001f1f7",  # two flags
    " a  b",
    "\ufffd a",  # a replacement character that is really in the text
    "नमस्ते",
    "\U0001f469\U0001f3fd",
]
NAMES = sorted(TOKENIZERS)


def ids_of(name: str):
    """Encoded text, special tokens in the middle, unknown ids, and plain noise (invalid UTF-8), mixed."""
    tokenizer = TOKENIZERS[name]
    sentence = st.sampled_from(SENTENCES) | st.text(max_size=6)
    encoded = sentence.map(lambda text: tokenizer.encode(text, add_special_tokens=False))
    noise = st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=6)
    special = st.sampled_from(sorted(tokenizer.special_ids)).map(lambda token: [token])
    return st.lists(encoded | noise | special, max_size=6).map(lambda parts: [i for part in parts for i in part])


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_every_prefix_and_split_equals_the_full_decode(name: str, skip: bool, data) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(ids_of(name))
    cuts = data.draw(st.lists(st.integers(0, 100), max_size=len(ids)))
    detokenizer = Detokenizer(tokenizer, skip)
    whole = tokenizer.decode(ids, skip)
    text, seen = "", 0
    for part in split(ids, cuts):
        text += "".join(map(detokenizer.push, part))
        seen += len(part)
        assert whole.startswith(text)
        assert tokenizer.decode(ids[:seen], skip).startswith(text)
    assert text + detokenizer.finish() == whole


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_finish_after_any_prefix_gives_its_full_decode(name: str, data) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(ids_of(name))
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.push(token) for token in ids)
    assert text + detokenizer.finish() == tokenizer.decode(ids)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_whole_character_is_not_held_back(name: str, sentence: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(sentence + " a", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push(token) for token in ids) == tokenizer.decode(ids)
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_text_continues_the_prompt(name: str, data) -> None:
    tokenizer = TOKENIZERS[name]
    prompt = tokenizer.encode(data.draw(st.sampled_from(["hello a", "a b", "hello"])))
    ids = tokenizer.encode(data.draw(st.sampled_from(SENTENCES)), add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, True, prompt)
    text = "".join(detokenizer.push(token) for token in ids) + detokenizer.finish()
    assert tokenizer.decode(prompt) + text == tokenizer.decode([*prompt, *ids])


def test_a_character_begun_in_the_prompt_is_finished() -> None:
    tokenizer = byte_level()
    ids = [tokenizer.token_id(c) for c in "ä½ł"]
    detokenizer = Detokenizer(tokenizer, True, ids[:2])
    assert "".join(map(detokenizer.push, ids[2:])) == "你"


def test_open_byte_run_is_not_shown_before_it_is_settled() -> None:
    # The decoder turns a run with one bad byte into replacement characters throughout.
    tokenizer = byte_fallback()
    good = [tokenizer.token_id(t) for t in ("<0xE4>", "<0xBD>", "<0xA0>")]
    bad = tokenizer.token_id("<0xFF>")
    detokenizer = Detokenizer(tokenizer)
    assert "".join(map(detokenizer.push, good)) == ""
    assert detokenizer.push(bad) == ""
    assert detokenizer.push(tokenizer.token_id("a")) == "����a"


def test_many_spaces_keep_the_window_small() -> None:
    tokenizer = byte_fallback()
    space = tokenizer.token_id("▁")
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.push(space) for _ in range(200))
    assert text == " " * 199
    assert len(detokenizer.push.__self__.context) <= SEED_TOKENS
