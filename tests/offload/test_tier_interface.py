"""Every tier against a dictionary: what it gives is what it was given last, and every job ends once."""

from __future__ import annotations

from threading import Timer

import pytest
from dictionary_tier import DictionaryTier, LateTier
from sharpest import sharpest
from tier_kinds import KINDS, OpenTier, TierKind
from tier_model import QUIET_SECONDS, TierModel
from tier_rig import checksum, content, end_of, key, page, slot_of

from gapless.offload.tiers.seam import Namespace

STEPS = 150
EVERY = [pytest.param(name, marks=[pytest.mark.net] * bool(kind.server or kind.needs)) for name, kind in KINDS.items()]
KEEPING = [one for one in EVERY if KINDS[one.values[0]].keeps]


@pytest.fixture
def opening(request, tmp_path, monkeypatch, tier_servers):
    """Opens tiers of a kind, each in a namespace of its own, and closes them."""
    monkeypatch.setattr("gapless.offload.tiers.history.GENERATIONS", 16)  # tests drop the same pages over and over
    monkeypatch.setattr("gapless.offload.tiers.lmcache.LOWER_LOOKUP_SECONDS", 5.0)
    every = []

    def opened(name):
        folder = tmp_path / str(len(every))
        folder.mkdir()
        every.append(OpenTier(name, tier_servers, folder, Namespace.of({"test": f"{request.node.name} {len(every)}"})))
        return every[-1]

    yield opened
    for one in every:
        one.stop()


@pytest.mark.parametrize("name", KEEPING)
def test_a_load_keeps_the_good_pages_in_front(name, opening):
    one = opening(name)
    opened, setup = one.tier, one.setup
    opened.store(1, [page(setup, number, number, 0) for number in (0, 1, 3)])
    assert end_of(opened, 1).checksums == tuple(checksum(content(number)) for number in (0, 1, 3))
    opened.load(2, [page(setup, number, 8 + number) for number in range(4)])
    end = end_of(opened, 2)
    assert end.checksums == (checksum(content(0)), checksum(content(1))) and end.failed
    assert [bytes(slot_of(setup, 8 + number)) for number in range(2)] == [content(0), content(1)]


@pytest.mark.parametrize("rest", sharpest([False, True]))
@pytest.mark.parametrize("name", EVERY)
def test_jobs_that_overlap_and_are_cancelled_end_once_and_move_the_stored_pages(name, rest, opening):
    loaded = cancelled = most = 0
    first = -(-KINDS[name].seeds // 4)
    seeds = range(first, KINDS[name].seeds) if rest else range(first)
    for seed in seeds:
        one = opening(name)
        model = TierModel(one, seed)
        model.run(STEPS)
        loaded, cancelled, most = loaded + model.loaded, cancelled + model.cancelled, max(most, model.most)
        one.stop()
    assert not seeds or (most >= 4 and cancelled > 5 * len(seeds) and loaded > 4 * len(seeds))


class Repeats(DictionaryTier):
    """Says of each job twice that it has ended."""

    before = ()

    def poll(self):
        ended = super().poll()
        self.before, again = ended, self.before
        return [*ended, *again]


class WritesLater(DictionaryTier):
    """Fills the slots of a load after its end."""

    late = ()

    def load(self, job, pages):
        for page_ in self.late:
            page_.slot[:8] = b"too late"
        super().load(job, pages)
        self.late = pages


class WritesStores(DictionaryTier):
    """Uses the slots of a store for itself."""

    def store(self, job, pages):
        super().store(job, pages)
        pages[-1].slot[:1] = b"!"


TIMERS: list[Timer] = []


class WritesWhenClosed(LateTier):
    """Goes on with the jobs under way after it was closed."""

    def close(self):
        waiting = [page_ for _, loads, pages in self._later if loads for page_ in pages]
        super().close()
        for page_ in waiting:
            TIMERS.append(Timer(QUIET_SECONDS / 4, page_.slot.__setitem__, (slice(8), b"too late")))
            TIMERS[-1].start()


class ForgetsJobs(LateTier):
    """Takes a job that is cancelled for one that has ended."""

    def cancel(self, job):
        self._later = [one for one in self._later if one[0] != job]


class GivesOthers(DictionaryTier):
    """Gives another page than it was asked for, with that page's checksum."""

    def load(self, job, pages):
        super().load(job, pages)
        if pages[0].key in self.kept:
            data, sum_ = self.kept[max(self.kept)]
            pages[0].slot[:] = data
            self.ended[-1] = self.ended[-1]._replace(checksums=(sum_, *self.ended[-1].checksums[1:]))


class WrongSum(DictionaryTier):
    """Gives each page the checksum of the one before it."""

    def load(self, job, pages):
        super().load(job, pages)
        sums = self.ended[-1].checksums
        self.ended[-1] = self.ended[-1]._replace(checksums=sums[1:] + sums[:1])


class NeverDrops(DictionaryTier):
    """Keeps what it is to drop."""

    def drop(self, keys): ...


class LosesPages(DictionaryTier):
    """Has lost a page that it finds."""

    def load(self, job, pages):
        kept, self.kept = self.kept, {one: page_ for one, page_ in self.kept.items() if one != key(7)}
        super().load(job, pages)
        self.kept = kept


class Unclosed(LateTier):
    """Leaves jobs open when it is closed."""

    def close(self):
        self._later = []


@pytest.mark.parametrize("tier, words", [
    (Repeats, "ended twice"), (WritesLater, "which no load has"), (WritesStores, "which no load has"),
    (WritesWhenClosed, "after the tier was closed"), (ForgetsJobs, "do not end"), (GivesOthers, "is another"),
    (WrongSum, "another checksum"), (NeverDrops, "is another|which were dropped"), (LosesPages, "are lost"),
    (Unclosed, "have not ended with the tier"),
])  # fmt: skip
def test_a_planted_fault_of_a_tier_is_noticed(tier, words, opening, monkeypatch):
    monkeypatch.setattr("tier_model.END_SECONDS", 0.2 if tier is ForgetsJobs else 60.0)
    monkeypatch.setattr("tier_model.quiet", lambda: [timer.join() for timer in TIMERS])
    steady = LateTier not in tier.__mro__
    for seed in range(3):
        with pytest.raises(AssertionError, match=words):
            TierModel(opening(TierKind(tier, keeps=steady)), seed).run(STEPS)
