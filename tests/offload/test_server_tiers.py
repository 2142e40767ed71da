"""LMCache's ways with chunks, software that is missing, and servers of others that are killed."""

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
from tier_rig import SLOT, content, has, key, loaded, setup_of, stored
from tier_servers import lmcache_server, mooncake_server, needs, redis_server

from gapless import LLM, SamplingParams
from gapless.base.errors import ConfigError
from gapless.offload.tiers.lmcache import LMCacheTier
from gapless.offload.tiers.mooncake import MooncakeTier
from gapless.offload.tiers.nixl import NixlTier
from gapless.offload.tiers.sealed import HEAD_BYTES


@pytest.fixture
def lmcache():
    server = FakeLMCache()
    yield server
    server.stop()


@pytest.fixture
def asked(lmcache, opened, monkeypatch):
    """Opens a tier over that server: the tier and its setup."""
    monkeypatch.setattr("gapless.offload.tiers.lmcache.LOWER_LOOKUP_SECONDS", 5.0)

    def open_tier():
        setup = setup_of(lmcache.url)
        return opened(LMCacheTier(setup, seconds=5.0)), setup

    return open_tier


def test_an_lmcache_server_may_evict_chunks_that_nobody_reads(lmcache, asked):
    tier, setup = asked()
    stored(tier, setup, 0, 1, 2)
    tier.drop([key(1)])
    stored(tier, setup, 1)
    has(tier, 0, 1, 2, 3)
    loaded(tier, setup, 0, 3, 1, 2)  # the third is looked up, and not read
    assert has(tier, 0) == [True] and lmcache.held == {}


def test_pages_before_one_that_cannot_be_read_are_loaded(asked, monkeypatch):
    tier, setup = asked()
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


def test_a_page_dropped_for_one_engine_is_dropped_for_all(asked):
    (one, setup), (other, others) = asked(), asked()
    stored(one, setup, 0, 1)
    assert has(other, 0, 1) == [True, True]
    one.drop([key(0)])
    assert loaded(other, others, 0)[0].failed and has(other, 0, 1) == [False, True]
    stored(other, others, 0, version=1)
    assert loaded(one, setup, 0)[1] == [content(0, 1)]


def test_shared_memory_outside_of_its_folder_is_refused(lmcache, asked):
    lmcache.mood = "foreign"
    with pytest.raises(ConfigError, match=r"no LMCache server for us .* no shared memory: start it with --shm-name"):
        asked()


def test_a_chunk_that_is_too_short_for_a_key_is_refused(lmcache, asked):
    lmcache.chunk = 11
    with pytest.raises(ConfigError, match=r"its --chunk-size must be from 12 to 4096, got 11"):
        asked()


def test_a_pool_that_is_cut_short_is_no_page_and_no_signal(lmcache, asked):
    tier, setup = asked()
    stored(tier, setup, 0, 1)
    os.ftruncate(lmcache.pool, SLOT + HEAD_BYTES + 8)
    end, data = loaded(tier, setup, 0, 1)
    assert end.failed and data == [content(0)]


def test_a_server_that_is_not_there_is_an_error_at_the_start():
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


@pytest.mark.net
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
@pytest.mark.net
@pytest.mark.parametrize("make", [mooncake_server, lmcache_server])
def test_a_server_that_is_killed_under_load_costs_misses_and_no_memory(make, tmp_path):
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


@pytest.mark.net
@pytest.mark.parametrize("make", [redis_server, mooncake_server, lmcache_server])
def test_an_engine_that_is_started_again_loads_the_pages_of_another_one(make, tmp_path):
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


def test_the_name_of_a_model_at_lmcache_holds_the_namespace(lmcache, asked):
    tier, setup = asked()
    stored(tier, setup, 0)
    assert re.fullmatch(r"gapless-[0-9a-f]{32}-0", next(iter(lmcache.sizes)))
