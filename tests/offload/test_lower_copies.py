"""Tiers below the host tier as the loop sees them: what they are asked, which slots jobs hold, what of them counts."""

from __future__ import annotations

import pytest
from test_host_copies import World as HostWorld

from gapless.base.records import NO_TRANSFER, KVTransfer
from gapless.memory.groups import WindowRule
from gapless.offload import lower
from gapless.offload.tiers.peer import PeerWorker
from gapless.offload.tiers.seam import JobEnd, TierAnswer, key_of


class Line:
    """Notes the orders of the loop; a test says what comes of them."""

    exchange = None

    def __init__(self, name="line"):
        self.name = name
        self.asked, self.loads, self.stores = {}, {}, {}
        self.dropped, self.touched, self.news = [], [], []

    @property
    def has_news(self):
        return bool(self.news)

    def room(self):
        return 10 * len(self.stores), 100

    def take(self):
        news, self.news = self.news, []
        return news

    def ask(self, number, keys, seconds, transfer):
        self.asked[number] = list(keys)

    def load(self, job, pages, seconds):
        self.loads[job] = list(pages)

    def store(self, job, pages):
        self.stores[job] = list(pages)

    def drop(self, keys):
        self.dropped += keys

    def touch(self, keys):
        self.touched += keys

    def answers(self, *hits, open=False):
        number, keys = self.asked.popitem()
        self.news.append(TierAnswer(number, tuple(key in hits for key in keys), open))
        if open:
            self.asked[number] = keys

    def ends(self, good=None, failed=False):
        """The last job ends: `good` pages of it moved, whose checksums are those of World."""
        jobs = self.loads or self.stores
        number, pages = jobs.popitem()
        pages = pages if good is None else pages[:good]
        self.news.append(JobEnd(number, tuple(page.key[0] for page in pages), failed, 10 * len(pages), 0.5))


class World(HostWorld):
    """A host tier with lines below it."""

    def __init__(self, *lines, slots=8):
        super().__init__(pages=8, slots=slots)
        self.lines = lines or (Line(),)
        self.memory = bytearray(slots)
        slot = memoryview(self.memory)
        self.below = self.tier.attach(self.lines, lambda group, number: slot[number : number + 1], 50)
        self.group = self.tier.groups[0]

    def ask(self, *digests):
        """A request asks for pages."""
        return self.below.ask([(self.group, digest) for digest in digests])

    def find(self, *digests):
        """A request asks for pages, and the first line has them."""
        search = self.ask(*digests)
        self.answers(*map(key, digests))
        return search

    def answers(self, *hits, **options):
        self.lines[0].answers(*hits, **options)
        self.below.poll()

    def ends(self, **options):
        self.lines[0].ends(**options)
        self.below.poll()

    def send(self, *digests):
        """Pages are stored in the host tier, and offered to the lines below."""
        self.store(*digests)
        self.below.poll()

    def fetch(self, search, *digests):
        return self.tier.fetch(search, [(self.pool, digest) for digest in digests])


def key(digest):
    return key_of(0, digest)


def test_a_complete_copy_is_written_through_and_holds_its_slot_until_the_store_has_ended():
    world = World(slots=2)
    world.store(b"a")
    (line,) = world.lines
    assert not line.stores
    world.below.poll()
    ((page,),) = line.stores.values()
    assert page.key == key(b"a") and page.checksum == ord("a")
    world.store(b"b")
    world.write(b"c", b"d")
    world.observe()
    (move,) = world.tier.next_store().moves
    assert move.copy.digest == b"c" and not world.tier.has(world.pool, b"b"), "b made room, a is being stored"
    world.ends()
    assert world.group.copies[b"a"].pins == 0 and world.below.counts[0].stored == 1
    assert world.below.counts[0].written_bytes == 10


