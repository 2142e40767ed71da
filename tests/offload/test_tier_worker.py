"""The thread of a tier: nothing that a tier does, or does not do, stops it, and every job ends once."""

from __future__ import annotations

import threading

import pytest
from dictionary_tier import DictionaryTier, LateTier
from tier_rig import SLOT, Hand, content, key, page, setup_of, slot_of, stored
from waiting import until

from gapless.base.records import KVTransfer
from gapless.offload.tiers.seam import Found, JobEnd, TierAnswer
from gapless.offload.tiers.worker import IN_TIME, TierWorker


class Rig:
    """A worker over a tier of a kind, whose turns are taken by hand, on a clock that is set."""

    def __init__(self, kind, **options):
        self.setup, self.clock = setup_of(""), Hand()
        self.tier = kind(self.setup, **options)
        self.worker = TierWorker("test", self.tier, lambda: None, self.clock)

    def store(self, job, number, slot=0):
        self.worker.store(job, [page(self.setup, number, slot, 0)])

    def load(self, job, number, slot=0, seconds=1.0):
        self.worker.load(job, [page(self.setup, number, slot)], seconds)

    def ask(self, question, *numbers, seconds=1.0):
        self.worker.ask(question, [key(number) for number in numbers], seconds)

    def news(self):
        """What has come once all orders are taken, and after one more look at what is pending."""
        while self.worker.turn():
            pass
        self.worker.turn()
        return self.worker.take()


class SizedDictionary(DictionaryTier):
    """Says how much it keeps; raises in the end."""

    wrong = False

    @property
    def room(self):
        if self.wrong:
            raise OSError("the disk is away")
        return len(self.kept) * SLOT, 9 * SLOT


def test_the_size_of_a_tier_is_read_after_each_job_and_may_fail():
    rig = Rig(SizedDictionary)
    rig.store(1, 0)
    rig.store(2, 1)
    rig.news()
    assert rig.worker.room() == (2 * SLOT, 9 * SLOT)
    rig.tier.wrong = True
    rig.store(3, 2)
    rig.news()
    assert rig.worker.room() == (2 * SLOT, 9 * SLOT) and "the disk is away" in rig.worker.error


class RoomyDictionary(DictionaryTier):
    """Has something else by the name of `room`."""

    def room(self):
        return 1, 2


@pytest.mark.parametrize(("kind", "error"), [(DictionaryTier, ""), (RoomyDictionary, "TypeError")])
def test_a_tier_whose_room_is_no_pair_of_numbers_has_no_size(kind, error):
    rig = Rig(kind)
    rig.store(1, 0)
    rig.news()
    assert rig.worker.room() == (0, 0) and rig.worker.error.startswith(error)


@pytest.fixture
def started():
    """Starts the thread of a worker, and closes it."""
    workers = []

    def start(tier, ring=lambda: None):
        workers.append(TierWorker("test", tier, ring))
        workers[-1].start()
        return workers[-1]

    yield start
    for worker in workers:
        worker.close(0.5)


def test_orders_to_the_thread_are_answered_and_each_news_rings(started):
    rung, setup = threading.Event(), setup_of("")
    worker = started(DictionaryTier(setup), rung.set)

    def news():
        assert rung.wait(30)
        rung.clear()
        (one,) = worker.take()
        return one

    worker.store(1, [page(setup, 0, 0, 0), page(setup, 1, 1, 0)])
    end = news()
    assert end.job == 1 and len(end.checksums) == 2 and not end.failed and end.seconds > 0
    worker.ask(2, [key(0), key(7)], 1.0)
    assert news() == TierAnswer(2, (True, False))
    worker.load(3, [page(setup, 1, 5)], 1.0)
    assert news().job == 3 and slot_of(setup, 5) == content(1)
    worker.drop([key(0)])
    worker.ask(4, [key(0)], 1.0)
    assert news() == TierAnswer(4, (False,))


