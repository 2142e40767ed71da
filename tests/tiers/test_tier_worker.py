"""The thread of a tier: nothing that a tier does, or does not do, stops it, and every job ends once."""

from __future__ import annotations

import threading
import time

import pytest
from dictionary_tier import DictionaryTier, LateTier
from tier_rig import SLOT, content, key, page, setup_of, slot_of, stored

from gapless.base.records import KVTransfer
from gapless.tiers.seam import Found, JobEnd, TierAnswer
from gapless.tiers.worker import IN_TIME, TierWorker


class Rung:
    """Counts rings."""

    def __init__(self):
        self.count = 0
        self.event = threading.Event()

    def __call__(self):
        self.count += 1
        self.event.set()


def news(worker, count=1, seconds=5.0):
    """What comes, until there are `count` of them."""
    found, until = [], time.monotonic() + seconds
    while len(found) < count and time.monotonic() < until:
        found += worker.take()
        time.sleep(0.0005)
    assert len(found) == count, found
    return found


@pytest.fixture
def rig():
    workers = []

    def open_(kind, **options):
        setup = setup_of("")
        tier = kind(setup, **options)
        workers.append(TierWorker("test", tier, Rung()))
        workers[-1].start()
        return workers[-1], tier, setup

    yield open_
    for worker in workers:
        worker.close(0.5)


class SizedDictionary(DictionaryTier):
    """Says how much it keeps; raises in the end."""

    wrong = False

    @property
    def room(self):
        if self.wrong:
            raise OSError("the disk is away")
        return len(self.kept) * SLOT, 9 * SLOT


def test_a_tier_that_knows_its_size_is_asked_on_the_thread_and_may_fail(rig):
    worker, tier, setup = rig(SizedDictionary)
    worker.store(1, [page(setup, 0, 0, 0), page(setup, 1, 1, 0)])
    news(worker)
    assert worker.room() == (2 * SLOT, 9 * SLOT)
    tier.wrong = True
    worker.store(2, [page(setup, 2, 2, 0)])
    news(worker)
    assert worker.room() == (2 * SLOT, 9 * SLOT) and "the disk is away" in worker.error
    assert rig(DictionaryTier)[0].room() == (0, 0)


class RoomyDictionary(DictionaryTier):
    """Has something else by the name of `room`."""

    def room(self):
        return 1, 2


def test_a_tier_of_which_room_is_no_pair_of_numbers_does_not_say_its_size(rig):
    worker, _, setup = rig(RoomyDictionary)
    worker.store(1, [page(setup, 0, 0, 0)])
    news(worker)
    assert worker.room() == (0, 0) and "TypeError" in worker.error


def test_orders_are_answered_and_each_news_rings(rig):
    worker, _, setup = rig(DictionaryTier)
    worker.store(1, [page(setup, 0, 0, 0), page(setup, 1, 1, 0)])
    (end,) = news(worker)
    assert end.job == 1 and len(end.checksums) == 2 and not end.failed and end.seconds > 0
    worker.ask(2, [key(0), key(7)], 1.0)
    assert news(worker) == [TierAnswer(2, (True, False))]
    worker.load(3, [page(setup, 1, 5)], 1.0)
    assert news(worker)[0].job == 3 and slot_of(setup, 5) == content(1)
    worker.drop([key(0)])
    worker.ask(4, [key(0)], 1.0)
    assert news(worker) == [TierAnswer(4, (False,))]


class InTurn(DictionaryTier):
    """Takes loads at once, and fills them one after the other, 10 ms each."""

    def __init__(self, setup):
        super().__init__(setup)
        self.free_at, self.due = 0.0, []

    def load(self, job, pages):
        self.free_at = max(self.free_at, time.monotonic()) + 0.01
        self.due.append((self.free_at, job, pages))

    def poll(self):
        while self.due and self.due[0][0] <= time.monotonic():
            _, job, pages = self.due.pop(0)
            super().load(job, pages)
        return super().poll()