def test_a_request_waits_for_all_answers_and_the_first_tier_that_has_a_page_is_taken():
    first, second = Line(), Line()
    world = World(first, second)
    search = world.ask(b"a", b"b")
    assert world.tier.waits(search)
    second.answers(key(b"a"), key(b"b"))
    assert world.below.has_news and world.below.poll() and world.tier.waits(search)
    first.answers(key(b"a"))
    world.below.poll()
    assert not world.tier.waits(search) and search.found == {key(b"a"): 0, key(b"b"): 1}
    assert world.fetch(search, b"a", b"b") and world.tier.waits(search)
    assert [page.key for page in first.loads.popitem()[1]] == [key(b"a")]
    assert [page.key for page in second.loads.popitem()[1]] == [key(b"b")]


def test_an_answer_that_comes_too_late_is_no_answer():
    world = World()
    search = world.ask(b"a")
    assert world.below.patience() == 50e-9
    world.now = 50
    assert not world.tier.waits(search) and world.below.counts[0].late == 1
    world.answers(key(b"a"))
    assert not search.found and not world.below.counts[0].hits and not world.fetch(search, b"a")
    assert world.below.patience() is None


def test_pages_of_a_peer_are_loaded_while_the_rest_is_waited_for():
    world = World()
    search = world.ask(b"a", b"b", b"c")
    world.answers(key(b"a"), open=True)
    assert [[page.key for page in pages] for pages in world.lines[0].loads.values()] == [[key(b"a")]]
    world.ends()
    assert world.tier.waits(search) and world.tier.has(world.pool, b"a") and not world.below.counts[0].hits
    world.answers(key(b"b"), open=True)
    world.answers(key(b"a"), key(b"b"))
    assert world.fetch(search, b"a", b"b") and world.tier.waits(search), "for b, which is on its way"
    assert [[page.key for page in pages] for pages in world.lines[0].loads.values()] == [[key(b"b")]]
    world.ends()
    counts = world.below.counts[0]
    assert not world.tier.waits(search) and (counts.hits, counts.missed, counts.loaded) == (2, 1, 2)


def test_a_page_that_another_tier_has_is_found_after_an_open_answer_too():
    disk, peer = Line(), Line()
    world = World(disk, peer)
    search = world.ask(b"a", b"b", b"c")
    disk.answers(key(b"a"))
    peer.answers(key(b"b"), open=True)
    world.below.poll()
    peer.answers(key(b"b"), key(b"c"))
    peer.ends()
    world.below.poll()
    assert search.found == {key(b"a"): 0, key(b"b"): 1, key(b"c"): 1}
    world.fetch(search, b"a", b"b", b"c")
    assert [[page.key for page in one] for line in (disk, peer) for one in line.loads.values()] == [
        [key(b"a")], [key(b"c")],
    ]  # fmt: skip


def test_pages_that_wait_for_others_of_their_prompts_take_half_of_the_slots():
    world = World(slots=4)
    first = world.ask(b"a", b"b", b"c", b"d")
    world.answers(key(b"a"), key(b"b"), key(b"c"), open=True)
    second = world.ask(b"e", b"f")
    world.answers(key(b"e"), open=True)
    assert [[page.key for page in pages] for pages in world.lines[0].loads.values()] == [[key(b"a"), key(b"b")]]
    world.lines[0].ends()
    world.answers(key(b"e"))
    assert world.tier.waits(first) and not world.tier.waits(second) and second.found == {key(b"e"): 0}
    world.answers(key(b"a"), key(b"b"))
    third = world.ask(b"g", b"h")
    world.answers(key(b"g"), open=True)
    assert third.early == 1, "the first waits no more"


def test_window_pages_of_a_peer_are_loaded_when_the_read_range_is_known():
    world = World()
    world.pool.rule = WindowRule(4)
    search = world.ask(b"a", b"b")
    world.answers(key(b"a"), open=True)
    assert not world.lines[0].loads and world.tier.waits(search)


