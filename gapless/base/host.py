"""Facts about this machine and what the process may use: cores and memory, container limits included."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
CPUINFO = Path("/proc/cpuinfo")


def usable_cores() -> int:
    """Cores that this process may run on, at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    return max(1, min(cores, _quota_cores(cores)))


def processor_says(name: str) -> str:
    """Return the entry `name` of the first processor in /proc/cpuinfo; empty where there is none."""
    try:
        lines = CPUINFO.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def memory() -> tuple[int, int]:
    """Free and total bytes for this process."""
    free, total = _machine_memory()
    limit, used = _read_int("memory.max"), _read_int("memory.current")
    if limit is None or used is None or limit >= total:
        return free, total
    # Cached file pages count as used, a loaded checkpoint's too, but are given up when memory is asked for.
    return max(0, min(free, limit - used + _cached_files())), limit


def _cached_files() -> int:
    try:
        rows = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return 0
    return sum(int(rows.get(name, 0)) for name in ("active_file", "inactive_file"))


def _quota_cores(cores: int) -> int:
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
    except OSError:
        return cores
    return cores if quota == "max" else -(-int(quota) // int(period))


def _machine_memory() -> tuple[int, int]:
    if MEMINFO.exists():
        rows = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        free, total = (int(rows[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
        return free, total
    # No free figure without /proc: take half, which leaves room for the system.
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total // 2, total


def _read_int(name: str) -> int | None:
    try:
        text = (CGROUP / name).read_text().strip()
    except OSError:
        return None
    return None if text == "max" else int(text)
