"""The Mooncake tier: pages in the memory of a cluster's storage nodes, by the client of Mooncake's store.

The client's calls end by themselves, some seconds late when the master is lost; the loop does not wait for them.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

import numpy as np

from gapless.base.addresses import hide_password
from gapless.base.errors import ConfigError
from gapless.offload.tiers.blocking import BlockingTier, leading
from gapless.offload.tiers.sealed import HEAD_BYTES, checksum_in, head_of
from gapless.offload.tiers.seam import Found, TierPage, TierSetup

PORT = 50051
CONNECT_SECONDS = 1.0
"""How long the master may take to accept a connection"""
MASTER_BACK_OFF_SECONDS = 10.0
"""Seconds without a try of a lost master: the client takes 4 s to notice."""
CALL_PAGES = 64
"""Pages of one call"""
OBJECT_PREFIX = "gapless:kv:"
_RPC_FAILED = -900
"""A call's result for each key when no master answers"""


class MooncakeTier(BlockingTier):
    """Keeps pages in a Mooncake store. Jobs are done when `store` and `load` return; one that is down has nothing."""

    def __init__(self, setup: TierSetup, back_off: float = MASTER_BACK_OFF_SECONDS) -> None:
        """Join the cluster, without memory for others. Raises ConfigError when it cannot be joined."""
        super().__init__()
        self._namespace, self._back_off, self._next_try = setup.namespace.digest, back_off, 0.0
        self._memory = [np.frombuffer(one, np.uint8) for one in setup.memory]
        self._heads = np.zeros((CALL_PAGES, HEAD_BYTES), np.uint8)
        self._client = _joined(setup.target)
        for buffer in (*self._memory, self._heads):
            if self._client.register_buffer(buffer.ctypes.data, buffer.nbytes) != 0:
                raise ConfigError("kv_tiers: Mooncake cannot register the host tier's memory")

    def lookup(self, keys: Sequence[bytes]) -> list[Found]:
        found = self._call(self._client.batch_is_exist, [OBJECT_PREFIX + key.hex() for key in keys])
        return [Found.HIT if one == 1 else Found.MISS for one in found]

    def store(self, job: int, pages: Sequence[TierPage]) -> None:
        self._in_parts(job, pages, CALL_PAGES, self._stored)

    def load(self, job: int, pages: Sequence[TierPage]) -> None:
        self._in_parts(job, pages, CALL_PAGES, self._loaded)

    def touch(self, keys: Sequence[bytes]) -> None:
        """A lookup renews the leases of stored pages."""
        self.lookup(keys)

    def drop(self, keys: Sequence[bytes]) -> None:
        self._call(self._client.batch_remove, [OBJECT_PREFIX + key.hex() for key in keys], True)

    def close(self) -> None:
        self._client.close()

    def _stored(self, pages: Sequence[TierPage]) -> list[int]:
        for head, page in zip(self._heads, pages, strict=False):
            head[:] = np.frombuffer(head_of(self._namespace, page), np.uint8)
        results = self._call(self._client.batch_put_from_multi_buffers, *self._places(pages))
        return [*leading(None if result else page.checksum for page, result in zip(pages, results, strict=False))]

    def _loaded(self, pages: Sequence[TierPage]) -> list[int]:
        self._heads[:] = 0
        results = self._call(self._client.batch_get_into_multi_buffers, *self._places(pages))
        loaded = (
            checksum_in(head.data, self._namespace, page) if result == HEAD_BYTES + len(page.slot) else None
            for result, head, page in zip(results, self._heads, pages, strict=False)
        )
        return [*leading(loaded)]

    def _places(self, pages: Sequence[TierPage]) -> tuple[list[str], list[list[int]], list[list[int]]]:
        """Return names, addresses and sizes: of a head and a slot for each page."""
        slots = [np.frombuffer(page.slot, np.uint8).ctypes.data for page in pages]
        addresses = [[head.ctypes.data, slot] for head, slot in zip(self._heads, slots, strict=False)]
        return (
            [OBJECT_PREFIX + page.key.hex() for page in pages],
            addresses,
            [[HEAD_BYTES, len(page.slot)] for page in pages],
        )

    def _call(self, call: Callable[..., list[int]], names: list[str], *args: Any) -> list[int]:
        """Return what the client answers for each name; failures while the master is left alone."""
        if time.monotonic() < self._next_try:
            return [_RPC_FAILED] * len(names)
        answers = call(names, *args)
        if _RPC_FAILED in answers:
            self._next_try = time.monotonic() + self._back_off
        return answers


def _joined(target: str) -> Any:
    """Return a client of the cluster whose master is at `mooncake://HOST:PORT`. Raises ConfigError."""
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise ConfigError(
            "kv_tiers: mooncake needs libibverbs, librdmacm and its client "
            f"(pip install mooncake-transfer-engine-non-cuda): {error}"
        ) from error
    parts, options = urlsplit(target), parse_qs(urlsplit(target).query)
    host, port, where = parts.hostname or "", parts.port or PORT, hide_password(target)
    try:
        with socket.create_connection((host, port), CONNECT_SECONDS) as one:
            address = one.getsockname()[0]
    except OSError as error:
        raise ConfigError(f"kv_tiers: no Mooncake master answers at {where}: {error}") from error
    client = MooncakeDistributedStore()
    protocol, devices = options.get("protocol", ["tcp"])[0], options.get("devices", [""])[0]
    code = client.setup(address, "P2PHANDSHAKE", 0, 0, protocol, devices, f"{host}:{port}")
    if code != 0:
        raise ConfigError(f"kv_tiers: the Mooncake master at {where} does not admit us (error {code})")
    return client
