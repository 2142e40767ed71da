"""Every protection of the engine, taken away alone, is noticed by the simulator; in place, none is missed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from mutation.run import table, try_site
from mutation.sites import NOT_YET, SITES
from mutation.tools import Site, untouched
from sharpest import sharpest
from simulation.run import sound_world
from simulation.scenario import PAIRS, RANKS, draw

pytestmark = pytest.mark.unguarded

SEEDS = 500
SOUND = 10
NOTICED = {
    "pages wait for the owner's last step": 0,
    "an outbox slot waits until the host has read it": 0,
    "a score of an earlier generation is dropped": 138,
    "a slot is empty when its next row begins to count": 4,
    "a slot is filled before its row is sampled": 16,
    "a row that counts has the tokens of its prefix hit": 4,
    "a slot is loaded when no step reads it": 27,
    "an adapter is taken when its load has ended": 18,
    "a slot is loaded with one adapter at a time": 14,
    "KV of an adapter is found by that adapter alone": 16,
    "a name's other files are another adapter": 70,
    "an adapter without a name stays for its requests": 16,
    "a mask of the row's last request is none": 3,
    "a mask of another position is none": 3,
    "a row whose mask is late is held": 3,
    "a draft without a mask is not verified": 55,
    "a mask after drafts is of these drafts": 40,
    "a matcher goes back after drafts": 25,
    "a matcher that breaks along a guess ends no request": 25,
    "a matcher's copy follows what is settled": 25,
    "a mask is written before its tag": 3,
    "a reply has the tag of its token": 3,
    "a matcher follows what was settled meanwhile": 424,
    "a mask that allows no token ends its request, and not as bad KV does": 83,
    "a request whose matcher fails is ended": 83,
    "beside chunks, each draft has logits of its own": 63,
    "a page is shared with the step that computes it": 4,
    "a page that is stored is not given away": 15,
    "a page is shared once its load is acknowledged": 22,
    "a page that is loaded is not given away": 2,
    "each transfer has its number on a clock of its own": 15,
    "pages whose KV is in doubt are not shared": 6,
    "a row whose KV is in doubt publishes no page": 6,
    "a row has pages for all tokens of its next step": 2,
    "a window keeps the pages that it reads": 23,
    "a window's pages wait for the steps in flight": 61,
    "a prefix is shared as far as all groups have it": 125,
    "the host tier stores what was observed": 13,
    "the host tier's transfers end at their fences": 4,
    "a page of the host tier's store is not given away": 855,
    "a page is loaded where no step reads or writes": 4,
    "a copy stays while a load reads it": 148,
    "a copy stays while a store fills it": 148,
    "what is loaded is compared with what was stored": 62,
    "a copy in doubt is dropped": 69,
    "a page is not shared whose copy was lost under its load": 62,
    "places of a load stay until it has ended": 13,
    "checksums of a load stay until they are read": 771,
    "a slot stays while a tier below reads it": 4,
    "a slot stays while a tier below fills it": 25,
    "a copy is found when it has come from below": 13,
    "of a load that stops early the pages that came count": 13,
    "what the host has of a request makes no room for the rest": 13,
    "pages of other weights have other names": 80,
    "a page in doubt is dropped below": 219,
    "a page that was stored while it came in doubt is dropped below": 210,
    "a page that is lent makes no room": PAIRS + 59,
    "what was lent is back when its connection has ended": PAIRS + 4,
    "a page read in place counts when it was kept": PAIRS + 77,
    "a page that comes is the one that was asked for": PAIRS + 18,
    "a page that peers may take keeps its slot": PAIRS + 8,
    "what is lent goes back when it was read": PAIRS + 59,
    "what a request was lent goes back when it ends": PAIRS + 73,
    "what is lent has an end": PAIRS + 277,
    "what is borrowed goes back in time": PAIRS + 79,
    "no load begins of what should be back": PAIRS + 151,
    "memory of a peer stays while pages are borrowed": PAIRS + 9,
    "a slot stays while a peer fills it": PAIRS + 20,
    "a page from a peer is loaded where no step writes": PAIRS + 8,
    "a page from a peer is shared when it has come": PAIRS + 26,
    "peers of other weights have other names": PAIRS + 25,
    "a graph is kept if every rank has it": RANKS + 3,
    "a capture meets no other rank": RANKS + 1,
    "news of a row have all tokens of a step": RANKS + 36,
    "news of a row have its drafts": RANKS + 2,
    "a rank that follows has no drafts of its own": RANKS + 2,
}
"""A seed that notices, of those protections that the first few do not. Another one is looked for where it does not."""
NAMES = [site.name for site in SITES]


SHARP = (
    "the ledger holds what is retired until its fence",
    "rows wait for the owner's last step",
    "only an observed fence completes a step",
    "a packet slot waits for the copy that reads it",
    "each step in flight has its own lines on the device",
    "the token copy waits for the step",
    "the host reads behind the step's last fence",
    "a line of an earlier generation is dropped",
    "a row whose mask is late is held",
    "a page that is stored is not given away",
    "a page of the host tier's store is not given away",
    "a page from a peer is shared when it has come",
    "a rank hears the news of every step",
)
"""Those that `make test` takes away, of every kind some."""


def check_noticed(site: Site, record_property: Callable[[str, object], None]) -> None:
    record_property("mutation", site.name)
    verdict = try_site(site, 1, NOTICED.get(site.name, site.first))
    if verdict.how is None:
        verdict = try_site(site, SEEDS)
    print(table([verdict]))
    assert verdict.how, f"{site.name}: not noticed in {SEEDS} seeds"


@pytest.mark.parametrize("name", SHARP)
def test_a_sharp_protection_taken_away_is_noticed(name, record_property):
    check_noticed(SITES[NAMES.index(name)], record_property)


@pytest.mark.seeds
@pytest.mark.parametrize("site", SITES, ids=NAMES)
def test_a_protection_taken_away_is_noticed(site, record_property):
    check_noticed(site, record_property)


@pytest.mark.parametrize("site", sharpest(site for site in SITES if site.alone is not untouched), ids=lambda s: s.name)
def test_the_sound_engine_passes_where_nothing_else_covers_for_the_protection(site):
    """Nor does it fail in the seed in which the broken one does."""
    for seed in {*range(SOUND), NOTICED.get(site.name, site.first)}:
        sound_world(draw(seed), site.alone).run()


def test_every_kind_of_hazard_that_exists_by_now_has_a_site():
    here, later = {site.hazard for site in SITES}, [row for rows in NOT_YET.values() for row in rows]
    assert sorted([*here, *later]) == list(range(1, 26)), "each row of the list has a site or waits for a part"
    assert len(set(NAMES)) == len(NAMES)


def test_the_readme_counts_the_safeguards_that_are_taken_away():
    readme = Path(__file__).parents[2] / "README.md"
    assert f"any one of {len(SITES)} safeguards" in " ".join(readme.read_text(encoding="utf-8").split())


def test_the_table_of_the_proof_has_every_safeguard_once():
    kept = json.loads(
        (Path(__file__).parents[2] / "docs" / "measurements" / "mutation.json").read_text(encoding="utf-8")
    )
    assert sorted(name for name, _, _ in kept["rows"]) == sorted(NAMES), (
        'run make mutation ARGS="--out docs/measurements/mutation.json", and docs/_site/tables.py'
    )
