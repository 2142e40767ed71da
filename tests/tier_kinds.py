"""Every kind of tier, opened for a test: over the real software where it is there, or over what stands for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from dictionary_tier import DictionaryTier, LateTier
from fake_lmcache import FakeLMCache
from fake_resp import FakeResp
from fake_s3 import FakeS3
from peer_rig import PeerPair
from tier_rig import key, setup_of
from tier_servers import Server, empty, lmcache_server, mooncake_server, needs, redis_server

from gapless.offload.tiers.disk import DiskTier
from gapless.offload.tiers.lmcache import LMCacheTier
from gapless.offload.tiers.mooncake import MooncakeTier
from gapless.offload.tiers.nixl import NixlTier
from gapless.offload.tiers.redis import RedisTier
from gapless.offload.tiers.seam import Namespace, TierSetup

NUMBERS = range(12)
"""The pages that tests of the interface store and load"""


class TierKind(NamedTuple):
    make: Callable[[TierSetup], Any]
    server: Callable[[Path], Server] | None = None
    """Starts the real software"""
    fake: Callable[[], Any] | None = None
    """Starts what stands for it"""
    needs: tuple[str, ...] = ()
    pages: int = 64
    keeps: bool = True
    """Whether it has all that it has stored"""
    steady: bool = True
    """Whether the cancellation of one job leaves the others alone: with a peer it may take the connection."""
    seeds: int = 2
    """How many scripts of overlapping jobs it plays: those that only call functions play more"""


KINDS = {
    "dictionary": TierKind(DictionaryTier, seeds=20),
    "late": TierKind(LateTier, keeps=False, seeds=40),
    "disk": TierKind(DiskTier, seeds=8),
    "small disk": TierKind(DiskTier, pages=5, keeps=False, seeds=8),
    "peers": TierKind(PeerPair, steady=False),
    "fake Redis": TierKind(RedisTier, fake=FakeResp),
    "Redis": TierKind(RedisTier, redis_server),
    "Mooncake": TierKind(MooncakeTier, mooncake_server),
    "fake LMCache": TierKind(LMCacheTier, fake=FakeLMCache),
    "LMCache": TierKind(LMCacheTier, lmcache_server),
    "NIXL": TierKind(NixlTier, fake=FakeS3, needs=("nixl",), seeds=1),
}


class TierServers:
    """The servers of a session's tests: each is started for the first that asks, and stays."""

    def __init__(self, folder: Callable[[str], Path]) -> None:
        self._folder = folder
        self._running: dict[str, Server] = {}

    def url(self, name: str) -> str:
        """Return the address of the server of this kind, with nothing in it. Skips where it cannot run."""
        if name not in self._running:
            make = KINDS[name].server
            assert make is not None
            server = make(self._folder("server"))
            try:
                server.start(setup_of(server.url)).close()
            except BaseException:  # a skip too
                server.kill()
                raise
            self._running[name] = server
        url = self._running[name].url
        empty(url)
        return url

    def close(self) -> None:
        for server in self._running.values():
            server.kill()


class TierHome:
    """Where the tiers of one kind keep what they store, in one test: a server, what stands for it, or a folder."""

    def __init__(self, name: str | TierKind, servers: TierServers, folder: Path) -> None:
        """Skips where the real software is not there."""
        self.kind = name if isinstance(name, TierKind) else KINDS[name]
        needs(*self.kind.needs)
        url = servers.url(str(name)) if self.kind.server else ""
        self.fake = self.kind.fake() if self.kind.fake else None
        self.target = url or (self.fake.url if self.fake else str(folder))

    def stop(self) -> None:
        """End, once, what stands for a server."""
        fake, self.fake = self.fake, None
        if fake is not None:
            fake.stop()


class OpenTier:
    """A tier of a kind, and what it was opened with."""

    def __init__(self, name: str | TierKind, servers: TierServers, folder: Path, namespace: Namespace) -> None:
        self.home = TierHome(name, servers, folder)
        self.kind = self.home.kind
        self.setup = setup_of(self.home.target, self.kind.pages, namespace)
        self.tier = self.kind.make(self.setup)
        self.tier.drop([key(number) for number in NUMBERS])  # a server may have what another test has stored

    def close(self) -> None:
        """Close the tier, once."""
        tier, self.tier = self.tier, None
        if tier is not None:
            tier.close()

    def stop(self) -> None:
        """Close what is open."""
        self.close()
        self.home.stop()
