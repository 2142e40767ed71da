"""Every tier against a dictionary: what it gives is what it was given last, and every job ends once."""

from __future__ import annotations

import random

import pytest
from dictionary_tier import DictionaryTier, LateTier
from fake_lmcache import FakeLMCache
from fake_resp import FakeResp
from fake_s3 import FakeS3
from peer_rig import PeerPair
from tier_rig import SLOTS, checksum, content, end_of, has, key, page, setup_of, slot_of
from tier_servers import lmcache_server, mooncake_server, needs, redis_server

from gapless.tiers.disk import DiskTier
from gapless.tiers.lmcache import LMCacheTier
from gapless.tiers.mooncake import MooncakeTier
from gapless.tiers.nixl import NixlTier
from gapless.tiers.redis import RedisTier
from gapless.tiers.resp import RespClient
from gapless.tiers.seam import Namespace


def running(make, tmp_path_factory):
    """A server of this kind."""
    made = make(tmp_path_factory.mktemp("server"))
    made.start(setup_of(made.url)).close()
    yield made.url
    made.kill()


@pytest.fixture(scope="module")
def redis_url(tmp_path_factory):
    yield from running(redis_server, tmp_path_factory)


@pytest.fixture(scope="module")
def mooncake_url(tmp_path_factory):
    yield from running(mooncake_server, tmp_path_factory)


@pytest.fixture(scope="module")
def lmcache_url(tmp_path_factory):
    yield from running(lmcache_server, tmp_path_factory)


SERVERS = {"Redis": "redis_url", "Mooncake": "mooncake_url", "LMCache": "lmcache_url"}
KINDS = {"dictionary": DictionaryTier, "late": LateTier, "disk": DiskTier, "small disk": DiskTier, "peers": PeerPair}
KINDS |= {"fake Redis": RedisTier, "Redis": RedisTier, "Mooncake": MooncakeTier, "LMCache": LMCacheTier}
KINDS |= {"NIXL": NixlTier, "fake LMCache": LMCacheTier}


@pytest.fixture(params=[*KINDS])
def tier(request, tmp_path, monkeypatch):
    """(an open tier, its setup, whether it keeps all that it stores)"""
    monkeypatch.setattr("gapless.tiers.history.GENERATIONS", 16)  # the test drops the same pages over and over
    if request.param == "NIXL":
        needs("nixl")
    fake = {"fake Redis": FakeResp, "NIXL": FakeS3, "fake LMCache": FakeLMCache}.get(request.param, lambda: None)()
    target = request.getfixturevalue(SERVERS[request.param]) if request.param in SERVERS else fake.url if fake else ""
    namespace = Namespace.of({"test": request.node.name})  # a server may hold what another test has stored
    setup = setup_of(target or str(tmp_path), 5 if request.param == "small disk" else 64, namespace)
    if request.param == "Redis":
        client = RespClient(target, 1.0, 1.0)
        client.send([[b"FLUSHDB"]])
        client.read()
        client.close()
    opened = KINDS[request.param](setup)
    opened.drop([key(number) for number in range(12)])
    yield opened, setup, request.param not in ("small disk", "late")
    opened.close()
    if fake:
        fake.stop()


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