class InTurn(DictionaryTier):
    """Takes loads at once, and ends one each time that it is let."""

    due = ()

    def load(self, job, pages):
        self.due = (*self.due, (job, pages))

    def end_one(self):
        (job, pages), *rest = self.due
        self.due = tuple(rest)
        super().load(job, pages)


def test_a_load_that_waited_for_others_counts_its_own_time_alone():
    rig = Rig(InTurn)
    stored(rig.tier, rig.setup, 0)
    for job in range(2, 12):
        rig.load(job, 0, slot=job, seconds=50.0)
    assert rig.news() == []
    for job in range(2, 12):
        rig.clock.now += 1.0
        rig.tier.end_one()
        (end,) = rig.news()
        assert (end.job, end.seconds, len(end.checksums)) == (job, 1.0, 1)


def test_every_job_of_a_late_tier_ends_once(started):
    setup = setup_of("")
    worker, ends = started(LateTier(setup, seed=5)), []
    for job in range(1, 200):
        if job % 3:
            worker.store(job, [page(setup, job % 8, job % 16, 0)])
        else:
            worker.load(job, [page(setup, job % 8, 15)], 60.0)
    until(lambda: ends.extend(worker.take()) or len(ends) >= 199)
    assert sorted(end.job for end in ends) == list(range(1, 200))


def test_a_question_that_stays_pending_is_a_miss_at_its_deadline():
    class Undecided(DictionaryTier):
        def lookup(self, keys):
            return [Found.PENDING if one == key(1) else Found.HIT for one in keys]

    rig = Rig(Undecided)
    rig.ask(1, 0, 1)
    rig.clock.now += IN_TIME
    assert rig.news() == []
    rig.clock.now += 0.001
    assert rig.news() == [TierAnswer(1, (True, False))]


def test_pages_that_a_peer_has_by_now_are_told_at_once_to_a_request_that_claims_them():
    class Coming(DictionaryTier):
        def lookup(self, keys):
            lacks = Found.MISS if ended else Found.PENDING
            return [found if found is Found.HIT else lacks for found in super().lookup(keys)]

    ended = []
    rig = Rig(Coming)
    stored(rig.tier, rig.setup, 0)
    rig.ask(1, 0, 1, 2)
    rig.worker.ask(2, [key(0), key(1), key(2)], 1.0, KVTransfer("", "R"))
    assert rig.news() == [TierAnswer(2, (True, False, False), True)], "the other is not told half of it"
    stored(rig.tier, rig.setup, 0, 1)
    assert rig.news() == [TierAnswer(2, (False, True, False), True)], "what is new"
    ended.append(True)
    assert rig.news() == [TierAnswer(number, (True, True, False)) for number in (1, 2)]


def test_a_question_is_looked_at_once_more_when_its_deadline_has_passed():
    class Slow(DictionaryTier):
        def lookup(self, keys):
            found = super().lookup(keys) if rig.clock.now > 100.0 else [Found.PENDING for _ in keys]
            rig.clock.now = 101.0
            return found

    rig = Rig(Slow)
    stored(rig.tier, rig.setup, 0)
    rig.ask(1, 0)
    assert rig.news() == [TierAnswer(1, (True,))]


def test_a_tier_that_raises_has_failed_the_job_and_goes_on():
    class Broken(DictionaryTier):
        broken = True

        def lookup(self, keys):
            return super().lookup(keys) if not self.broken else [][1]

        def store(self, job, pages):
            assert not self.broken, "out of order"
            super().store(job, pages)

        def drop(self, keys):
            raise OSError("no")

        load = store

    rig = Rig(Broken)
    rig.store(1, 0)
    rig.load(2, 0)
    rig.ask(3, 0)
    rig.worker.drop([key(0)])
    found = rig.news()
    assert {one.job: one.failed for one in found if isinstance(one, JobEnd)} == {1: True, 2: True}
    assert len(found) == 3 and TierAnswer(3, (False,)) in found
    rig.ask(5, 0)
    rig.news()
    assert rig.worker.error == "IndexError: list index out of range"
    rig.tier.broken = False
    rig.store(4, 0)
    assert not rig.news()[0].failed


