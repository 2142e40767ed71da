"""A tier of KV pages in a file of SQLite: --kv-tier host:8GiB --kv-tier sqlite:/var/kv.db"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from gapless.base.errors import ConfigError
from gapless.offload.tiers.blocking import BlockingTier
from gapless.offload.tiers.seam import Found, TierPage, TierSetup


class SqliteTier(BlockingTier):
    def __init__(self, setup: TierSetup) -> None:
        super().__init__()
        self.model = setup.namespace.digest
        try:
            self.file = sqlite3.connect(setup.target, timeout=1, isolation_level=None, check_same_thread=False)
            self.file.execute("create table if not exists pages (key blob primary key, checksum integer, bytes blob)")
        except sqlite3.Error as error:
            raise ConfigError(f"kv_tiers: sqlite:{setup.target} cannot be opened: {error}") from error

    def lookup(self, keys: Sequence[bytes]) -> list[Found]:
        return [Found.HIT if self._find("1", key) else Found.MISS for key in keys]

    def store(self, job: int, pages: Sequence[TierPage]) -> None:
        rows = [(self.model + page.key, page.checksum, page.slot) for page in pages]
        self.file.executemany("insert or ignore into pages values (?, ?, ?)", rows)
        self._end(job, pages, [page.checksum for page in pages])

    def load(self, job: int, pages: Sequence[TierPage]) -> None:
        checksums = []
        for page in pages:
            found = self._find("checksum, bytes", page.key)
            if found is None or len(found[1]) != len(page.slot):
                break
            page.slot[:] = found[1]
            checksums.append(found[0])
        self._end(job, pages, checksums)

    def touch(self, keys: Sequence[bytes]) -> None:
        """Do nothing: no page is given up."""

    def drop(self, keys: Sequence[bytes]) -> None:
        self.file.executemany("delete from pages where key = ?", [(self.model + key,) for key in keys])

    def close(self) -> None:
        self.file.close()

    def _find(self, columns: str, key: bytes) -> tuple | None:
        return self.file.execute(f"select {columns} from pages where key = ?", (self.model + key,)).fetchone()
