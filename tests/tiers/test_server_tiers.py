"""Tiers of other software when what they speak to dies, is silent, lies, or gives back other bytes."""

from __future__ import annotations

import importlib
import os
import re
import resource
import sys
import time

import pytest
from fake_lmcache import FakeLMCache
from fake_resp import free_port
from fake_s3 import FakeS3
from tier_rig import SLOT, content, has, key, loaded, setup_of, slot_of, stored
from tier_servers import lmcache_server, mooncake_server, needs, redis_server

from gapless import LLM, SamplingParams
from gapless.base.errors import ConfigError
from gapless.tiers.lmcache import LMCacheTier
from gapless.tiers.mooncake import MooncakeTier
from gapless.tiers.nixl import NixlTier
from gapless.tiers.sealed import HEAD_BYTES
from gapless.tiers.seam import Namespace

BACK_OFF = 0.3


@pytest.fixture
def lmcache():
    server = FakeLMCache()
    yield server
    server.stop()


@pytest.fixture
def store():
    needs("nixl")
    server = FakeS3()
    yield server
    server.stop()


def asked(server, namespace=None):
    setup = setup_of(server.url, 64, *([namespace] if namespace else []))
    kind = NixlTier if isinstance(server, FakeS3) else LMCacheTier
    return kind(setup, seconds=0.5, back_off=BACK_OFF), setup


@pytest.mark.parametrize("mood", ["silent", "noise", "outside"])
def test_an_lmcache_server_that_fails_has_nothing_and_is_asked_again_later(lmcache, mood):
    tier, setup = asked(lmcache)
    stored(tier, setup, 0, 1)
    lmcache.mood = mood
    begin = time.monotonic()
    end, _ = loaded(tier, setup, 0, 1)
    assert end.failed and end.checksums == ()
    assert stored(tier, setup, 2).failed
    tier.drop([key(3)])
    assert time.monotonic() - begin < 3
    lmcache.mood = "sound"
    time.sleep(BACK_OFF + 0.05)
    assert has(tier, 1, 2) == [True, False]
    assert loaded(tier, setup, 1)[1] == [content(1)]
    tier.close()


def test_an_lmcache_server_that_comes_back_is_found_by_a_tier_that_is_asked_all_the_time(lmcache):
    tier, setup = asked(lmcache)
    lmcache.mood = "silent"
    assert stored(tier, setup, 0).failed
    lmcache.mood, end = "sound", time.monotonic() + 20 * BACK_OFF
    while stored(tier, setup, 0).failed:
        assert time.monotonic() < end, "each question was meant to leave the time of the next try as it was"
        time.sleep(BACK_OFF / 10)
    tier.close()


def test_an_lmcache_server_may_evict_what_nobody_reads(lmcache):
    tier, setup = asked(lmcache)
    stored(tier, setup, 0, 1, 2)
    tier.drop([key(1)])
    stored(tier, setup, 1)
    has(tier, 0, 1, 2, 3)
    loaded(tier, setup, 0, 3, 1, 2)  # the third is looked up, and not read
    assert has(tier, 0) == [True] and lmcache.held == {}
    tier.close()


def test_pages_before_one_that_cannot_be_read_are_loaded(lmcache, monkeypatch):
    tier, setup = asked(lmcache)
    stored(tier, setup, 0, 1, 2, 3)
    reads, preadv = [], os.preadv

    def broken(*args):
        reads.append(args)
        if len(reads) == 3:
            raise OSError("a broken pool")
        return preadv(*args)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        end, pages = loaded(tier, setup, 0, 1, 2, 3)
    assert end.failed and len(end.checksums) == 2 and pages[:2] == [content(0), content(1)]
    tier.close()


def test_a_page_dropped_for_one_engine_is_dropped_for_all(lmcache):
    (one, setup), (other, others) = asked(lmcache), asked(lmcache)
    stored(one, setup, 0, 1)
    assert has(other, 0, 1) == [True, True]
    one.drop([key(0)])
    assert loaded(other, others, 0)[0].failed and has(other, 0, 1) == [False, True]
    stored(other, others, 0, version=1)
    assert loaded(one, setup, 0)[1] == [content(0, 1)]
    one.close()
    other.close()


