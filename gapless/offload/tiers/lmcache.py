"""The LMCache tier: pages in an LMCache server of this host, and so in every storage that it has adapters for.

It speaks the server's own protocol (ZeroMQ, MessagePack) in its engine-driven mode: the server hands out places in a
shared memory pool, and we copy. A key stands for tokens, as many as a chunk of the server has. The protocol cannot
delete, so the chunks of one request are a history of the page: stored, dropped, stored again. Odd means stored.
"""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from gapless.base.addresses import hide_password
from gapless.base.errors import ConfigError
from gapless.offload.tiers.blocking import BlockingTier, leading
from gapless.offload.tiers.history import Seen, has_room, most, there
from gapless.offload.tiers.lmcache_wire import ChunkPlace, LMCacheClient, Operation, Registered
from gapless.offload.tiers.sealed import HEAD_BYTES, checksum_in, head_of
from gapless.offload.tiers.seam import GROUP_BYTES, Found, TierPage, TierSetup

SERVER_SECONDS = 1.0
"""How long the server may be silent"""
LOWER_LOOKUP_SECONDS = 0.04
"""How long it may take to bring a page from its own lower storage before a lookup finds nothing"""
QUESTION_PAGES = 4
"""Pages that are looked up at a time, a millisecond or more each: who asks for many has the first of them soon"""
SERVER_BACK_OFF_SECONDS = 1.0
WORD_BYTES = 3
"""Bytes of a key in a token"""
SHARED = "/dev/shm"
_NAME = re.compile(r"/?[\w-][\w.-]*")


class _Look(NamedTuple):
    """A page that is asked for, under a request of its own."""

    page: TierPage
    key: dict[str, Any]
    hits: int
    """Chunks of its history that the server has"""

    @property
    def there(self) -> bool:
        return there(self.hits)


