"""The text so far is always the full decode of the ids so far, less a tail that is not settled."""

from itertools import groupby, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sharpest import sharpest
from tokenizers import decoders
from vocabularies import ALL, byte_fallback, byte_level

from gapless.text.incremental import SEED_TOKENS, Detokenizer, whole_text
from gapless.text.tokenizer import Tokenizer

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


def decoded(tokenizer, ids: list[int], skip: bool = True) -> str:
    """The decode of the library, but that of a run of bytes with one of no character only that one is replaced."""
    tokens = [tokenizer.token_str(token) for token in ids if not (skip and token in tokenizer.special_ids)]
    if not tokenizer.byte_ids:
        return tokenizer.decode(ids, skip)
    kept: list[str] = []
    for is_byte, run in groupby(filter(None, tokens), lambda token: token[:3] == "<0x" and len(token) == 6):
        run = list(run)
        if is_byte:
            data = bytes(int(token[3:5], 16) for token in run)
            try:
                data.decode()
            except UnicodeDecodeError:
                run = list(replaced(data))
        kept += run
    return tokenizer.backend.decoder.decode(kept)


def replaced(data: bytes):
    """Characters, and U+FFFD for each byte that is part of none; the longest that is a character is one."""
    while data:
        sizes = [size for size in (1, 2, 3, 4) if is_text(data[:size])]
        yield data[: sizes[0]].decode() if sizes else "\ufffd"
        data = data[sizes[0] if sizes else 1 :]


