"""Digests of prefixes: a chain of SHA-256 over tagged fields."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gapless.memory.prefix import PrefixChain, PrefixHasher


def direct(model, size, tokens, salt):
    """The digests, written down from the format."""

    def field(tag, value):
        return len(tag).to_bytes(4, "little") + tag + len(value).to_bytes(8, "little") + value

    head = field(b"format", b"gapless.kv.1") + field(b"model", model.encode("utf-8"))
    parent, found = sha256(head + field(b"salt", salt.encode("utf-8"))).digest(), []
    for page in range(len(tokens) // size):
        words = b"".join(token.to_bytes(4, "little") for token in tokens[page * size : (page + 1) * size])
        parent = sha256(parent + words).digest()
        found.append(parent)
    return found


def pages(hasher, tokens, salt=""):
    """Digests of all full pages."""
    return hasher.after(hasher.root(salt), tokens)


tokens_of = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@settings(deadline=None, database=None, derandomize=True)
@given(st.text(max_size=8), st.integers(1, 9), tokens_of, st.text(max_size=8))
def test_digests_are_those_of_the_format(model, size, tokens, salt):
    hasher = PrefixHasher(model, size)
    assert pages(hasher, np.array(tokens, np.int32), salt) == direct(model, size, tokens, salt)


@settings(deadline=None, database=None, derandomize=True)
@given(tokens_of, tokens_of)
def test_equal_digests_mean_equal_prefixes_and_the_other_way_round(left, right):
    hasher = PrefixHasher("m", 3)
    pairs = list(zip(*(pages(hasher, np.array(t, np.int32)) for t in (left, right)), strict=False))
    for page, (a, b) in enumerate(pairs):
        assert (a == b) == (left[: 3 * page + 3] == right[: 3 * page + 3])


@pytest.mark.parametrize(
    ("one", "other"),
    [(("m", "s"), ("m", "t")), (("m", "s"), ("n", "s")), (("ms", ""), ("m", "s")), (("m", ""), ("m", "salt"))],
)
def test_models_and_tenants_never_share(one, other):
    tokens = np.arange(8, dtype=np.int32)
    first, second = (set(pages(PrefixHasher(model, 4), tokens, salt)) for model, salt in (one, other))
    assert not first & second


def test_one_page_on_its_own_continues_the_chain():
    hasher, tokens = PrefixHasher("m", 4), np.arange(12, dtype=np.int32)
    parent = hasher.root("s")
    for page, digest in enumerate(pages(hasher, tokens, "s")):
        assert hasher.after(parent, tokens[4 * page : 4 * page + 4]) == [digest]
        parent = digest


def test_the_word_size_and_layout_of_the_tokens_do_not_matter():
    hasher, tokens = PrefixHasher("m", 4), np.arange(24, dtype=np.int32)
    expected = pages(hasher, tokens)
    assert pages(hasher, tokens.astype(np.int64)) == expected
    assert pages(hasher, np.repeat(tokens, 2)[::2]) == expected


def test_a_salt_that_is_not_proper_unicode_is_a_salt_all_the_same():
    hasher = PrefixHasher("m", 4)
    assert len({hasher.root("\ud800"), hasher.root("\ud801"), hasher.root("?")}) == 3


def test_equal_prompts_share_what_is_computed_and_what_they_generate_is_their_own():
    hasher, tokens = PrefixHasher("m", 4), np.arange(20, dtype=np.int32)
    prompt = PrefixChain(hasher, "s", 2)  # of eight tokens, say
    assert prompt.up_to(2) is prompt and prompt.reach(1, tokens) == pages(hasher, tokens[:4], "s")
    one, other = prompt.up_to(4), prompt.up_to(4)
    continued = np.concatenate((tokens[:8], tokens[:8]))
    assert one.reach(4, continued) == pages(hasher, continued, "s")
    assert other.reach(4, tokens) == pages(hasher, tokens[:16], "s")
    assert prompt.reach(2, tokens) == pages(hasher, tokens[:8], "s")
    with pytest.raises(AssertionError, match="past the prompt"):
        prompt.reach(3, tokens)
