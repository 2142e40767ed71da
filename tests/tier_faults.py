"""Changes what a tier of other software keeps, behind the tier's back."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from fake_lmcache import FakeLMCache
from fake_resp import FakeResp
from fake_s3 import FakeS3
from redis import Redis
from tier_kinds import TierHome
from tier_servers import mooncake_client

from gapless.offload.tiers import mooncake, redis
from gapless.offload.tiers.sealed import HEAD_BYTES

MAGIC = b"gaplesK1"
"""What each sealed head begins with"""
AT = HEAD_BYTES + 7
"""A byte of the page, whether the head is in front of it or behind"""
EVERY = 4
"""Of so many values one is changed."""

Fault = Callable[[Sequence[bytes]], Sequence[bytes]]
"""What becomes of the values: heads and pages, in an order of the tier's own"""


def flipped(values: Sequence[bytes]) -> list[bytes]:
    """One bit of each page is another: the device finds it."""
    return [value[:AT] + bytes([value[AT] ^ 4]) + value[AT + 1 :] for value in values]


def swapped(values: Sequence[bytes]) -> list[bytes]:
    """Each value is that of another key: its seal says so."""
    return [*values[1:], *values[:1]]


def truncated(values: Sequence[bytes]) -> list[bytes]:
    """Each value ends too soon."""
    return [value[: len(value) // 2] for value in values]


def spoil(home: TierHome, keys: Sequence[bytes], page_bytes: int, fault: Fault) -> None:
    """Have a fault come over some of the values of these keys, where they are kept."""
    if isinstance(home.fake, (FakeResp, FakeS3)):
        kept = home.fake.values if isinstance(home.fake, FakeResp) else home.fake.objects
        names = [name for name in kept if len(kept[name]) == HEAD_BYTES + page_bytes][::EVERY]
        kept |= dict(zip(names, fault([kept[name] for name in names]), strict=True))
    elif urlsplit(home.target).scheme == "redis":
        _spoil_redis(home.target, [redis.KEY_PREFIX + key for key in keys[::EVERY]], fault)
    elif urlsplit(home.target).scheme == "mooncake":
        _spoil_mooncake(home.target, [mooncake.OBJECT_PREFIX + key.hex() for key in keys[::EVERY]], fault)
    else:
        pool = home.fake.path if isinstance(home.fake, FakeLMCache) else pool_of(home.target)
        _spoil_pool(Path(pool), HEAD_BYTES + page_bytes, fault)


def pool_of(target: str) -> str:
    """Return the file of the shared memory of an LMCache server that the tests have started."""
    return f"/dev/shm/lmcache_l1_pool_gapless-tests-{urlsplit(target).port}"


def _spoil_redis(url: str, names: Sequence[bytes], fault: Fault) -> None:
    with Redis.from_url(url) as client:
        client.mset(dict(zip(names, fault(client.mget(names)), strict=True)))


def _spoil_mooncake(target: str, names: Sequence[str], fault: Fault) -> None:
    client = mooncake_client(target)
    values = [client.get(name) for name in names]
    for name, value in zip(names, fault(values), strict=True):
        assert client.remove(name, True) == 0 and client.put(name, value) == 0
    client.close()


def _spoil_pool(path: Path, size: int, fault: Fault) -> None:
    """The values are wherever a head begins."""
    whole = path.read_bytes()
    places = [at for at in range(0, len(whole) - size + 1) if whole.startswith(MAGIC, at)][::EVERY]
    file = os.open(path, os.O_RDWR)
    for at, value in zip(places, fault([whole[at : at + size] for at in places]), strict=True):
        os.pwrite(file, value, at)
    os.close(file)
