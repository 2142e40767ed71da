"""The Redis tier: pages on a server that several hosts share. What it keeps, and for how long, is its own business.

A value is a header of 32 bytes, sealed with namespace, key and checksum, and then the slot's bytes. It is set in one
command, so it is there as a whole or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence

from gapless.base.errors import ConfigError
from gapless.tiers.blocking import BlockingTier, leading
from gapless.tiers.resp import Reply, RespClient, RespError
from gapless.tiers.sealed import HEAD_BYTES, checksum_in, head_of
from gapless.tiers.seam import Found, TierPage, TierSetup

SECONDS = 1.0
"""How long the server may be silent"""
BACK_OFF_SECONDS = 1.0
PREFIX = b"gapless:kv:"


class RedisTier(BlockingTier):
    """Keeps pages on a server. Jobs are done when `store` and `load` return; a server that fails has nothing."""

    def __init__(self, setup: TierSetup, seconds: float = SECONDS, back_off: float = BACK_OFF_SECONDS) -> None:
        """Connect. Raises ConfigError when the server does not answer."""
        super().__init__()
        self._client = RespClient(setup.target, seconds, back_off)
        self._namespace = setup.namespace.digest
        try:
            self._client.send([[b"PING"]])
            self._client.read()
        except OSError as error:
            self._client.close()
            where = setup.target.rpartition("@")[2].removeprefix("redis://")  # without the password
            raise ConfigError(f"kv_tiers: no Redis answers at {where}: {error}") from error

    def lookup(self, keys: Sequence[bytes]) -> list[Found]:
        answers = self._ask([[b"EXISTS", PREFIX + key] for key in keys])
        return [Found.HIT if answer == 1 else Found.MISS for answer in answers]

    def store(self, job: int, pages: Sequence[TierPage]) -> None:
        has = self.lookup([page.key for page in pages])
        new = [page for page, found in zip(pages, has, strict=True) if found is Found.MISS]
        values = [head_of(self._namespace, page) + bytes(page.slot) for page in new]
        answers = self._ask([[b"SET", PREFIX + page.key, value] for page, value in zip(new, values, strict=True)])
        kept = {page.key for page, answer in zip(new, answers, strict=True) if answer == b"OK"}
        lost = {page.key for page in new} - kept
        done = [*leading(None if page.key in lost else page.checksum for page in pages)]
        nbytes = sum(len(page.slot) for page in new if page.key in kept)
        self._end(job, pages, done, nbytes)

    def load(self, job: int, pages: Sequence[TierPage]) -> None:
        done: list[int] = []
        try:
            self._client.send([[b"GET", PREFIX + page.key] for page in pages])
            for place, page in enumerate(pages):
                checksum = self._loaded(page)
                if checksum is not None and len(done) == place:
                    done.append(checksum)
        except OSError:
            self._client.close()  # answers that were not read would pass for those of the next job
        self._end(job, pages, done)

    def touch(self, keys: Sequence[bytes]) -> None:
        self._ask([[b"TOUCH", *(PREFIX + key for key in keys)]])

    def drop(self, keys: Sequence[bytes]) -> None:
        self._ask([[b"DEL", *(PREFIX + key for key in keys)]])

    def close(self) -> None:
        self._client.close()

    def _ask(self, commands: Sequence[Sequence[bytes]]) -> list[Reply]:
        """Return the answers; None for errors, and for all that a server which fails has not answered."""
        answers: list[Reply] = []
        try:
            self._client.send(commands)
            for _ in commands:
                try:
                    answers.append(self._client.read())
                except RespError:
                    answers.append(None)
        except OSError:
            pass
        return answers + [None] * (len(commands) - len(answers))

    def _loaded(self, page: TierPage) -> int | None:
        """Read one value into its slot; return its checksum, None for a value that is not ours, or not there."""
        head = memoryview(bytearray(HEAD_BYTES))
        return checksum_in(head, self._namespace, page) if self._client.read([head, page.slot]) == b"" else None
