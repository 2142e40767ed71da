"""Holds what a detector found, as records and as text, for all detectors; `report_files` writes it for machines."""

from __future__ import annotations

import linecache
from collections import Counter
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

from . import forks
from .sites import UNKNOWN, Frame, shown

_CALLERS_SHOWN = 3
_SET_UP = """
    __init__ __new__ __post_init__ from_pretrained from_config load_model load_state_dict load_checkpoint
    restore_checkpoint prepare setup set_up warmup warm_up capture
""".split()  # noqa: SIM905
"""Functions that programs call before their loops. A loop inside of one is part of the set-up."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that should not have happened. `stack` is the program's, innermost frame first, libraries included."""

    detector: str
    """The name of the detector: sync or race."""
    rule: str
    what: str
    """The name of the called function."""
    why: str
    """The reason why it waits, or what nothing orders."""
    instead: str
    """The code to write instead, or the fence that is missing."""
    stack: tuple[Frame, ...] = ()
    details: tuple[str, ...] = ()
    """Further lines for people, such as the other access of a race with its stack."""

    @property
    def site(self) -> Frame:
        """The innermost line, which may be a library's."""
        return self.stack[0] if self.stack else UNKNOWN

    @property
    def user(self) -> Frame:
        """The innermost line of the program's own files; where there is none, the innermost one."""
        return next((frame for frame in self.stack if frame.is_users), self.site)

    @property
    def loop(self) -> Frame | None:
        """The outermost frame in a loop that is no part of a set-up.

        An initializer is set-up, even if a loop calls it.
        """
        if any("initializ" in frame.function for frame in self.stack):
            return None
        for frame in reversed(self.stack):
            if frame.loop:
                return frame
            if frame.function.rpartition(".")[2] in _SET_UP:
                return None
        return None

    @property
    def key(self) -> tuple[str, str, str, int, str, int]:
        """Two findings with the same key are one report with a count of two."""
        site, user = self.site, self.user
        return (self.detector, self.rule, site.file, site.line, user.file, user.line)

    @property
    def fingerprint(self) -> str:
        """A digest that stays the same when lines are added above, and on another machine."""
        user, site = self.user, self.site
        linecache.checkcache(user.file)
        code = linecache.getline(user.file, user.line).strip()
        parts = (self.detector, self.rule, shown(user.file), user.function, code, shown(site.file), site.function)
        return sha256("\n".join(parts).encode()).hexdigest()[:16]

    def text(self) -> str:
        """Return the finding as several lines, the program's own line first."""
        user, site = self.user, self.site
        lines = [f"{user.where}: {self.rule}: {self.what}"]
        if user != site:
            lines.append(f"  in       {site.where} in {site.function}")
        lines += [f"  why      {self.why}", f"  instead  {self.instead}", *(f"  {line}" for line in self.details)]
        return "\n".join(lines + [f"  called from {frame.where} in {frame.function}" for frame in self._callers()])

    def _callers(self) -> list[Frame]:
        """The frames around the program's own line; without libraries' frames if there is such a line."""
        after = self.stack[self.stack.index(self.user) + 1 :] if self.stack else ()
        if self.user.is_users:
            after = tuple(frame for frame in after if frame.is_users)
        return list(after[:_CALLERS_SHOWN])

    def as_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("detector", "rule", "what", "why", "instead")},
            **{name: getattr(self.user, name) for name in ("file", "line", "function")},
            "in_loop": self.loop is not None,
            "fingerprint": self.fingerprint,
            "stack": [frame._asdict() for frame in self.stack],
            "details": list(self.details),
        }


@dataclass(frozen=True, slots=True)
class CountedFinding:
    """All findings with one key. `excuse` is the reason why they do not count, or None."""

    finding: Finding
    count: int
    excuse: str | None

    @property
    def is_repeated(self) -> bool:
        """Whether a loop of the program finds it again and again, so that it costs time at every step."""
        return self.count > 1 and self.finding.loop is not None


class SyncReport:
    """Findings, counted by rule and site. May be added to from any thread."""

    def __init__(self) -> None:
        self._lock = forks.lock()
        self._entries: dict[tuple[Any, ...], CountedFinding] = {}

    def add(self, finding: Finding, excuse: str | None = None, count: int = 1) -> None:
        key = (*finding.key, excuse)
        with self._lock:
            known = self._entries.get(key) or CountedFinding(finding, 0, excuse)
            # The test of a while loop is compiled twice, before and in it: the second finding carries the loop.
            first = finding if known.count < 2 and known.finding.loop is None else known.finding
            self._entries[key] = CountedFinding(first, known.count + count, excuse)

    def clear(self) -> None:
        """Forget all findings."""
        with self._lock:
            self._entries.clear()

    def entries(self) -> list[CountedFinding]:
        """All entries, in the order of their first finding."""
        with self._lock:
            found = list(self._entries.values())
        return _one_for_each_cause(found)

    @property
    def findings(self) -> list[Finding]:
        """One finding of each key that nothing excuses."""
        return [entry.finding for entry in self.entries() if entry.excuse is None]

    @property
    def counts(self) -> dict[str, int]:
        """How often something was found, excused or not, by `file:line`."""
        counts: Counter[str] = Counter()
        for entry in self.entries():
            counts[entry.finding.site.where] += entry.count
        return dict(counts)

    def __bool__(self) -> bool:
        """Return whether anything was found that nothing excuses."""
        return bool(self.findings)

    def text(self) -> str:
        """Return the report for people. Its last line sums up."""
        return as_text(self.entries())


def as_text(entries: list[CountedFinding]) -> str:
    """Return a report: findings repeated by a loop, most often first, single ones, allowed ones, and the sum."""
    open_ = [entry for entry in entries if entry.excuse is None]
    repeated = sorted((entry for entry in open_ if entry.is_repeated), key=lambda entry: -entry.count)
    once = [entry for entry in open_ if not entry.is_repeated]
    parts = []
    for title, group in (("Repeated in a loop, most often first", repeated), ("Once, or at set-up", once)):
        if repeated and once:
            parts.append(f"--- {title}: {_sum(group)}")
        parts += [_entry_text(entry) for entry in group]
    excused = [entry for entry in entries if entry.excuse is not None]
    parts += [
        f"{e.finding.user.where}: {e.finding.rule}: allowed {e.count} time(s): {e.excuse}" for e in excused
    ]  # fmt: skip
    return "\n".join([*parts, f"{_sum(open_)}, {len(excused)} sites allowed"])


def _sum(entries: list[CountedFinding]) -> str:
    return f"{sum(entry.count for entry in entries)} reports at {len(entries)} sites"


def _entry_text(entry: CountedFinding) -> str:
    text = entry.finding.text()
    if entry.count == 1:
        return text
    loop = entry.finding.loop
    place = f", in the loop at {loop._replace(line=loop.loop).where}" if loop is not None else ""
    return f"{text}\n  {entry.count} times{place}"


def _one_for_each_cause(entries: list[CountedFinding]) -> list[CountedFinding]:
    """Join the races of one function that one missing fence leaves: the first stands, the others are its lines."""
    kept: dict[Any, CountedFinding] = {}
    for number, entry in enumerate(entries):
        found = entry.finding
        where = (found.user.file, found.user.function)
        key = (found.rule, found.instead, entry.excuse, *where) if found.detector == "race" else number
        first = kept.get(key)
        if first is None:
            kept[key] = entry
            continue
        also = (*first.finding.details, f"also at {found.site.where}: {found.what}")
        kept[key] = replace(first, finding=replace(first.finding, details=also), count=first.count + entry.count)
    return list(kept.values())
