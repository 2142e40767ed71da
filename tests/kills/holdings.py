"""What processes hold at rest: a leak of each kill shows as descriptors, threads, mappings or memory that grow."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SLACK = 16 << 20
"""Bytes by which a process may grow from the first half of the rounds to the second: allocators keep what they had."""
REST_SECONDS = 30
LOOK_SECONDS = 0.1
BUSY = re.compile(
    r"^(?:vllm:num_requests_(?:running|waiting)\{|gapless:(?:steps_in_flight\{|kv_(?:lower_)?tier_moving\{"
    r'|kv_pages\{.*state="(?:owned|fenced)"))'
)
"""Series that are 0 where no request runs, no transfer moves a page, and none is pinned"""
PINNED = re.compile(r"^gapless:kv_tier_pinned\{")
"""A series that is 0 where no copy in the host tier is in use. Copies offered to peers count, for up to a minute."""


class Holdings(NamedTuple):
    """What one process holds."""

    descriptors: int
    threads: int
    shared: int
    """Mappings of memory that other processes may map too"""
    resident: int
    """Bytes of memory"""

    @property
    def counts(self) -> tuple[int, ...]:
        """Those that are equal at rest"""
        return self[:3]


def holdings(pid: int) -> Holdings:
    folder = Path(f"/proc/{pid}")
    maps = [line.split()[1] for line in (folder / "maps").read_text().splitlines()]
    pages = int((folder / "statm").read_text().split()[1])
    tasks, descriptors = (len([*(folder / name).iterdir()]) for name in ("task", "fd"))
    return Holdings(descriptors, tasks, sum(mode[3] == "s" for mode in maps), pages * os.sysconf("SC_PAGE_SIZE"))


def children(pid: int) -> list[int]:
    """Return the processes that this one has started and that have not ended."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            found += [int(stat.parent.name)] if int(parent) == pid and state != "Z" else []
    return sorted(found)


def words_of(pid: int) -> list[str]:
    """Return what a process was started with; nothing where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError):
        return []


def alive(pid: int) -> bool:
    try:
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def busy_series(page: str, *further: re.Pattern[str]) -> list[str]:
    """Return the lines of a metrics page that say that something is held or runs: series of BUSY, and further ones."""
    lines = [line for line in page.splitlines() if any(kind.match(line) for kind in (BUSY, *further))]
    return [line for line in lines if float(line.split()[-1])]


def settled(look: Callable[[], object], wanted: object, what: str, seconds: float | None = None) -> None:
    """Wait until `look` returns what is wanted, by default for REST_SECONDS at most."""
    until = time.monotonic() + (REST_SECONDS if seconds is None else seconds)
    while (found := look()) != wanted:
        assert time.monotonic() < until, f"{what}: {found}, and not {wanted}"
        time.sleep(LOOK_SECONDS)


class Ward:
    """Notes what processes hold whenever all is at rest, by name and process: one that was started again is new.

    The first note of a process is what its counts must come back to. Its memory is compared by halves of the notes.
    """

    def __init__(self) -> None:
        self._notes: dict[tuple[str, int], list[Holdings]] = {}

    def note(self, processes: Mapping[str, int]) -> None:
        for name, pid in processes.items():
            notes = self._notes.setdefault((name, pid), [])
            if notes:
                # Fewer are taken for better: they are what later notes must come back to.
                settled(lambda pid=pid, notes=notes: _above(holdings(pid), notes), (), f"{name} keeps more, of its")
            notes.append(holdings(pid))

    def growth(self) -> dict[str, int]:
        """Return by how many bytes each process that lived has grown from the first half of the notes to the second."""
        lived = {name: notes for (name, _), notes in self._notes.items() if len(notes) > 1}
        return {name: _growth([note.resident for note in notes]) for name, notes in lived.items()}

    def faults(self) -> list[str]:
        return [f"{name} grew by {grown >> 20} MiB" for name, grown in self.growth().items() if grown > SLACK]


def _above(now: Holdings, notes: list[Holdings]) -> tuple[str, ...]:
    """Name the counts that are above the least of the notes."""
    least = [min(counts) for counts in zip(*(note.counts for note in notes), strict=True)]
    names = ("descriptors", "threads", "shared mappings")
    return tuple(
        f"{name}: {count} after {low}" for name, count, low in zip(names, now.counts, least, strict=True) if count > low
    )


def _growth(sizes: list[int]) -> int:
    half = len(sizes) // 2
    return max(sizes[half:]) - max(sizes[:half])