class LMCacheTier(BlockingTier):
    """Keeps pages on a server. Jobs are done when `store` and `load` return; a server that fails has nothing."""

    def __init__(
        self, setup: TierSetup, seconds: float = SERVER_SECONDS, back_off: float = SERVER_BACK_OFF_SECONDS
    ) -> None:
        """Connect, and register the sizes of our pages. Raises ConfigError when the server does not do."""
        super().__init__()
        parts = urlsplit(setup.target)
        self._address = f"tcp://{parts.hostname}:{parts.port}"
        self._setup, self._seconds = setup, seconds
        self._namespace = setup.namespace.digest
        self._instance = secrets.randbits(48) << 8
        self._pool, self._pool_bytes, self._chunk = -1, 0, 0
        self._requests = 0
        self._seen = Seen()
        try:
            self._client = LMCacheClient(self._address, seconds, back_off, self._register)
            self._client.open()
        except ImportError as error:
            raise ConfigError(f"kv_tiers: lmcache needs its client (pip install pyzmq msgspec): {error}") from error
        except OSError as error:
            raise ConfigError(
                f"kv_tiers: no LMCache server for us at {hide_password(setup.target)}: {error}"
            ) from error

    def lookup(self, keys: Sequence[bytes]) -> list[Found]:
        asked = self._seen.unknown(keys, QUESTION_PAGES)
        try:
            looks = self._look([TierPage(key, memoryview(b"")) for key in asked], LOWER_LOOKUP_SECONDS)
            self._release(looks)
        except OSError:
            self._client.close()
            return [Found.MISS] * len(keys)
        self._seen.add(look.page.key for look in looks if look.there)
        return self._seen.found(keys, asked)

    def store(self, job: int, pages: Sequence[TierPage]) -> None:
        self._job(job, pages, self._stored)

    def load(self, job: int, pages: Sequence[TierPage]) -> None:
        self._job(job, pages, self._loaded)

    def touch(self, keys: Sequence[bytes]) -> None:
        """The server notes which pages are looked up and loaded; more would cost four calls a page."""

    def drop(self, keys: Sequence[bytes]) -> None:
        self._seen.forget(keys)
        try:
            looks = self._look([TierPage(key, memoryview(b"")) for key in keys], self._seconds)
            self._write([look for look in looks if look.there])
            self._release(looks)
        except OSError:
            self._client.close()

    def close(self) -> None:
        self._client.close()
        self._leave_pool()

    def _job(self, job: int, pages: Sequence[TierPage], move: Callable[[Sequence[TierPage], list[int]], None]) -> None:
        done: list[int] = []
        try:
            move(pages, done)
        except OSError:
            self._client.close()
        self._end(job, pages, done)

    def _stored(self, pages: Sequence[TierPage], done: list[int]) -> None:
        looks = self._look(pages, self._seconds)
        kept = self._write([look for look in looks if has_room(look.hits)])
        self._release(looks)
        done += leading(look.page.checksum if look.there or look.page.key in kept else None for look in looks)
        self._seen.add(page.key for page in pages[: len(done)])

    def _loaded(self, pages: Sequence[TierPage], done: list[int]) -> None:
        looks = self._look(pages, self._seconds)
        good = looks[: next((place for place, look in enumerate(looks) if not look.there), len(looks))]
        calls = [self._at(look, look.hits - 1) for look in good]
        answers = self._client.call(Operation.PREPARE_RETRIEVE, calls, ChunkPlace)
        done += leading(self._read(look.page, answer) for look, answer in zip(good, answers, strict=True))
        self._seen.forget(page.key for page in pages[len(done) :])
        self._client.call(Operation.COMMIT_RETRIEVE, calls, bool)
        self._release([look._replace(hits=look.hits - (place < len(good))) for place, look in enumerate(looks)])

    def _look(self, pages: Sequence[TierPage], seconds: float) -> list[_Look]:
        """Ask for these pages; what the server has of them stays there until `_release`. Raises OSError."""
        keys = [self._key(page) for page in pages]
        self._client.call(Operation.LOOKUP, [(key | {"worker_id": None}, 1) for key in keys], None)
        hits: list[int | None] = [None] * len(keys)
        until = time.monotonic() + seconds
        while (open_ := [place for place, hit in enumerate(hits) if hit is None]) and time.monotonic() < until:
            names = [(keys[place]["request_id"],) for place in open_]
            for place, hit in zip(open_, self._client.call(Operation.QUERY, names, int), strict=True):
                hits[place] = hit
        return [_Look(page, key, hit or 0) for page, key, hit in zip(pages, keys, hits, strict=True)]

    def _release(self, looks: Sequence[_Look]) -> None:
        """The server may evict these pages again."""
        held = [look for look in looks if look.hits]
        self._client.call(Operation.FREE, [(look.key | {"end": look.hits * self._chunk}, 1) for look in held], None)
        self._client.send(Operation.END, [(look.key["request_id"],) for look in looks])

    def _write(self, looks: Sequence[_Look]) -> set[bytes]:
        """Write the next chunk of these pages' histories; return the keys that the server took."""
        calls = [self._at(look, look.hits) for look in looks]
        kept: list[tuple[bytes, tuple[Any, ...]]] = []
        for look, call, answer in zip(
            looks, calls, self._client.call(Operation.PREPARE_STORE, calls, ChunkPlace), strict=True
        ):
            if (offset := self._place(look.page, answer)) is not None:
                os.pwritev(self._pool, [head_of(self._namespace, look.page), look.page.slot], offset)
                kept.append((look.page.key, call))
        done = self._client.call(Operation.COMMIT_STORE, [(*call, b"") for _, call in kept], bool)
        return {key for (key, _), good in zip(kept, done, strict=True) if good}

    def _read(self, page: TierPage, answer: ChunkPlace | None) -> int | None:
        """Copy a page out of the pool; return its checksum, None for any other content."""
        head = bytearray(HEAD_BYTES)
        offset = self._place(page, answer)
        if offset is None or os.preadv(self._pool, [head, page.slot], offset) != HEAD_BYTES + len(page.slot):
            return None
        return checksum_in(memoryview(head), self._namespace, page)

    def _place(self, page: TierPage, answer: ChunkPlace | None) -> int | None:
        """Return where the pool has room for this page, or the page; None where an answer names no such place."""
        slots = answer.context.slots if answer is not None and answer.success else []
        nbytes = HEAD_BYTES + self._setup.slot_bytes[_group(page.key)]
        fits = len(slots) == 1 and slots[0].length == nbytes and 0 <= slots[0].offset <= self._pool_bytes - nbytes
        return slots[0].offset if fits else None

    def _at(self, look: _Look, chunk: int) -> tuple[dict[str, Any], int]:
        """Return a chunk of a page's history, and who asks."""
        ends = {"start": chunk * self._chunk, "end": (chunk + 1) * self._chunk}
        return look.key | ends, self._instance + _group(look.page.key)

    def _key(self, page: TierPage) -> dict[str, Any]:
        words = [int.from_bytes(page.key[at : at + WORD_BYTES], "little") for at in range(0, len(page.key), WORD_BYTES)]
        tokens = (words + [0] * (self._chunk - len(words))) * most()
        self._requests += 1
        return {
            "model_name": self._model(_group(page.key)), "world_size": 1, "worker_id": 0, "token_ids": tokens,
            "start": 0, "end": len(tokens), "request_id": f"gapless-{self._instance:x}-{self._requests}",
            "cache_salt": "", "request_configs": None, "num_kv_readers": 1,
        }  # fmt: skip

    def _model(self, group: int) -> str:
        return f"gapless-{self._namespace.hex()[:32]}-{group}"

    def _register(self) -> None:
        """Say how large our pages are, and open the pool. Raises OSError."""
        (chunk,) = self._client.call(Operation.CHUNK_SIZE, [()], int)
        words = -(-36 // WORD_BYTES)
        if chunk is None or not words <= chunk <= 4096:
            raise OSError(f"its --chunk-size must be from {words} to 4096, got {chunk}")
        calls = [
            ({
                "instance_id": self._instance + group, "model_name": self._model(group), "world_size": 1,
                "block_size": chunk, "num_layers": 1, "hidden_dim_size": HEAD_BYTES + nbytes, "dtype_str": "uint8",
                "use_mla": True, "num_physical_slots": 1,
            },)
            for group, nbytes in enumerate(self._setup.slot_bytes)
        ]  # fmt: skip
        answers = self._client.call(Operation.REGISTER, calls, Registered)
        pool = answers[0]
        if pool is None or not _NAME.fullmatch(pool.shm_name):
            raise OSError("it has no shared memory: start it with --shm-name, on this host")
        self._leave_pool()
        self._pool = os.open(f"{SHARED}/{pool.shm_name.lstrip('/')}", os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        self._chunk, self._pool_bytes = chunk, min(pool.pool_size, os.fstat(self._pool).st_size)

    def _leave_pool(self) -> None:
        if self._pool >= 0:
            os.close(self._pool)
        self._pool = -1


def _group(key: bytes) -> int:
    return int.from_bytes(key[-GROUP_BYTES:], "little")
