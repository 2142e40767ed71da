"""The disk tier: pages in one file of fixed slots, and a log that says which page each slot holds.

The log has a header of one block, whose first line names the pages' model in words, and then records of one size,
each the last word about its slot. A record is sealed with the namespace, its key and the page's checksum; whatever does
not fit that, whether torn, foreign or old, is a page that is not there. Data is written before its record, and nothing
is synced: what a power failure takes has another checksum, and is computed again.
"""

from __future__ import annotations

import fcntl
import json
import mmap
import os
import struct
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gapless.base.errors import ConfigError
from gapless.base.progress import announce
from gapless.offload.tiers.blocking import BlockingTier
from gapless.offload.tiers.seam import SEAL_BYTES, Found, Namespace, TierPage, TierSetup, seal

DISK_BLOCK = 4096
MAGIC = "gapless KV pages, version 1"
PAGES_FILE, LOG, LOCK_FILE = "gapless-kv.pages", "gapless-kv.index", "gapless-kv.lock"
_RECORD = struct.Struct("<36sIQqI")
"""Key, slot, generation, checksum, bytes of the page; 0 bytes where the slot holds nothing any more"""
RECORD_BYTES = _RECORD.size + SEAL_BYTES
SPARE_RECORDS = 1024
"""The log is rewritten when it has more than these records beyond twice its slots."""


class DiskRecord(NamedTuple):
    """A slot, as the log has it."""

    key: bytes
    slot: int
    generation: int
    checksum: int
    nbytes: int

    def packed(self, namespace: bytes) -> bytes:
        body = _RECORD.pack(*self)
        return body + seal(namespace, body)

    @classmethod
    def read(cls, data: bytes, namespace: bytes) -> DiskRecord | None:
        """Return the record in these bytes; None if its seal is not that of the namespace."""
        body = data[: _RECORD.size]
        return cls(*_RECORD.unpack(body)) if data[_RECORD.size :] == seal(namespace, body) else None


class DiskHeader(NamedTuple):
    """The first block of the log."""

    namespace: Namespace
    slots: int
    slot_bytes: int

    def packed(self) -> bytes:
        facts = {"pages": json.loads(self.namespace.text), "slots": self.slots, "slot_bytes": self.slot_bytes}
        text = f"{MAGIC}\n{json.dumps(facts, sort_keys=True)}\n".encode()
        assert len(text) <= DISK_BLOCK, "a namespace that does not fit the header"
        return text.ljust(DISK_BLOCK, b" ")

    @classmethod
    def read(cls, block: bytes) -> DiskHeader | None:
        """Return the header in this block; None if it is not one of ours."""
        try:
            magic, text, _ = block.decode().split("\n", 2)
            facts = json.loads(text)
            header = cls(Namespace.of(facts["pages"]), int(facts["slots"]), int(facts["slot_bytes"]))
        except (ValueError, TypeError, KeyError):
            return None
        return header if magic == MAGIC and header.slots > 0 and header.slot_bytes > 0 else None


