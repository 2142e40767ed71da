"""Holds what a detector found, as text for people and as JSON for machines. Shared by all detectors."""

from __future__ import annotations

import json
import sys
import threading
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .sites import UNKNOWN, Frame


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that should not have happened. `stack` is the user's, innermost frame first."""

    detector: str
    """The name of the detector: sync or race."""
    rule: str
    what: str
    """The name of what was called."""
    why: str
    """The reason why it waits, or what nothing orders."""
    instead: str
    """The code to write instead, or the fence that is missing."""
    stack: tuple[Frame, ...] = ()
    details: tuple[str, ...] = ()
    """Further lines for people, such as the other access of a race with its stack."""

    @property
    def site(self) -> Frame:
        return self.stack[0] if self.stack else UNKNOWN

    @property
    def key(self) -> tuple[str, str, str, int]:
        """Two findings with the same key are one report with a count of two."""
        return (self.detector, self.rule, self.site.file, self.site.line)

    def text(self) -> str:
        """Return the finding as several lines, the site first."""
        lines = [f"{self.site.where}: {self.rule}: {self.what}", f"  why      {self.why}", f"  instead  {self.instead}"]
        lines += [f"  {line}" for line in self.details]
        lines += [f"  called from {frame.where} in {frame.function}" for frame in self.stack[1:4]]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("detector", "rule", "what", "why", "instead")},
            **self.site._asdict(),
            "stack": [frame._asdict() for frame in self.stack],
            "details": list(self.details),
        }


@dataclass(frozen=True, slots=True)
class CountedFinding:
    """All findings with one key. `excuse` is the reason why they do not count, or None."""

    finding: Finding
    count: int
    excuse: str | None


class SyncReport:
    """Findings, counted by rule and site. May be added to from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: dict[tuple[Any, ...], tuple[Finding, str | None]] = {}
        self._counts: Counter[tuple[Any, ...]] = Counter()

    def add(self, finding: Finding, excuse: str | None = None) -> None:
        key = (*finding.key, excuse)
        with self._lock:
            self._first.setdefault(key, (finding, excuse))
            self._counts[key] += 1

    def entries(self) -> list[CountedFinding]:
        """All entries, in the order of their first finding."""
        with self._lock:
            return [
                CountedFinding(finding, self._counts[key], excuse) for key, (finding, excuse) in self._first.items()
            ]

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
    open_, excused = _split(entries)
    parts = [entry.finding.text() + (f"\n  {entry.count} times" if entry.count > 1 else "") for entry in open_]
    parts += [
        f"{e.finding.site.where}: {e.finding.rule}: allowed {e.count} time(s): {e.excuse}" for e in excused
    ]  # fmt: skip
    parts.append(f"{sum(e.count for e in open_)} reports at {len(open_)} sites, {len(excused)} sites allowed")
    return "\n".join(parts)


def as_dict(entries: list[CountedFinding]) -> dict[str, Any]:
    """Return the report for machines."""
    open_, excused = _split(entries)
    return {
        "reports": sum(entry.count for entry in open_),
        "findings": [{**entry.finding.as_dict(), "count": entry.count} for entry in open_],
        "allowed": [{**e.finding.as_dict(), "count": e.count, "reason": e.excuse} for e in excused],
    }


def check_json(path: str | None) -> None:
    """Check that a report could be written, before there is one. None and `-` are no files. Raises ValueError."""
    if path in (None, "-"):
        return
    file = Path(str(path))
    if file.is_dir() or not file.parent.is_dir():
        raise ValueError(f"--json {path}: give a file in a folder that is there")


def write_json(path: str, report: dict[str, Any]) -> None:
    """Write a report as JSON; `-` is standard output."""
    text = json.dumps(report, indent=2) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        Path(path).write_text(text, encoding="utf-8")


def _split(entries: list[CountedFinding]) -> tuple[list[CountedFinding], list[CountedFinding]]:
    return [e for e in entries if e.excuse is None], [e for e in entries if e.excuse is not None]
