"""Facts about this machine and what the process may use: cores and memory, container limits included."""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
CPUINFO = Path("/proc/cpuinfo")
STAT = Path("/proc/stat")


def usable_cores() -> int:
    """Cores that this process may run on, at least 1."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota, _, period = _read(CGROUP / "cpu.max").partition(" ")
    return max(1, min(cores, -(-int(quota) // int(period)))) if quota.isdecimal() else cores


def cache_folder(name: str) -> Path:
    """Return a folder of the user's cache, created if needed. No other user may write there: its contents are trusted.

    Raises OSError, and RuntimeError where the user has no home directory.
    """
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gapless" / name
    for one in (folder.parent, folder):
        one.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = one.stat()
        if {facts.st_uid, one.lstat().st_uid} != {os.getuid()} or (one is folder and facts.st_mode & 0o022):
            raise PermissionError(f"{one} can be written by others: it must be yours alone")
        if facts.st_mode & 0o022:  # left by another umask; what others have put there is refused by its owner
            one.chmod(facts.st_mode & 0o755)
    return folder


def processor_says(name: str) -> str:
    """Return the entry `name` of the first processor in /proc/cpuinfo; empty where there is none."""
    lines = _read(CPUINFO).splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def is_python_optimized() -> bool:
    """Return whether this interpreter was built with its optimizations, by the arguments of its build.

    A build of one's own, or of pyenv, has the flag among its arguments. Distributions' builds, under /usr, count as
    optimized: Debian has another way to ask for it.
    """
    arguments = sysconfig.get_config_var("CONFIG_ARGS")
    return arguments is None or "--enable-optimizations" in arguments or "'--prefix=/usr'" in arguments


def processor_time() -> tuple[int, int]:
    """Return busy and whole processor time of the machine so far, in ticks of all cores; 0 and 0 without /proc."""
    ticks = [int(number) for number in _read(STAT).partition("\n")[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4], sum(ticks)) if len(ticks) == 8 else (0, 0)


def resident(pid: int | str) -> int:
    """Return the bytes of memory that a process holds; 0 where that is not known."""
    pages = _read(Path(f"/proc/{pid}/statm")).split()
    return int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if len(pages) > 1 else 0


def with_children(pid: int) -> list[int]:
    """Return a process and the ones that it has started, as far as the system shows them."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [pid, *(int(child) for one in lists for child in _read(one).split())]


def memory() -> tuple[int, int]:
    """Free and total bytes for this process."""
    free, total = _machine_memory()
    limit, used = _read(CGROUP / "memory.max"), _read(CGROUP / "memory.current")
    if not limit.isdecimal() or not used.isdecimal() or int(limit) >= total:
        return free, total
    # Cached file pages count as used, a loaded checkpoint's too, but are given up when memory is asked for.
    rows = dict(line.split() for line in _read(CGROUP / "memory.stat").splitlines())
    cached = sum(int(rows.get(name, 0)) for name in ("active_file", "inactive_file"))
    return max(0, min(free, int(limit) - int(used) + cached)), int(limit)


def _read(path: Path) -> str:
    """Return the text of a file; empty where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _machine_memory() -> tuple[int, int]:
    if MEMINFO.exists():
        rows = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        free, total = (int(rows[key].split()[0]) * 1024 for key in ("MemAvailable", "MemTotal"))
        return free, total
    # No free figure without /proc: take half, which leaves room for the system.
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total // 2, total
