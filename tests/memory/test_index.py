"""The prefix index: hits that all page groups cover, digests computed once for equal prompts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from gapless.memory import prefix
from gapless.memory.groups import FULL, WindowRule
from gapless.memory.index import PrefixIndex, common_tokens
from gapless.memory.ledger import Ledger
from gapless.memory.pages import PagePool
from gapless.memory.prefix import PrefixHasher

SIZE = 4


def index_of(*rules):
    ledger = Ledger()
    pools = [PagePool(40, SIZE, ledger, rule) for rule in rules]
    return PrefixIndex(PrefixHasher("m", SIZE), pools), pools


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(0, 9, length).astype(np.int32)


def digests(index, tokens):
    return index.hasher.after(index.hasher.root(""), tokens)


@pytest.fixture
def hashed(monkeypatch):
    """Pages that were digested."""
    pages, after = [], prefix.PrefixHasher.after

    def count(self, parent, tokens):
        found = after(self, parent, tokens)
        pages.extend(found)
        return found

    monkeypatch.setattr(prefix.PrefixHasher, "after", count)
    return pages


def test_a_prompt_is_digested_once_for_all_that_have_it_and_not_before_it_is_needed(hashed):
    index, _ = index_of(FULL)
    tokens = prompt(4000)
    chains = [index.chain(tokens.copy(), "") for _ in range(64)]
    assert not hashed and len(set(map(id, chains))) == 1
    assert index.match(chains[0], tokens, 999)[0] == 0 and len(hashed) == 1, (
        "as far as the first page that is not there"
    )
    expected = digests(index, tokens)
    for chain in chains:
        assert chain.reach(1000, tokens) == expected
        hashed.clear()
    assert index.chain(tokens, "tenant") is not chains[0]


def test_prompts_with_a_common_beginning_digest_it_once(hashed):
    index, _ = index_of(FULL)
    system = prompt(400)
    first, second, third = (np.concatenate((system, prompt(40, seed))) for seed in (1, 2, 3))
    chains = [index.chain(tokens, "") for tokens in (first, second, third)]
    assert chains[0] is not chains[1]
    chains[1].reach(105, second)
    hashed.clear()
    chains[0].reach(105, first)
    chains[2].reach(105, third)
    assert len(hashed) == 2 * 5
    for chain, tokens in zip(chains, (first, second, third), strict=True):
        assert chain.reach(110, tokens) == digests(index, tokens)


def test_tokens_in_common_are_counted_from_the_start():
    a = np.array([1, 2, 3], np.int32)
    assert [common_tokens(a, b) for b in (a, a[:2], a[:0], a + 1, np.array([1, 2, 4, 5]))] == [3, 2, 0, 0, 2]


@pytest.mark.parametrize("windows", [(0,), (6,), (0, 6), (0, 5, 9), (3, 17)])
def test_a_hit_is_the_longest_that_every_group_covers_and_only_a_page_in_its_gaps_lets_it_grow(windows):
    """Against the definition: everything in a full group, all pages of the last window in the others."""
    rng, tokens = random.Random(1), prompt(60)
    for _ in range(200):
        index, pools = index_of(*(WindowRule(window) if window else FULL for window in windows))
        chain, have = index.chain(tokens, ""), []
        known = chain.reach(15, tokens)
        for pool in pools:
            have.append({n for n in range(15) if rng.random() < 0.85})
            for number in have[-1]:
                pool.publish(pool.take(), known[number])

        def covered(count, have=have):
            first = [max(0, count * SIZE - w) // SIZE if w else 0 for w in windows]
            return all(set(range(low, count)) <= pages for low, pages in zip(first, have, strict=True))

        found, gaps = index.match(chain, tokens, 14)
        assert covered(found)
        assert not any(covered(count) for count in range(found + 1, 15))
        for pages, w, pool in zip(index.shared(chain, found), windows, pools, strict=True):
            first = max(0, found * SIZE - w) // SIZE if w else 0
            assert pages == [0] * first + [pool.find(digest) for digest in known[first:found]]
        for pool in pools:
            for digest in set(known) - set(gaps.get(pool, ())):
                pool.publish(pool.take(), digest)
        assert index.match(chain, tokens, 14)[0] == found, "only what fills a gap makes it longer"
        assert bool(gaps) == (found < 14)
