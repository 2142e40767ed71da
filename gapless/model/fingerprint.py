"""Names weights by their contents: two directories with the same model have the same fingerprint."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path

from gapless.base.host import cache_folder, usable_cores
from gapless.base.progress import tell

BLOCK, READ = 64 << 20, 1 << 20
"""Bytes that one thread digests at a time, and reads at a time"""
MOST_THREADS = 16
LARGE = 1 << 30
"""Files from this length on are worth a line of the start."""
CACHE = "digests"
"""The folder of known digests in the user's cache"""
YOUNG_NS = 2_000_000_000
"""A file that changed so short a time ago may change again with the same times: its digest is not kept."""


def fingerprint(directory: Path) -> str:
    """Return what `digest_of` returns. A file's digest is kept in the user's cache, and the file is read again when
    its device, inode, size or times have changed."""
    return _joined(directory, _kept)


def digest_of(directory: Path) -> str:
    """Return a digest of every byte of the checkpoint's config and weights, so that none can change unseen."""
    return _joined(directory, _read)


def _joined(directory: Path, file_digest: Callable[[Path], str]) -> str:
    paths = sorted([*directory.glob("*.safetensors"), directory / "config.json"])
    return sha256("\n".join([f"{path.name} {file_digest(path)}" for path in paths]).encode()).hexdigest()


def _kept(path: Path) -> str:
    """Return the digest of a file, which has been read before where the cache says so."""
    now, path = time.time_ns(), path.resolve()
    facts = path.stat()
    times = facts.st_mtime_ns, facts.st_ctime_ns
    known = f"{path} {facts.st_dev} {facts.st_ino} {facts.st_size} {times} "
    note: Path | None = None
    with suppress(OSError, RuntimeError, ValueError):  # without a cache, or with another file there
        note = cache_folder(CACHE) / sha256(str(path).encode()).hexdigest()[:32]
        text = note.read_text(encoding="utf-8")
        if text.startswith(known) and len(text) == len(known) + sha256().digest_size * 2:
            return text.removeprefix(known)
    digest = _read(path)
    if note is not None and max(times) + YOUNG_NS < now:
        with suppress(OSError):
            new = note.with_suffix(f".{os.getpid()}")
            new.write_text(known + digest, encoding="utf-8")
            new.replace(note)
    return digest


def _read(path: Path) -> str:
    """Return a digest of a file, whose blocks several threads read."""
    with path.open("rb") as file, ThreadPoolExecutor(min(usable_cores(), MOST_THREADS)) as threads:
        size = os.fstat(file.fileno()).st_size
        count = tell(f"reading {path.name} for the name of its KV", size, "bytes") if size >= LARGE else None
        digest = sha256(f"{size} ".encode())
        for block in threads.map(partial(_block, file.fileno()), range(0, size, BLOCK)):
            digest.update(block)
            if count is not None:
                count(BLOCK)
    return digest.hexdigest()


def _block(file: int, start: int) -> bytes:
    digest, at = sha256(), start
    while at < start + BLOCK and (data := os.pread(file, min(READ, start + BLOCK - at), at)):
        digest.update(data)
        at += len(data)
    return digest.digest()