def test_a_page_from_a_peer_takes_no_slot_of_the_prefix_before_it():
    world = World(slots=4)
    for digest in (b"p", b"x", b"y", b"z"):
        world.store(digest)
        world.below.poll()
        world.lines[0].ends()
        world.below.poll()
    world.tier.ask([(world.pool, b"a"), (world.pool, b"b")], [(world.pool, b"p")], NO_TRANSFER)
    world.answers(key(b"a"), key(b"b"), open=True)
    assert world.tier.has(world.pool, b"p") and not world.tier.has(world.pool, b"x")


def test_an_open_answer_to_a_request_that_waits_no_more_loads_nothing():
    world = World()
    search = world.ask(b"a", b"b")
    search.open = {}
    world.lines[0].answers(key(b"a"), open=True)
    world.answers(key(b"a"), key(b"b"))
    assert not world.lines[0].loads and not search.found and world.below.patience() is None


def test_a_page_from_below_is_a_copy_when_it_has_come():
    world = World()
    search = world.find(b"a", b"b")
    assert world.fetch(search, b"a", b"b") and not search.found, "what does not come is computed"
    assert world.tier.used() == 2 and not world.tier.has(world.pool, b"a")
    world.ends()
    assert not world.tier.waits(search) and world.tier.has(world.pool, b"a") and world.tier.has(world.pool, b"b")
    _, batch = world.load(b"a", b"b")
    world.tier.loaded(batch, [ord("a"), ord("b")])
    assert world.pool.find(b"a") and world.below.counts[0].loaded == 2 and not world.below.counts[0].refused
    assert world.lines[0].touched == [key(b"a"), key(b"b")], "they are in use, and stay below"
    world.tier.check()


def test_the_good_pages_in_front_of_a_failure_stay_and_the_bad_one_is_a_miss_from_now_on():
    world = World()
    search = world.find(b"a", b"b", b"c")
    world.fetch(search, b"a", b"b", b"c")
    world.ends(good=1, failed=True)
    assert not world.tier.waits(search) and world.tier.has(world.pool, b"a") and world.tier.used() == 1
    assert world.lines[0].dropped == [key(b"b")] and world.below.counts[0].failed == 1


def test_a_load_that_was_cancelled_drops_nothing():
    world = World()
    world.fetch(world.find(b"a"), b"a")
    world.ends(good=0)
    counts = world.below.counts[0]
    assert not world.lines[0].dropped and (counts.failed, counts.cancelled) == (0, 1) and world.tier.used() == 0


def test_two_requests_for_one_page_share_its_load_from_below():
    world = World()
    first = world.find(b"a")
    world.fetch(first, b"a")
    second = world.find(b"a", b"b")
    world.fetch(second, b"a", b"b")
    assert [page.key for page in [*world.lines[0].loads.values()][-1]] == [key(b"b")]
    world.ends()
    assert not world.tier.has(world.pool, b"a") and world.tier.waits(second)
    world.ends()
    assert not world.tier.waits(first) and not world.tier.waits(second)


def test_a_slot_that_is_filled_from_below_is_given_to_no_other_page_even_when_it_is_late():
    world = World(slots=2)
    search = world.find(b"a")
    world.fetch(search, b"a")
    world.now = 1_000
    assert not world.tier.waits(search) and world.below.counts[0].late == 1
    world.write(b"c", b"d")
    world.observe()
    (move,) = world.tier.next_store().moves
    assert move.copy.slot != world.group.copies[b"a"].slot and world.tier.counts.dropped_full == 1
    world.ends()
    assert world.tier.has(world.pool, b"a"), "it came late, and is a copy all the same"


def by_tier(world, name):
    """A count of each tier."""
    return tuple(getattr(counts, name) for counts in world.below.report())


