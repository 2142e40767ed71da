"""Names weights by their contents: two directories with the same model have the same fingerprint."""

from __future__ import annotations

from hashlib import file_digest, sha256
from pathlib import Path
from typing import BinaryIO

WHOLE = 64 << 20
"""Files up to this length are read as a whole."""
SAMPLES, SAMPLE_BYTES = 256, 64 << 10
"""Samples of a longer file, evenly spaced, beside its header with all names, dtypes and shapes"""


def fingerprint(directory: Path) -> str:
    """Return a digest of the checkpoint's config and weights: headers whole, contents of large files by samples."""
    digest = sha256()
    for path in sorted([*directory.glob("*.safetensors"), directory / "config.json"]):
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            for start, length in _parts(file, size):
                file.seek(start)
                digest.update(file.read(length))
    return digest.hexdigest()


def digest_of(directory: Path) -> str:
    """Return a digest of every byte of the checkpoint's config and weights, so that none can change unseen."""
    digest = sha256()
    for path in sorted([*directory.glob("*.safetensors"), directory / "config.json"]):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        with path.open("rb") as file:
            digest.update(file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _parts(file: BinaryIO, size: int) -> list[tuple[int, int]]:
    """Return what is read of a file: (start, bytes)."""
    if size <= WHOLE:
        return [(0, size)]
    header = 8 + int.from_bytes(file.read(8), "little")
    step = (size - SAMPLE_BYTES) // (SAMPLES - 1)
    return [(0, header), *((number * step, SAMPLE_BYTES) for number in range(SAMPLES))]