def test_a_load_that_waited_for_others_took_no_longer_than_they(rig):
    worker, _, setup = rig(InTurn)
    worker.store(1, [page(setup, 0, 0, 0)])
    news(worker)
    for job in range(2, 12):
        worker.load(job, [page(setup, 0, job)], 5.0)
    ends = news(worker, 10)
    assert [end.job for end in ends] == [*range(2, 12)] and all(end.checksums for end in ends)
    assert sum(end.seconds for end in ends) < 0.17, "each counts its own 10 ms, and not those in front"


def test_every_job_of_a_late_tier_ends_once(rig):
    worker, _, setup = rig(LateTier, seed=5)
    for job in range(1, 200):
        if job % 3:
            worker.store(job, [page(setup, job % 8, job % 16, 0)])
        else:
            worker.load(job, [page(setup, job % 8, 15)], 5.0)
    ends = news(worker, 199, seconds=20)
    assert sorted(end.job for end in ends) == list(range(1, 200))


def test_a_question_that_stays_pending_is_a_miss_at_its_deadline(rig):
    class Undecided(DictionaryTier):
        def lookup(self, keys):
            return [Found.PENDING if one == key(1) else Found.HIT for one in keys]

    worker, _, _ = rig(Undecided)
    begin = time.monotonic()
    worker.ask(1, [key(0), key(1)], 0.05)
    assert news(worker) == [TierAnswer(1, (True, False))] and time.monotonic() - begin >= 0.05 * IN_TIME


def test_what_a_peer_has_by_now_is_answered_at_once_to_a_request_that_claims_it(rig):
    class Coming(DictionaryTier):
        def lookup(self, keys):
            lacks = Found.MISS if ended else Found.PENDING
            return [found if found is Found.HIT else lacks for found in super().lookup(keys)]

    ended = []
    worker, tier, setup = rig(Coming)
    stored(tier, setup, 0)
    keys = [key(0), key(1), key(2)]
    worker.ask(1, keys, 5.0)
    worker.ask(2, keys, 5.0, KVTransfer("", "R"))
    assert news(worker) == [TierAnswer(2, (True, False, False), True)], "the other is not told half of it"
    worker.store(3, [page(setup, 1, 1, 0)])
    found = news(worker, 2)
    assert TierAnswer(2, (False, True, False), True) in found, "what is new"
    ended.append(True)
    assert {answer.number: answer for answer in news(worker, 2)} == {
        number: TierAnswer(number, (True, True, False)) for number in (1, 2)
    }


def test_a_question_is_looked_at_once_more_when_its_deadline_has_passed():
    now, setup = [0.0], setup_of("")

    class Slow(DictionaryTier):
        def lookup(self, keys):
            found = super().lookup(keys) if now[0] else [Found.PENDING for _ in keys]
            now[0] = 1.0
            return found

    tier = Slow(setup)
    stored(tier, setup, 0)
    worker = TierWorker("test", tier, Rung(), lambda: now[0])
    worker.ask(1, [key(0)], 1.0)
    worker.turn()
    worker.turn()
    assert worker.take() == [TierAnswer(1, (True,))]


def test_a_tier_that_raises_has_failed_the_job_and_goes_on(rig):
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

    worker, tier, setup = rig(Broken)
    worker.store(1, [page(setup, 0, 0, 0)])
    worker.load(2, [page(setup, 0, 0)], 1.0)
    worker.ask(3, [key(0)], 1.0)
    worker.drop([key(0)])
    found = news(worker, 3)
    assert {one.job: one.failed for one in found if isinstance(one, JobEnd)} == {1: True, 2: True}
    assert TierAnswer(3, (False,)) in found
    worker.ask(5, [key(0)], 1.0)
    news(worker)
    assert worker.error == "IndexError: list index out of range"
    tier.broken = False
    worker.store(4, [page(setup, 0, 0, 0)])
    assert not news(worker)[0].failed