@pytest.mark.parametrize("aborted", [False, True])
def test_pages_of_a_load_that_no_request_waits_for_are_quarantined_until_it_ends(aborted):
    world = World(Line(), Line(), slots=2)

    def moving():
        return by_tier(world, "loading"), by_tier(world, "quarantined")

    def leave(search):
        """Its request is gone, or it is late."""
        if aborted:
            search.open = {}
        else:
            search.late_at = world.now
            assert not world.tier.waits(search)

    first = world.find(b"a")
    world.fetch(first, b"a")
    second = world.find(b"a")
    world.fetch(second, b"a")
    leave(first)
    assert moving() == ((1, 0), (0, 0)), "another waits for it"
    leave(second)
    assert moving() == ((0, 0), (1, 0))
    world.store(b"c", b"d")
    assert world.tier.counts.dropped_full == 1, "nobody gets its slot"
    world.ends(good=0)
    counts = world.below.counts[0]
    assert moving() == ((0, 0), (0, 0)) and (counts.cancelled, counts.failed) == (1, 0)
    world.tier.check()


def test_a_fetch_takes_no_slot_of_what_the_same_request_needs():
    world = World(slots=3)
    world.send(b"a")
    world.lines[0].ends()
    search = world.find(b"b", b"c", b"d")
    world.fetch(search, b"a", b"b", b"c", b"d")
    assert world.tier.has(world.pool, b"a")
    ((pages),) = world.lines[0].loads.values()
    assert [page.key for page in pages] == [key(b"b"), key(b"c")], "as far as there are slots"
    assert world.group.copies[b"a"].pins == 0


def test_a_page_that_comes_in_doubt_is_dropped_below_whatever_is_under_way():
    world = World()
    world.send(b"a")
    page = world.pool.find(b"a")
    world.pool.pin(page)
    world.pool.hide([page])
    (line,) = world.lines
    assert line.dropped == [key(b"a")]
    world.ends()
    assert line.dropped == [key(b"a")] * 2, "its store has ended after it"
    search = world.find(b"b")
    world.fetch(search, b"b")
    world.group.hidden(b"b")
    assert world.tier.used() == 1, "the tier still writes the slot"
    world.ends()
    assert not world.tier.has(world.pool, b"b") and world.tier.used() == 0


def test_a_page_from_below_with_another_checksum_is_counted_and_dropped_there():
    world = World()
    world.fetch(world.find(b"a"), b"a")
    world.ends()
    _, batch = world.load(b"a")
    world.tier.loaded(batch, [7])
    assert world.pool.find(b"a") is None and world.below.counts[0].refused == 1
    assert world.lines[0].dropped == [key(b"a")]


def test_eviction_drops_nothing_below():
    world = World(slots=1)
    world.store(b"a")
    world.store(b"b")
    assert not world.tier.has(world.pool, b"a") and not world.lines[0].dropped
    world.below.poll()
    assert world.below.counts[0].dropped_gone == 1


def test_stores_are_bounded_by_number_and_by_the_time_that_they_would_take(monkeypatch):
    monkeypatch.setattr(lower, "MOST_WAITING", 2)
    world = World()
    world.send(b"a")
    world.store(b"b", b"c", b"d")
    assert world.below.counts[0].dropped_busy == 1
    world.ends()
    monkeypatch.setattr(lower, "MOST_WAITING", 100)
    monkeypatch.setattr(lower, "BRAKE_SECONDS", 0.05)
    world.store(b"e", b"f")
    world.store(b"g")
    assert world.below.counts[0].dropped_slow, "one took half a second, of which the mean has an eighth"


def test_stores_hold_few_of_the_slots():
    world = World(slots=16)
    assert lower.most_stored(world.group) == 4
    world.send(b"a", b"b", b"c", b"d", b"e", b"f")
    assert sum(map(len, world.lines[0].stores.values())) == 4
    world.ends()
    assert sum(map(len, world.lines[0].stores.values())) == 2


def test_a_store_that_fails_is_counted_by_page():
    world = World(slots=16)
    world.send(b"a", b"b", b"c")
    world.ends(good=1, failed=True)
    counts = world.below.counts[0]
    assert (counts.stored, counts.dropped_failed) == (1, 2) and not world.lines[0].dropped