class DiskTier(BlockingTier):
    """Keeps pages in a directory of its own. Jobs are done when `store` and `load` return."""

    def __init__(self, setup: TierSetup) -> None:
        """Open what the directory has. Raises ConfigError."""
        super().__init__()
        self.directory = Path(setup.target).expanduser()
        slot_bytes = max(setup.slot_bytes)
        self.header = DiskHeader(setup.namespace, setup.nbytes // slot_bytes, slot_bytes)
        if not self.header.slots:
            raise ConfigError(
                f"kv_tiers: disk:{setup.target} of {setup.nbytes:,} bytes holds no page, which takes {slot_bytes:,}"
            )
        self._namespace = setup.namespace.digest
        self._records: OrderedDict[bytes, DiskRecord] = OrderedDict()
        """Records of the stored pages, the least recently used first"""
        self._generation = self._written = 0
        self._file = self._log = self._lock = -1
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._fits(setup)
            self._lock = _locked(self.directory)
            self._log = os.open(self.directory / LOG, os.O_RDWR | os.O_CREAT, 0o600)
            self._file = os.open(self.directory / PAGES_FILE, os.O_RDWR | os.O_CREAT, 0o600)
            self.direct = all(_aligned(memory) for memory in setup.memory) and _takes_direct(self._file)
            self._recover()
        except OSError as error:
            self._let_go()
            raise ConfigError(f"kv_tiers: disk:{setup.target}: {error.strerror or error}") from error

    def _fits(self, setup: TierSetup) -> None:
        """Raise ConfigError where the filesystem is smaller than the tier."""
        disk = os.statvfs(self.directory)
        if 0 < (most := disk.f_blocks * disk.f_frsize) < setup.nbytes:
            asked = f"kv_tiers: disk:{setup.target} asks for {setup.nbytes:,} bytes"
            raise ConfigError(f"{asked} of a filesystem that has {most:,}: give less")

    def _recover(self) -> None:
        """Take over what an earlier process has left, and rewrite the log."""
        header, data = read_log(self.directory / LOG)
        if header is not None and header._replace(slots=0) == self.header._replace(slots=0):
            whole = min(self.header.slots, os.fstat(self._file).st_size // self.header.slot_bytes)
            for record in live_records(data, self._namespace):
                if record.slot < whole:
                    self._records[record.key] = record
                    self._generation = max(self._generation, record.generation)
        elif os.fstat(self._log).st_size:
            announce(f"beginning an empty disk tier: what {self.directory} has is of another model, version or setting")
        taken = {record.slot for record in self._records.values()}
        self._free = [slot for slot in range(self.header.slots - 1, -1, -1) if slot not in taken]
        os.ftruncate(self._file, min(os.fstat(self._file).st_size, self.header.slots * self.header.slot_bytes))
        self._rewrite()

    # The methods of a tier; see `seam.KVTier`.

    @property
    def room(self) -> tuple[int, int]:
        return len(self._records) * self.header.slot_bytes, self.header.slots * self.header.slot_bytes

    def lookup(self, keys: Sequence[bytes]) -> list[Found]:
        return [Found.HIT if key in self._records else Found.MISS for key in keys]

    def store(self, job: int, pages: Sequence[TierPage]) -> None:
        done: list[int] = []
        nbytes = 0
        for page in pages:
            if page.key not in self._records:
                if not self._write(page):
                    break
                nbytes += len(page.slot)
            done.append(page.checksum)
        self._end(job, pages, done, nbytes)

    def load(self, job: int, pages: Sequence[TierPage]) -> None:
        done: list[int] = []
        for page in pages:
            record = self._records.get(page.key)
            if record is None or record.nbytes != len(page.slot) or not self._read(record, page.slot):
                break
            self._records.move_to_end(page.key)
            done.append(record.checksum)
        self._end(job, pages, done)

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if key in self._records:
                self._records.move_to_end(key)

    def drop(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            if (record := self._records.pop(key, None)) is not None:
                self._free.append(record.slot)  # even if the log has no space for it
                self._say(record._replace(nbytes=0))

    def close(self) -> None:
        """Write the log in the order of use, for the next process, and let go of the directory."""
        try:
            if self._log >= 0:
                self._rewrite()
        finally:
            self._let_go()

    def _let_go(self) -> None:
        for handle in (self._file, self._log, self._lock):
            if handle >= 0:
                os.close(handle)
        self._file = self._log = self._lock = -1  # a second close must not close what others have opened since

    # Slots.

    def _write(self, page: TierPage) -> bool:
        if not self._free:
            self.drop([next(iter(self._records))])
        slot = self._free.pop()
        try:
            written = os.pwrite(self._file, page.slot, slot * self.header.slot_bytes)
        except OSError:  # no space, a quota, a bad block
            written = 0
        if written < len(page.slot):
            self._free.insert(0, slot)
            if self._records:
                self.drop([next(iter(self._records))])  # the next page goes where there is space
            return False
        self._generation += 1
        record = DiskRecord(page.key, slot, self._generation, page.checksum, len(page.slot))
        self._records[page.key] = record
        self._say(record)
        return True

    def _read(self, record: DiskRecord, memory: memoryview) -> bool:
        try:
            return os.preadv(self._file, [memory], record.slot * self.header.slot_bytes) == len(memory)
        except OSError:
            return False

    # The log.

    def _say(self, record: DiskRecord) -> None:
        os.pwrite(self._log, record.packed(self._namespace), DISK_BLOCK + self._written * RECORD_BYTES)
        self._written += 1
        if self._written > 2 * self.header.slots + SPARE_RECORDS:
            self._rewrite()

    def _rewrite(self) -> None:
        """Write a new log of the stored pages, and put it in the place of the old one."""
        new = self.directory / f"{LOG}.new"
        body = b"".join(record.packed(self._namespace) for record in self._records.values())
        log = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            with open(log, "wb", closefd=False) as file:
                file.write(self.header.packed() + body)
            os.replace(new, self.directory / LOG)
        except OSError:
            os.close(log)
            raise
        os.close(self._log)
        self._log = log
        self._written = len(self._records)


def read_log(path: Path) -> tuple[DiskHeader | None, bytes]:
    """Return the header of a log and its bytes; nothing of a file that is none of ours. Raises OSError."""
    with path.open("rb") as file:
        block = file.read(DISK_BLOCK)
        header = DiskHeader.read(block)
        return header, block + file.read() if header is not None else b""


def live_records(log: bytes, namespace: bytes) -> list[DiskRecord]:
    """Return the records of stored pages in a log, in its order."""
    by_slot: dict[int, DiskRecord] = {}
    for start in range(DISK_BLOCK, len(log) - RECORD_BYTES + 1, RECORD_BYTES):
        if (record := DiskRecord.read(log[start : start + RECORD_BYTES], namespace)) is None:
            continue
        by_slot.pop(record.slot, None)
        if record.nbytes:
            by_slot[record.slot] = record
    by_key = {record.key: record for record in by_slot.values()}
    return [record for record in by_slot.values() if by_key[record.key] is record]


def describe(directory: Path) -> dict[str, Any]:
    """Return a disk tier's namespace and sizes. Raises ConfigError for any other file."""
    path = directory / LOG
    try:
        header, log = read_log(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}: name the directory of a disk tier") from error
    if header is None:
        raise ConfigError(f"{path} is no index of a disk tier of this version: name another directory")
    pages = directory / PAGES_FILE
    whole = pages.stat().st_size // header.slot_bytes if pages.exists() else 0
    records = [record for record in live_records(log, header.namespace.digest) if record.slot < whole]
    return {
        "pages of": json.loads(header.namespace.text),
        "slots": header.slots,
        "slot_bytes": header.slot_bytes,
        "used": len(records),
        "used_bytes": sum(record.nbytes for record in records),
        "file_bytes": pages.stat().st_blocks * 512 if pages.exists() else 0,
        "written": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime)),
    }


def _locked(directory: Path) -> int:
    """Return the handle that locks the directory, for as long as this process lives. Raises ConfigError."""
    handle = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise ConfigError(f"kv_tiers: disk:{directory} is in use by another engine: give each its own") from error
    return handle


def _aligned(memory: memoryview) -> bool:
    import numpy as np

    return bool(np.frombuffer(memory, np.uint8).ctypes.data % DISK_BLOCK == 0)


def _takes_direct(file: int) -> bool:
    """Have the file bypass the page cache, if its filesystem can; return whether it does."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    direct = getattr(os, "O_DIRECT", 0)  # Linux has it
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | direct)
        with mmap.mmap(-1, DISK_BLOCK) as block:
            os.preadv(file, [block], 0)
    except OSError:
        fcntl.fcntl(file, fcntl.F_SETFL, flags)
        return False
    return direct > 0