def test_a_tier_that_answers_with_nonsense_stops_nothing_and_has_nothing():
    answers = [1, True, (Found.HIT for _ in range(3)), [Found.HIT], None]

    class Nonsense(DictionaryTier):
        ends = ()

        def lookup(self, keys):
            return answers.pop()

        def store(self, job, pages):
            self.ends = (None, JobEnd(job, ("?",)), JobEnd(job, ()))

        def load(self, job, pages):
            self.ends = (JobEnd(job, (1, 2, 3), True, None), JobEnd(job, ()))
            if job == 3:
                self.ends = (JobEnd(job, (1, 2, 3), True),)

        def poll(self):
            return self.ends

    rig = Rig(Nonsense)
    for number in range(len(answers)):
        rig.ask(number, 0, 1)
        assert rig.news() == [TierAnswer(number, (False, False))]
    rig.load(3, 0)
    assert rig.news() == [JobEnd(3, (1,))], "all pages came, so nothing has failed"
    rig.load(4, 0)
    assert rig.news() == [JobEnd(4, (), True)]
    rig.store(5, 0)
    assert rig.news() == [JobEnd(5, (), True)]


def test_a_job_that_a_tier_ends_twice_has_ended_once():
    class Eager(DictionaryTier):
        def poll(self):
            return [end for end in super().poll() for _ in range(2)] + [JobEnd(77, ())]

    rig = Rig(Eager)
    rig.store(1, 0)
    rig.store(2, 1)
    assert [end.job for end in rig.news()] == [1, 2]
    assert rig.news() == []


def test_questions_go_before_loads_that_wait_and_loads_before_stores():
    order = []

    class Watched(DictionaryTier):
        def store(self, job, pages):
            order.append(job)
            super().store(job, pages)

        def load(self, job, pages):
            order.append(job)
            super().load(job, pages)

        def lookup(self, keys):
            order.append("asked")
            return super().lookup(keys)

    rig = Rig(Watched)
    for job in (1, 2, 3):
        rig.store(job, job)
    rig.worker.turn()
    rig.load(4, 1)
    rig.load(5, 1)
    rig.ask(6, 1)
    assert len(rig.news()) == 6 and order == [1, "asked", 4, 5, 2, 3]


def test_a_late_load_is_cancelled_and_ends_when_the_tier_says_so():
    class Stuck(DictionaryTier):
        asked, free = (), False

        def load(self, job, pages):
            pass

        def cancel(self, job):
            self.asked = (*self.asked, job)

        def poll(self):
            return [JobEnd(job, ()) for job in self.asked if self.free]

    rig = Rig(Stuck)
    rig.load(1, 0)
    assert rig.news() == [] and rig.tier.asked == ()
    rig.clock.now += 1.1
    assert rig.news() == [], "its slots are the tier's until it says that it has ended"
    assert rig.news() == [] and rig.tier.asked == (1,)
    rig.tier.free = True
    (end,) = rig.news()
    assert end.job == 1 and not end.failed


def test_a_load_that_is_late_before_it_begins_never_does():
    class Unasked(DictionaryTier):
        def load(self, job, pages):
            raise AssertionError("begun")

    rig = Rig(Unasked)
    rig.load(1, 0)
    rig.clock.now += 1.1
    (end,) = rig.news()
    assert end.checksums == () and not end.failed and rig.worker.error == ""


def test_closing_stores_waiting_pages_and_gives_up_on_a_store_that_hangs(started):
    setup = setup_of("")
    worker = started(tier := DictionaryTier(setup))
    for job in range(20):
        worker.store(job, [page(setup, job, job % 16, 0)])
    worker.close()
    assert tier.closed and len(tier.kept) == 20

    class Hung(DictionaryTier):
        def store(self, job, pages):
            pass

    worker = started(tier := Hung(setup))
    worker.store(1, [page(setup, 0, 0, 0)])
    worker.close(0.1)
    until(lambda: tier.closed)