def test_a_tier_that_answers_with_nonsense_stops_nothing_and_has_nothing(rig):
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

    worker, _, setup = rig(Nonsense)
    for number in range(len(answers)):
        worker.ask(number, [key(0), key(1)], 1.0)
        assert news(worker) == [TierAnswer(number, (False, False))]
    worker.load(3, [page(setup, 0, 0)], 1.0)
    assert news(worker)[0]._replace(seconds=0.0) == JobEnd(3, (1,)), "all pages came, so nothing has failed"
    worker.load(4, [page(setup, 0, 0)], 1.0)
    assert news(worker)[0]._replace(seconds=0.0) == JobEnd(4, (), True)
    worker.store(5, [page(setup, 0, 0, 0)])
    assert news(worker)[0]._replace(seconds=0.0) == JobEnd(5, (), True)


def test_a_job_that_a_tier_ends_twice_has_ended_once(rig):
    class Eager(DictionaryTier):
        def poll(self):
            return [end for end in super().poll() for _ in range(2)] + [JobEnd(77, ())]

    worker, _, setup = rig(Eager)
    worker.store(1, [page(setup, 0, 0, 0)])
    worker.store(2, [page(setup, 1, 1, 0)])
    assert [end.job for end in news(worker, 2)] == [1, 2]
    time.sleep(0.02)
    assert worker.take() == []


def test_questions_go_before_loads_that_wait_and_loads_before_stores(rig):
    order = []

    class Watched(DictionaryTier):
        def store(self, job, pages):
            order.append(job)
            time.sleep(0.03)
            super().store(job, pages)

        def load(self, job, pages):
            order.append(job)
            time.sleep(0.03)
            super().load(job, pages)

        def lookup(self, keys):
            order.append("asked")
            return super().lookup(keys)

    worker, _, setup = rig(Watched)
    for job in (1, 2, 3):
        worker.store(job, [page(setup, job, job, 0)])
    time.sleep(0.01)
    worker.load(4, [page(setup, 1, 9)], 1.0)
    worker.load(5, [page(setup, 1, 8)], 1.0)
    worker.ask(6, [key(1)], 1.0)
    news(worker, 6)
    assert order == [1, "asked", 4, 5, 2, 3]


def test_a_late_load_is_cancelled_and_ends_when_the_tier_says_so(rig):
    class Stuck(DictionaryTier):
        asked = ()

        def load(self, job, pages):
            pass

        def cancel(self, job):
            self.asked = (*self.asked, job)

        def poll(self):
            return [JobEnd(job, ()) for job in self.asked if self.free]

        free = False

    worker, tier, setup = rig(Stuck)
    worker.load(1, [page(setup, 0, 0)], 0.02)
    time.sleep(0.1)
    assert tier.asked == (1,) and worker.take() == [], "its slots are the tier's until it says that it has ended"
    tier.free = True
    (end,) = news(worker)
    assert end.job == 1 and not end.failed


def test_a_load_that_is_late_before_it_begins_never_does(rig):
    class Slow(DictionaryTier):
        def touch(self, keys):
            time.sleep(0.05)

        def load(self, job, pages):
            raise AssertionError("begun")

    worker, _, setup = rig(Slow)
    worker.touch([key(0)])
    worker.load(1, [page(setup, 0, 0)], 0.01)
    (end,) = news(worker)
    assert end.checksums == () and not end.failed and worker.error == ""


def test_closing_stores_what_waits_and_does_not_wait_for_ever(rig):
    worker, tier, setup = rig(DictionaryTier)
    for job in range(20):
        worker.store(job, [page(setup, job, job % 16, 0)])
    worker.close()
    assert tier.closed and len(tier.kept) == 20

    class Hung(DictionaryTier):
        def store(self, job, pages):
            pass

    worker, tier, setup = rig(Hung)
    worker.store(1, [page(setup, 0, 0, 0)])
    begin = time.monotonic()
    worker.close(0.1)
    assert time.monotonic() - begin < 2
