"""Names weights by their contents: two directories with the same model have the same fingerprint."""

from __future__ import annotations

import json
from hashlib import file_digest, sha256
from pathlib import Path
from typing import BinaryIO

WHOLE = 64 << 20
"""Files up to this length are read as a whole."""
SAMPLES, SAMPLE_BYTES = 4, 16 << 10
"""Samples of each tensor of a longer file, evenly spaced, beside its header with all names, dtypes and shapes"""


def fingerprint(directory: Path) -> str:
    """Return a digest of the checkpoint's config and weights: headers whole, contents of large files by samples of each
    tensor. A few numbers changed within a tensor may go unseen; `digest_of` sees all."""
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
    begin = 8 + int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(begin - 8))
    spans = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    return [(0, begin), *(part for low, high in sorted(spans) for part in _samples(begin + low, begin + high))]


def _samples(low: int, high: int) -> list[tuple[int, int]]:
    length = min(SAMPLE_BYTES, high - low)
    step = (high - low - length) // (SAMPLES - 1)
    return [(low + number * step, length) for number in range(SAMPLES)]
