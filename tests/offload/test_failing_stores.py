"""Redis, LMCache and object stores that fail, come back, or give back other bytes than they were given."""

from __future__ import annotations

import os

import pytest
from fake_lmcache import FakeLMCache
from fake_resp import FakeResp
from fake_s3 import FakeS3
from tier_rig import SLOT, content, has, key, loaded, setup_of, stored
from tier_servers import needs
from waiting import until

from gapless.offload.tiers.lmcache import LMCacheTier
from gapless.offload.tiers.nixl import NixlTier
from gapless.offload.tiers.redis import KEY_PREFIX, RedisTier
from gapless.offload.tiers.sealed import HEAD_BYTES
from gapless.offload.tiers.seam import Namespace

KINDS = {"redis": (FakeResp, RedisTier), "lmcache": (FakeLMCache, LMCacheTier), "nixl": (FakeS3, NixlTier)}
MOODS = {
    "redis": ("closed", "short", "silent", "error", "noise"),
    "lmcache": ("silent", "noise", "outside"),
    "nixl": ("silent", "closed", "short", "error"),
}


@pytest.fixture
def store(request, opened, monkeypatch):
    """(what stands for a store, and what opens a tier over it: the tier and its setup)"""
    monkeypatch.setattr("gapless.offload.tiers.lmcache.LOWER_LOOKUP_SECONDS", 5.0)
    if request.param == "nixl":
        needs("nixl")
    fake_of, tier_of = KINDS[request.param]
    fake = fake_of()

    def open_tier(back_off=0.0, **names):
        setup = setup_of(fake.url, 64, *([Namespace.of(names)] if names else []))
        return opened(tier_of(setup, seconds=0.5, back_off=back_off)), setup

    yield fake, open_tier
    fake.stop()


def each(kind, mood):
    return pytest.param(kind, mood, marks=[pytest.mark.net] if kind == "nixl" else [])


@pytest.mark.parametrize(
    ("store", "mood"), [each(kind, mood) for kind, moods in MOODS.items() for mood in moods], indirect=["store"]
)
def test_a_store_that_fails_has_nothing_and_is_found_when_it_is_back(store, mood):
    """The tier is asked all the time: no question makes the time of the next try any later."""
    fake, open_tier = store
    tier, setup = open_tier(back_off=0.05)
    stored(tier, setup, 0, 1)
    fake.mood = mood
    end, _ = loaded(tier, setup, 0, 1)
    assert end.failed and end.checksums == ()
    end = stored(tier, setup, 2)
    assert end.failed and end.checksums == ()
    tier.touch([key(0)])
    tier.drop([key(3)])
    fake.mood = "sound"
    until(lambda: has(tier, 1) == [True])
    assert loaded(tier, setup, 1)[1] == [content(1)]


@pytest.mark.parametrize("store", ["redis", "lmcache"], indirect=True)
@pytest.mark.process
def test_a_store_that_has_failed_is_left_alone_for_a_while(store):
    fake, open_tier = store
    tier, setup = open_tier(back_off=1e6)
    stored(tier, setup, 0, 1)
    fake.mood = "silent"
    assert loaded(tier, setup, 0, 1)[0].failed
    asked = len(fake.calls)
    fake.mood = "sound"
    assert stored(tier, setup, 2).failed and has(tier, 3) == [False] and loaded(tier, setup, 0)[0].failed
    tier.touch([key(0)])
    tier.drop([key(0)])
    assert len(fake.calls) == asked


def flip(value, at):
    changed = bytearray(value)
    changed[at] ^= 1
    return bytes(changed)


def planted(fake, tier, setup):
    """Pages with faults: of the seal, the bytes, another page's, cut short, too long or empty; page 4 is good."""
    stored(tier, setup, *range(6))
    if isinstance(fake, FakeLMCache):
        whole = os.pread(fake.pool, 1 << 20, 0)
        at = [whole.index(content(number)) - HEAD_BYTES for number in range(6)]
        os.pwrite(fake.pool, bytes([whole[at[0]] ^ 1]), at[0])
        os.pwrite(fake.pool, b"!", at[1] + HEAD_BYTES + SLOT - 1)
        os.pwrite(fake.pool, whole[at[4] : at[4] + HEAD_BYTES + SLOT], at[2])
        os.pwrite(fake.pool, bytes(HEAD_BYTES // 2), at[3] + HEAD_BYTES // 2)
        os.pwrite(fake.pool, bytes(HEAD_BYTES), at[5])
        return
    if isinstance(fake, FakeResp):
        kept, names, head, page = fake.values, [KEY_PREFIX + key(number) for number in range(6)], 0, -1
    else:  # the page comes first, the sealed head after it
        kept, head, page = fake.objects, -1, 0
        names = [next(name for name in kept if key(number)[:-4].hex() in name) for number in range(6)]
    kept[names[0]] = flip(kept[names[0]], head)
    kept[names[1]] = flip(kept[names[1]], page)
    kept[names[2]] = kept[names[4]]
    kept[names[3]] = kept[names[3]][:100]
    kept[names[5]] += b"more"


@pytest.mark.parametrize("store", ["redis", "lmcache", pytest.param("nixl", marks=pytest.mark.net)], indirect=True)
def test_a_value_that_is_not_the_page_is_not_there_and_flipped_bytes_keep_their_checksum(store):
    fake, open_tier = store
    tier, setup = open_tier()
    planted(fake, tier, setup)
    for number in (0, 2, 3, 5):
        end, _ = loaded(tier, setup, number)
        assert end.failed and end.checksums == (), number
    end, data = loaded(tier, setup, 1)
    sums = stored(tier, setup, 1).checksums
    assert end.checksums == sums and data != [content(1)], "the device compares"
    assert loaded(tier, setup, 4)[1] == [content(4)]
    other, others = open_tier(model="another")
    assert loaded(other, others, 4)[0].failed