def test_shared_memory_is_a_file_of_its_folder(lmcache):
    lmcache.mood = "foreign"
    with pytest.raises(ConfigError, match=r"no LMCache server for us .* no shared memory: start it with --shm-name"):
        asked(lmcache)


def test_a_chunk_that_is_too_short_for_a_key_is_refused(lmcache):
    lmcache.chunk = 11
    with pytest.raises(ConfigError, match=r"its --chunk-size must be from 12 to 4096, got 11"):
        asked(lmcache)


def planted(server, tier, setup):
    """Pages 0 to 4 with faults: of the seal, the bytes, another page's, cut short; the last is good."""
    stored(tier, setup, 0, 1, 2, 3, 4)
    if isinstance(server, FakeS3):
        names = {number: next(name for name in server.objects if key(number)[:-4].hex() in name) for number in range(5)}
        one, two = server.objects[names[0]], server.objects[names[1]]
        server.objects[names[0]] = one[:-1] + bytes([one[-1] ^ 1])  # the page comes first, the sealed head after it
        server.objects[names[1]] = b"!" + two[1:]
        server.objects[names[2]] = server.objects[names[4]]
        server.objects[names[3]] = server.objects[names[3]][:100]
        return
    whole = os.pread(server.pool, 1 << 20, 0)
    at = {number: whole.index(content(number)) - HEAD_BYTES for number in range(5)}
    os.pwrite(server.pool, bytes([whole[at[0]] ^ 1]), at[0])
    os.pwrite(server.pool, b"!", at[1] + HEAD_BYTES + SLOT - 1)
    os.pwrite(server.pool, whole[at[4] : at[4] + HEAD_BYTES + SLOT], at[2])
    os.pwrite(server.pool, bytes(HEAD_BYTES), at[3])


@pytest.mark.parametrize("kind", ["lmcache", "store"])
def test_what_is_not_the_page_is_not_there_and_flipped_bytes_keep_their_checksum(kind, request):
    server = request.getfixturevalue(kind)
    tier, setup = asked(server)
    planted(server, tier, setup)
    for number in (0, 2, 3):
        time.sleep(BACK_OFF + 0.05)
        end, _ = loaded(tier, setup, number)
        assert end.failed and end.checksums == (), number
    time.sleep(BACK_OFF + 0.05)
    end, data = loaded(tier, setup, 1)
    sums = stored(tier, setup, 1).checksums
    assert end.checksums == sums and data != [content(1)], "the device compares"
    assert loaded(tier, setup, 4)[1] == [content(4)]
    other, others = asked(server, Namespace.of({"model": "another"}))
    assert loaded(other, others, 4)[0].failed
    tier.close()
    other.close()


def test_a_pool_that_is_cut_short_is_no_page_and_no_signal(lmcache):
    tier, setup = asked(lmcache)
    stored(tier, setup, 0, 1)
    os.ftruncate(lmcache.pool, SLOT + HEAD_BYTES + 8)
    end, data = loaded(tier, setup, 0, 1)
    assert end.failed and data == [content(0)]
    tier.close()


@pytest.mark.parametrize("mood", ["silent", "closed", "short", "error"])
def test_an_object_store_that_fails_has_nothing_and_is_asked_again_later(store, mood):
    tier, setup = asked(store)
    stored(tier, setup, 0, 1)
    before = bytes(slot_of(setup, 5))
    store.mood = mood
    begin = time.monotonic()
    end, _ = loaded(tier, setup, 0, 1)
    assert end.failed and end.checksums == ()
    assert stored(tier, setup, 2).failed
    tier.drop([key(3)])
    assert time.monotonic() - begin < 4
    store.mood = "sound"
    until = time.monotonic() + 40  # NIXL's own question may still be under way
    while not (found := has(tier, 1, 2))[0] and time.monotonic() < until:
        time.sleep(0.1)
    assert found == [True, False] and loaded(tier, setup, 1)[1] == [content(1)]
    assert bytes(slot_of(setup, 5)) == before, "a slot of no job has changed"
    tier.close()


def test_no_server_is_an_error_at_the_start():
    port = free_port()
    with pytest.raises(ConfigError, match=r"no LMCache server for us at lmcache://127\.0\.0\.1"):
        LMCacheTier(setup_of(f"lmcache://me:secret@127.0.0.1:{port}"), seconds=0.2)
    needs("mooncake.store")
    with pytest.raises(ConfigError, match=r"no Mooncake master answers at mooncake://127\.0\.0\.1"):
        MooncakeTier(setup_of(f"mooncake://me:secret@127.0.0.1:{port}"))


