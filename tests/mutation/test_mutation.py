"""Every protection of the engine, taken away alone, is noticed by the simulator; in place, none is missed."""

from __future__ import annotations

from pathlib import Path

import pytest
from mutation.run import table, try_site
from mutation.sites import NOT_YET, SITES
from simulation.run import sound_world
from simulation.scenario import draw

SEEDS = 500
SOUND = 30
"""Enough for the rarest of what is forged, a score: the first one is that of seed 29."""
NAMES = [site.name for site in SITES]


@pytest.mark.parametrize("site", SITES, ids=NAMES)
def test_a_protection_taken_away_is_noticed(site):
    verdict = try_site(site, SEEDS)
    print(table([verdict]))
    assert verdict.how, f"{site.name}: not noticed in {SEEDS} seeds"


@pytest.mark.parametrize("site", [site for site in SITES if site.alone.__name__ != "untouched"], ids=lambda s: s.name)
def test_the_sound_engine_passes_where_nothing_else_covers_for_the_protection(site):
    for seed in range(SOUND):
        sound_world(draw(seed), site.alone).run()


def test_every_kind_of_hazard_that_exists_by_now_has_a_site():
    here, later = {site.hazard for site in SITES}, [row for rows in NOT_YET.values() for row in rows]
    assert sorted([*here, *later]) == list(range(1, 26)), "each row of the list has a site or waits for a part"
    assert len(set(NAMES)) == len(NAMES)


def test_the_readme_counts_the_safeguards_that_are_taken_away():
    readme = Path(__file__).parents[2] / "README.md"
    assert f"any one of {len(SITES)} safeguards" in " ".join(readme.read_text(encoding="utf-8").split())