def test_counts_are_told_by_tier():
    world = World(Line(), Line())
    world.send(b"a")
    assert by_tier(world, "storing") == (1, 1) and by_tier(world, "waiting") == (0, 0)
    world.lines[1].ends()
    world.below.poll()
    assert by_tier(world, "stored") == (0, 1) and by_tier(world, "written_bytes") == (0, 10)
    assert by_tier(world, "storing") == (1, 0) and by_tier(world, "written_ns") == (0, 500_000_000)
    assert by_tier(world, "used_bytes") == (10, 0) and by_tier(world, "size_bytes") == (100, 100)


def test_a_missing_page_is_a_miss_and_a_load_is_counted_until_it_ends():
    world = World(Line(), Line())
    search = world.ask(b"a", b"b", b"c")
    world.lines[0].answers(key(b"a"))
    world.lines[1].answers(key(b"a"), key(b"b"))
    world.below.poll()
    assert (by_tier(world, "hits"), by_tier(world, "missed")) == ((1, 2), (2, 1))
    assert world.fetch(search, b"a", b"b") and by_tier(world, "loading") == (1, 1)
    world.ends()
    assert by_tier(world, "loading") == (0, 1) and by_tier(world, "read_ns") == (500_000_000, 0)
    assert by_tier(world, "quarantined") == (0, 0)


@pytest.mark.parametrize("aborted", [False, True])
def test_nothing_is_asked_twice_for_a_search(aborted):
    world = World()
    search = world.find(b"a")
    if not aborted:
        assert world.fetch(search, b"a")
        world.lines[0].ends()
        world.below.poll()
    assert not world.below.has_news and world.below.patience() is None and not world.below.jobs


def test_at_the_end_all_stores_that_wait_are_sent():
    world = World(slots=16)
    world.send(b"a", b"b", b"c", b"d", b"e", b"f")
    world.below.flush()
    assert sum(map(len, world.lines[0].stores.values())) == 6


def test_a_fetch_that_finds_no_slot_is_not_waited_for():
    world = World(slots=1)
    world.send(b"a")
    search = world.find(b"b")
    assert world.fetch(search, b"b") and not search.open and not world.tier.waits(search) and not search.found


class PeerLine(Line, PeerWorker):
    """A line to a peer that lends what it has."""

    def __init__(self):
        Line.__init__(self)
        self.gives, self.borrowed = False, {}

    has_news, room, take, ask = Line.has_news, Line.room, Line.take, Line.ask
    exchange = PeerWorker.exchange

    def borrow(self, job, keys, seconds):
        self.borrowed[job] = keys


@pytest.mark.parametrize(("hits", "borrowed"), [((True,) * 4, 4), ((True, False, True, True), 0)])
def test_pages_of_a_peer_are_borrowed_at_once_unless_one_is_missing(hits, borrowed):
    """The planner loads what stands before a hole, and nothing behind it."""
    world = World(line := PeerLine())
    search = world.below.ask([(world.group, digest) for digest in (b"a", b"b", b"c", b"d")], KVTransfer(claim="R"))
    search.fits = True
    number, _ = line.asked.popitem()
    line.news.append(TierAnswer(number, hits, False, True))
    world.below.poll()
    assert [len(keys) for keys in line.borrowed.values()] == [borrowed][: bool(borrowed)]
    assert search.again == bool(borrowed) == world.below.waits(search)


def test_window_pages_of_a_peer_are_left_to_the_planner():
    """It has not been asked for, so a page that expires meanwhile must not make it forgotten."""
    world = World(line := PeerLine())
    world.pool.rule = WindowRule(4)
    search = world.below.ask([(world.group, digest) for digest in (b"a", b"b")], KVTransfer(claim="R"))
    search.fits = True
    number, _ = line.asked.popitem()
    line.news.append(TierAnswer(number, (True, True), False, True))
    world.below.poll()
    assert not line.borrowed and not search.again
    search.failed()
    assert len(search.found) == 2