@pytest.mark.parametrize(
    ("module", "kind", "url"),
    [("mooncake.store", MooncakeTier, "mooncake://127.0.0.1:1"), ("nixl", NixlTier, "nixl://bucket")],
)
def test_software_that_is_missing_is_named_with_its_package(monkeypatch, module, kind, url):
    root = module.partition(".")[0]
    for name in [root, module, *(name for name in sys.modules if name.startswith(f"{root}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"its client \(pip install {root}"):
        kind(setup_of(url))


def test_values_of_others_in_mooncake_are_not_there(tmp_path):
    server = mooncake_server(tmp_path)
    tier, setup = server.start(setup_of(server.url)), setup_of(server.url)
    tier.close()
    tier = server.opened(setup)
    try:
        other = importlib.import_module("mooncake.store").MooncakeDistributedStore()
        master = server.url.removeprefix("mooncake://")
        assert other.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 24, "tcp", "", master) == 0
        stored(tier, setup, 0, 4)
        name = {number: f"gapless:kv:{key(number).hex()}" for number in range(5)}
        good = other.get(name[4])
        assert len(good) == HEAD_BYTES + SLOT
        plants = {1: b"short", 2: good, 3: bytes(len(good)), 0: good + b"more"}
        other.remove(name[0], True)
        for number, value in plants.items():
            assert other.put(name[number], value) == 0
            end, _ = loaded(tier, setup, number)
            assert end.failed and end.checksums == (), number
        other.remove(name[0], True)
        other.put(name[0], good[:-1] + b"!")
        assert loaded(tier, setup, 4)[1] == [content(4)]
        other.close()
    finally:
        tier.close()
        server.kill()


def resident() -> int:
    """Bytes of memory of this process."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


# Redis is killed behind an engine, in tests/kills.
@pytest.mark.parametrize("make", [mooncake_server, lmcache_server])
def test_a_server_that_is_killed_under_load_costs_misses_and_no_memory(make, tmp_path, monkeypatch):
    monkeypatch.setattr("gapless.tiers.mooncake.MASTER_BACK_OFF_SECONDS", 0.5)
    server = make(tmp_path)
    setup = setup_of(server.url)
    tier = server.start(setup)
    try:
        sizes = []
        for turn in range(3):
            deadline = time.monotonic() + 60
            for number in range(400):
                stored(tier, setup, number % 16)
                end, data = loaded(tier, setup, number % 16)
                assert data in ([], [content(number % 16)]) and end.failed == (data == [])
                if number == 200:
                    server.kill()
                assert time.monotonic() < deadline
            server.start(setup).close()
            while stored(tier, setup, 3).failed and time.monotonic() < deadline:
                time.sleep(0.1)
            assert loaded(tier, setup, 3)[1] == [content(3)], turn
            sizes.append(resident())
        assert sizes[-1] - sizes[0] < 8 << 20, sizes
    finally:
        tier.close()
        server.kill()


@pytest.mark.parametrize("make", [redis_server, mooncake_server, lmcache_server])
def test_an_engine_that_is_started_again_loads_what_another_one_has_stored(make, tmp_path):
    server = make(tmp_path)
    server.start(setup_of(server.url)).close()
    prompt = " ".join(f"{number} + {number} = {2 * number}." for number in range(100, 160))
    cached, said = [], []
    try:
        while not any(cached) and len(cached) < 8:  # what comes late on a busy machine is computed
            with LLM("demo", kv_tiers=("host:64MiB", server.url), block_size=64) as llm:
                (answer,) = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=16))
            cached.append(answer.num_cached_tokens)
            said.append(tuple(answer.outputs[0].token_ids))
        assert cached[0] == 0 and cached[-1] >= 512 and len(set(said)) == 1
    finally:
        server.kill()


def test_the_names_of_what_lmcache_is_told_hold_the_namespace(lmcache):
    tier, setup = asked(lmcache)
    stored(tier, setup, 0)
    assert re.fullmatch(r"gapless-[0-9a-f]{32}-0", next(iter(lmcache.sizes)))
    tier.close()
