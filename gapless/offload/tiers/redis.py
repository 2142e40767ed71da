"""The Redis tier: pages on servers that several hosts share. What they keep, and for how long, is their own business.

A value is a header of 32 bytes, sealed with namespace, key and checksum, and then the slot's bytes. It is set in one
command, so it exists as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import parse_qsl, unquote, urlsplit

from gapless.base.addresses import hide_password
from gapless.base.errors import ConfigError
from gapless.offload.tiers.blocking import BlockingTier, leading
from gapless.offload.tiers.sealed import HEAD_BYTES, checksum_in, head_of
from gapless.offload.tiers.seam import Found, TierPage, TierSetup

REDIS_SECONDS = 1.0
"""How long the server may be silent"""
BACK_OFF_SECONDS = 1.0
KEY_PREFIX = b"gapless:kv:"


class RedisTier(BlockingTier):
    """Keeps pages on a server. Jobs are done when `store` and `load` return; a server that fails has nothing."""

    def __init__(self, setup: TierSetup, seconds: float = REDIS_SECONDS, back_off: float = BACK_OFF_SECONDS) -> None:
        """Connect. Raises ConfigError when the server does not answer."""
        super().__init__()
        self._namespace = setup.namespace.digest
        where = hide_password(setup.target).removeprefix("redis://")
        try:
            from gapless.offload.tiers.redis_links import FAULTS, RedisLinks
        except ImportError as error:
            raise ConfigError(f"kv_tiers: redis needs its client (pip install 'redis>=8.1'): {error}") from error
        try:
            self._links = RedisLinks(setup.target, seconds, back_off)
        except (*FAULTS, TypeError, ValueError) as error:
            if any(word in str(error) for word in _passwords(setup.target)):  # some servers repeat the command
                raise ConfigError(f"kv_tiers: no Redis answers at {where}: {type(error).__name__}") from None
            raise ConfigError(f"kv_tiers: no Redis answers at {where}: {error}") from error

    def lookup(self, keys: Sequence[bytes]) -> list[Found]:
        answers = self._links.ask([[b"EXISTS", KEY_PREFIX + key] for key in keys])
        return [Found.HIT if answer == 1 else Found.MISS for answer in answers]

    def store(self, job: int, pages: Sequence[TierPage]) -> None:
        has = self.lookup([page.key for page in pages])
        new = [page for page, found in zip(pages, has, strict=True) if found is Found.MISS]
        values = [head_of(self._namespace, page) + bytes(page.slot) for page in new]
        answers = self._links.ask(
            [[b"SET", KEY_PREFIX + page.key, value] for page, value in zip(new, values, strict=True)]
        )
        kept = {page.key for page, answer in zip(new, answers, strict=True) if answer == b"OK"}
        lost = {page.key for page in new} - kept
        done = [*leading(None if page.key in lost else page.checksum for page in pages)]
        nbytes = sum(len(page.slot) for page in new if page.key in kept)
        self._end(job, pages, done, nbytes)

    def load(self, job: int, pages: Sequence[TierPage]) -> None:
        heads = [memoryview(bytearray(HEAD_BYTES)) for _ in pages]
        memories = [[head, page.slot] for head, page in zip(heads, pages, strict=True)]
        answers = self._links.ask([[b"GET", KEY_PREFIX + page.key] for page in pages], memories)
        came = zip(pages, heads, answers, strict=True)
        sums = (checksum_in(head, self._namespace, page) if answer == b"" else None for page, head, answer in came)
        self._end(job, pages, [*leading(sums)])

    def touch(self, keys: Sequence[bytes]) -> None:
        self._links.ask([[b"TOUCH", KEY_PREFIX + key] for key in keys])

    def drop(self, keys: Sequence[bytes]) -> None:
        self._links.ask([[b"DEL", KEY_PREFIX + key] for key in keys])

    def close(self) -> None:
        self._links.close()


def _passwords(target: str) -> list[str]:
    """Return the server's password in an address, and the passwords in its query."""
    parts = urlsplit(target)
    asked = [value for name, value in parse_qsl(parts.query) if name.endswith("password")]
    return [word for word in (unquote(parts.password or ""), *asked) if word]