def is_text(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def split(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(edges)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("skip", sharpest([True, False]))
@settings(derandomize=True, max_examples=150, deadline=None)
@given(data=st.data())
def test_every_prefix_and_split_equals_the_full_decode(name: str, skip: bool, data) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(ids_of(name))
    cuts = data.draw(st.lists(st.integers(0, 100), max_size=len(ids)))
    detokenizer = Detokenizer(tokenizer, skip)
    whole = decoded(tokenizer, ids, skip)
    text, seen = "", 0
    for part in split(ids, cuts):
        text += "".join(map(detokenizer.push, part))
        seen += len(part)
        assert whole.startswith(text)
        assert decoded(tokenizer, ids[:seen], skip).startswith(text)
    assert text + detokenizer.finish() == whole == whole_text(tokenizer, ids, skip)


@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
@pytest.mark.parametrize("sentence", SENTENCES)
def test_a_whole_character_is_not_held_back(name: str, sentence: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(sentence + " a", add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer)
    assert "".join(detokenizer.push(token) for token in ids) == tokenizer.decode(ids)
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("name", NAMES)
@settings(derandomize=True, max_examples=100, deadline=None)
@given(data=st.data())
def test_text_continues_the_prompt(name: str, data) -> None:
    tokenizer = TOKENIZERS[name]
    prompt = tokenizer.encode(data.draw(st.sampled_from(["hello a", "a b", "hello"])))
    ids = tokenizer.encode(data.draw(st.sampled_from(SENTENCES)), add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, True, prompt)
    text = "".join(detokenizer.push(token) for token in ids) + detokenizer.finish()
    assert tokenizer.decode(prompt) + text == tokenizer.decode([*prompt, *ids])


RUNS = [
    (["0A"], ["\n"], ""),
    (["F0", "9F", "91", "8B"] * 2, ["", "", "", "👋"] * 2, ""),
    (["0A", "0A", "▁a"], ["\n", "\n", " a"], ""),
    (["20", "20", "a"], ["", " ", "a"], ""),  # the decoder strips the first space of a text
    (["a", "20", "▁"], ["a", " ", " "], ""),
    (["EF", "BF", "BD", "0A"], ["", "", "�", "\n"], ""),
    (["E4", "BD", "A0", "FF", "a"], ["", "", "你", "�", "a"], ""),
    (["0A", "FF", "0A", "C3", "A9"], ["\n", "�", "\n", "", "é"], ""),
    (["E2", "82", "0A"], ["", "", "��\n"], ""),
    (["E2", "82", "▁a"], ["", "", "�� a"], ""),
    (["E2", "82", "F0", "9F", "91", "8B"], ["", "", "��", "", "", "👋"], ""),
    (["ED", "A0", "80", "▁a"], ["", "", "���", " a"], ""),  # half a surrogate pair
    (["F0", "9F", "</s>", "91", "8B"], ["", "", "", "", "👋"], ""),  # a token that is skipped ends no run
    (["a", "F0", "9F", "91"], ["a", "", "", ""], "���"),
    (["FF"] * 20 + ["▁a"], ["�"] * 20 + [" a"], ""),
    (["FF", *["C3", "A9"] * 9, "▁a"], ["�", *["", "é"] * 9, " a"], ""),
]


@pytest.mark.parametrize(("tokens", "texts", "rest"), RUNS)
def test_bytes_are_text_as_soon_as_they_make_a_character(tokens: list[str], texts: list[str], rest: str) -> None:
    tokenizer = byte_fallback()
    ids = [tokenizer.token_id(f"<0x{token}>" if len(token) == 2 and token[0] != "▁" else token) for token in tokens]
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.push(token) for token in ids] == texts
    assert detokenizer.finish() == rest
    assert whole_text(tokenizer, ids) == "".join(texts) + rest


CUT = ["\n" * 12, "é" * 5, "a" + "👋" * 3, "👋" * 4 + "\n", " \n \n \n \n ", "he\n\n\n\n\n\n\n\n"]


@pytest.mark.parametrize("text", CUT)
@pytest.mark.parametrize("more", ["▁a", "a", "\n", "👋", " "])
def test_text_goes_on_after_bytes_wherever_the_prompt_ends(text: str, more: str) -> None:
    tokenizer = byte_fallback()
    added = [tokenizer.token_id(more)] if tokenizer.token_id(more) is not None else [
        tokenizer.token_id(f"<0x{byte:02X}>") for byte in more.encode()
    ]  # fmt: skip
    ids = [*tokenizer.encode(text), *added, tokenizer.token_id("▁b")]
    starts = [at for at in range(1, len(ids)) if "\ufffd" not in tokenizer.decode(ids[:at])]
    for at in starts:
        detokenizer = Detokenizer(tokenizer, True, ids[:at])
        said = "".join(map(detokenizer.push, ids[at:])) + detokenizer.finish()
        assert tokenizer.decode(ids[:at]) + said == tokenizer.decode(ids)


@pytest.mark.parametrize("make", [byte_level, byte_fallback])
def test_a_character_that_the_prompt_begins_is_whole_with_its_last_byte(make) -> None:
    tokenizer = make()
    names = "ðŁĳĭ" if make is byte_level else ["<0xF0>", "<0x9F>", "<0x91>", "<0x8B>"]
    ids = [tokenizer.token_id(name) for name in names]
    for at in (1, 2, 3):
        detokenizer = Detokenizer(tokenizer, True, [*tokenizer.encode("a"), *ids[:at]])
        assert [detokenizer.push(token) for token in ids[at:]] == [""] * (3 - at) + ["👋"]


def test_a_vocabulary_without_byte_fallback_shows_such_tokens_as_they_are_written() -> None:
    backend = byte_fallback().backend
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    tokenizer = Tokenizer(backend)
    token = tokenizer.token_id("<0xFF>")
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(token) == "<0xFF>" == tokenizer.token_bytes(token).decode()


def test_many_spaces_keep_the_window_small() -> None:
    tokenizer = byte_fallback()
    space = tokenizer.token_id("▁")
    detokenizer = Detokenizer(tokenizer)
    text = "".join(detokenizer.push(space) for _ in range(200))
    assert text == " " * 199
    assert len(detokenizer.push.__self__.context) <= SEED_TOKENS
