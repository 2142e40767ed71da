"""Every tier against a dictionary: what it gives is what it was given last, and every job ends once."""

from __future__ import annotations

import random
from threading import Timer

import pytest
from dictionary_tier import DictionaryTier, LateTier
from tier_kinds import KINDS, OpenTier, TierKind
from tier_model import QUIET_SECONDS, TierModel
from tier_rig import SLOTS, checksum, content, end_of, has, key, page, slot_of

from gapless.tiers.seam import Namespace

STEPS = 150


@pytest.fixture
def opening(request, tmp_path, monkeypatch, tier_servers):
    """Opens tiers of a kind, each in a namespace of its own, and closes them."""
    monkeypatch.setattr("gapless.tiers.history.GENERATIONS", 16)  # tests drop the same pages over and over
    every = []

    def opened(name):
        folder = tmp_path / str(len(every))
        folder.mkdir()
        every.append(OpenTier(name, tier_servers, folder, Namespace.of({"test": f"{request.node.name} {len(every)}"})))
        return every[-1]

    yield opened
    for one in every:
        one.stop()


@pytest.fixture(params=[*KINDS])
def tier(request, opening):
    """(an open tier, its setup, whether it keeps all that it stores)"""
    one = opening(request.param)
    return one.tier, one.setup, one.kind.keeps


def test_a_tier_gives_what_it_was_given(tier):
    opened, setup, keeps = tier
    rng = random.Random(3)
    known: dict[int, int] = {}
    """The version of each page that was stored and not dropped"""
    gone: set[int] = set()
    loads = hits = 0
    for job in range(1, 150):
        numbers = rng.sample(range(12), rng.randrange(1, 7))
        places = dict(zip(numbers, rng.sample(range(SLOTS), len(numbers)), strict=True))
        others = {slot: bytes(slot_of(setup, slot)) for slot in range(SLOTS) if slot not in places.values()}
        kind = rng.choice(("store", "load", "load", "drop", "touch"))
        if kind == "store":
            # A page that the tier has is the same page: its bytes follow from its key.
            versions = {number: known.get(number, job) for number in numbers}
            opened.store(job, [page(setup, number, slot, versions[number]) for number, slot in places.items()])
            end = end_of(opened, job)
            assert end.failed == (len(end.checksums) < len(numbers)) and (not keeps or not end.failed)
            known |= {number: versions[number] for number in numbers[: len(end.checksums)]}
            gone -= set(numbers[: len(end.checksums)])
            for number in numbers[len(end.checksums) :]:
                known.setdefault(number, versions[number])  # it may have come as far as that
        elif kind == "load":
            opened.load(job, [page(setup, number, slot) for number, slot in places.items()])
            end = end_of(opened, job)
            for number, sum_ in zip(numbers, end.checksums, strict=False):
                data = slot_of(setup, places[number])
                assert number in known and data == content(number, known[number]) and sum_ == checksum(data)
            loads += len(end.checksums)
        elif kind == "drop":
            opened.drop([key(number) for number in numbers[:2]])
            for number in numbers[:2]:
                known.pop(number, None)
                gone.add(number)
        else:
            opened.touch([key(number) for number in numbers])
        assert others == {slot: bytes(slot_of(setup, slot)) for slot in others}, "a slot of no job has changed"
        found = has(opened, *range(12))
        hits += sum(found)
        assert not any(found[number] for number in gone), "what was dropped is found"
        assert {number for number in range(12) if found[number]} <= set(known)
        assert not keeps or {number for number in range(12) if found[number]} == set(known)
        assert opened.poll() == [], "a job has ended twice"
    assert loads > (60 if keeps else 20) and hits > 300


def test_a_load_keeps_the_good_pages_in_front(tier):
    opened, setup, keeps = tier
    if not keeps:
        pytest.skip("it loses pages by itself")
    opened.store(1, [page(setup, number, number, 0) for number in (0, 1, 3)])
    assert end_of(opened, 1).checksums == tuple(checksum(content(number)) for number in (0, 1, 3))
    opened.load(2, [page(setup, number, 8 + number) for number in range(4)])
    end = end_of(opened, 2)
    assert end.checksums == (checksum(content(0)), checksum(content(1))) and end.failed
    assert [bytes(slot_of(setup, 8 + number)) for number in range(2)] == [content(0), content(1)]


@pytest.mark.parametrize("name", KINDS)
def test_jobs_that_overlap_and_are_cancelled_end_once_and_move_what_was_stored(name, opening):
    loaded = cancelled = most = 0
    for seed in range(KINDS[name].seeds):
        one = opening(name)
        model = TierModel(one, seed)
        model.run(STEPS)
        loaded, cancelled, most = loaded + model.loaded, cancelled + model.cancelled, max(most, model.most)
        one.stop()
    assert most >= 4 and cancelled > 5 * KINDS[name].seeds and loaded > 4 * KINDS[name].seeds


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


class WritesWhenClosed(LateTier):
    """Goes on with the jobs under way after it was closed."""

    def close(self):
        waiting = [page_ for _, loads, pages in self._later if loads for page_ in pages]
        super().close()
        for page_ in waiting:
            Timer(QUIET_SECONDS / 4, page_.slot.__setitem__, (slice(8), b"too late")).start()


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
    monkeypatch.setattr("tier_model.END_SECONDS", 0.2)
    steady = LateTier not in tier.__mro__
    for seed in range(3):
        with pytest.raises(AssertionError, match=words):
            TierModel(opening(TierKind(tier, keeps=steady)), seed).run(STEPS)
