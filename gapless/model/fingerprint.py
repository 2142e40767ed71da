"""Names weights by their contents: two directories with the same model have the same fingerprint."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path

from gapless.base.files import GGUF_NAME
from gapless.base.host import cache_folder, usable_cores
from gapless.base.progress import announce

HASH_BLOCK, READ_BYTES = 64 << 20, 1 << 20
"""Bytes that one thread digests at a time, and reads at a time"""
SAMPLES, SAMPLE_BYTES = 256, 4096
"""Parts of a file that ranks compare, and bytes of each"""
MOST_THREADS = 16
LARGE = 1 << 30
"""Reading a file of at least this many bytes is reported as progress of the start."""
DIGESTS = "digests"
"""The folder of known digests in the user's cache"""
YOUNG_NS = 2_000_000_000
"""The digest of a file that changed less than this before is not cached: it may change again with the same times."""

log = logging.getLogger("gapless.offload.tiers")
read_before: dict[str, str] = {}
"""Digests by a file's facts: a start looks twice at its weights"""


def fingerprint(directory: Path) -> str:
    """Return what `digest_of` returns. Digests of files are kept in this process and in the user's cache, and a file is
    read again when its device, inode, size or times have changed."""
    return _joined(directory, _kept)


def digest_of(directory: Path) -> str:
    """Return a digest of every byte of the checkpoint's config and weights, so that none can change unseen."""
    return _joined(directory, _read)


def weights_digest(directory: Path, seed: int | None = None) -> str:
    """Return a cheap digest, for ranks to compare their weights: of the config and of samples of each file of weights,
    its header first; or of the config and the `seed` of dummy weights."""
    if seed is None:
        return _joined(directory, _sampled)
    return sha256(f"{seed} ".encode() + (directory / "config.json").read_bytes()).hexdigest()


def _sampled(path: Path) -> str:
    """Return a digest of a file's size and evenly spread parts."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = sha256(f"{size} ".encode())
        for start in sorted({number * size // SAMPLES for number in range(SAMPLES)}):
            digest.update(os.pread(file.fileno(), SAMPLE_BYTES, start))
    return digest.hexdigest()


def stamp(directory: Path) -> tuple[tuple[str, int, int], ...]:
    """Return name, size and time of change of each file of a model: another if some file has been written since."""
    return tuple([(path.name, facts.st_size, facts.st_mtime_ns) for path in _files(directory)
                  if (facts := path.stat())])  # fmt: skip


def _files(directory: Path) -> list[Path]:
    return sorted([*directory.glob("*.safetensors"), *directory.glob(GGUF_NAME), directory / "config.json"])


def _joined(directory: Path, file_digest: Callable[[Path], str]) -> str:
    paths = _files(directory)
    return sha256("\n".join([f"{path.name} {file_digest(path)}" for path in paths]).encode()).hexdigest()


def _kept(path: Path) -> str:
    """Return the digest of a file: the cached one if the file is unchanged since, or that of its bytes."""
    now, path = time.time_ns(), path.resolve()
    facts = path.stat()
    known = f"{path} {facts.st_dev} {facts.st_ino} {facts.st_size} {(facts.st_mtime_ns, facts.st_ctime_ns)} "
    if known in read_before:
        return read_before[known]
    note = _note_of(path)
    if note is not None:
        with suppress(OSError, ValueError):  # there is none, or another file
            text = note.read_text(encoding="utf-8")
            if text.startswith(known) and len(text) == len(known) + sha256().digest_size * 2:
                return text.removeprefix(known)
    digest = _read(path)
    if facts.st_ctime_ns + YOUNG_NS < now:
        read_before[known] = digest
        if note is not None:
            with suppress(OSError):
                new = note.with_suffix(f".{os.getpid()}")
                new.write_text(known + digest, encoding="utf-8")
                new.replace(note)
    return digest


def _note_of(path: Path) -> Path | None:
    """Return where the digest of a file is kept; None where the user has no cache."""
    try:
        return cache_folder(DIGESTS) / sha256(str(path).encode()).hexdigest()[:32]
    except (OSError, RuntimeError) as error:
        log.warning("each start reads all of %s, since its digest cannot be kept: %s", path.name, error)
        return None


def _read(path: Path) -> str:
    """Return a digest of a file, whose blocks several threads read."""
    with path.open("rb") as file, ThreadPoolExecutor(min(usable_cores(), MOST_THREADS)) as threads:
        size = os.fstat(file.fileno()).st_size
        count = announce(f"hashing {path.name} to identify its KV pages", size, "bytes") if size >= LARGE else None
        digest, left = sha256(f"{size} ".encode()), size
        for block in threads.map(partial(_block, file.fileno()), range(0, size, HASH_BLOCK)):
            digest.update(block)
            if count is not None:
                count(min(HASH_BLOCK, left))
                left -= HASH_BLOCK
    return digest.hexdigest()


def _block(file: int, start: int) -> bytes:
    digest, at = sha256(), start
    while at < start + HASH_BLOCK and (data := os.pread(file, min(READ_BYTES, start + HASH_BLOCK - at), at)):
        digest.update(data)
        at += len(data)
    return digest.digest()
