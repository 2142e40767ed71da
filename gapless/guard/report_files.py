"""Writes reports for machines: JSON, and SARIF for code hosts; and compares a report with an earlier one."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

from .report import CountedFinding
from .sites import root
from .sync_rules import RULES

_SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_RACE = "Two accesses to the same memory that nothing orders: one of them writes."
_ROOT = "SRCROOT"


def as_dict(entries: list[CountedFinding], known: list[CountedFinding] | None = None) -> dict[str, Any]:
    """Return the report for machines. `known` are findings of an earlier report, if there is one."""
    open_ = [entry for entry in entries if entry.excuse is None]
    excused = [entry for entry in entries if entry.excuse is not None]
    return {
        "reports": sum(entry.count for entry in open_),
        "findings": [_entry(entry) for entry in open_],
        "allowed": [{**_entry(entry), "reason": entry.excuse} for entry in excused],
        **({"known": [_entry(entry) for entry in known]} if known is not None else {}),
    }


def merged(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one report of several of `as_dict`: a finding of the same line is one, with the sum of the counts."""
    total: dict[str, Any] = {"reports": sum(part["reports"] for part in parts), "findings": [], "allowed": []}
    seen: dict[tuple[Any, ...], dict[str, Any]] = {}
    for part, name in product(parts, ("findings", "allowed", "known")):
        for entry in part.get(name, ()):
            key = (name, entry["fingerprint"], entry["line"], entry.get("reason"))
            if key in seen:
                seen[key]["count"] += entry["count"]
            else:
                seen[key] = {**entry}
                total.setdefault(name, []).append(seen[key])
        if name in part:
            total.setdefault(name, [])
    return total


def _entry(entry: CountedFinding) -> dict[str, Any]:
    return {**entry.finding.as_dict(), "count": entry.count}


def check_files(options: argparse.Namespace) -> Base | None:
    """Check that reports could be written, before there are any; returns the report to compare with. Raises ValueError.

    The options' paths are absolute from then on, since a program may change its directory. The path `-` is no file.
    """
    root.cache_clear()
    for name in ("json", "sarif"):
        path = getattr(options, name)
        if path not in (None, "-"):
            file = root() / path
            if file.is_dir() or not file.parent.is_dir():
                raise ValueError(f"--{name} {path}: give a file in a folder that is there")
            setattr(options, name, str(file))
    return Base(options.diff) if options.diff else None


def sarif_log(report: dict[str, Any]) -> dict[str, Any]:
    """Return the log of a report of `as_dict`. Allowed findings are in it as suppressed ones.

    Files below the root are named relative to it, as code hosts want them.
    """
    entries = [*report["findings"], *report["allowed"], *report.get("known", ())]
    rules = sorted({entry["rule"] for entry in entries})
    run: dict[str, Any] = {
        "tool": {"driver": {"name": "gapless san", "rules": [_rule(name) for name in rules]}},
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {_ROOT: {"uri": root().as_uri() + "/"}},
        "results": [_result(entry, rules.index(entry["rule"])) for entry in entries],
    }
    if "known" in report:
        first_known = len(entries) - len(report["known"])
        for number, result in enumerate(run["results"]):
            result["baselineState"] = "unchanged" if number >= first_known else "new"
    if "exit_code" in report:
        run["invocations"] = [{"executionSuccessful": not report["incomplete"], "exitCode": report["exit_code"]}]
    return {"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}


def _rule(name: str) -> dict[str, Any]:
    known = RULES.get(name)
    if known is None:
        return {"id": name, "shortDescription": {"text": _RACE}}
    return {
        "id": name,
        "shortDescription": {"text": known.what},
        "fullDescription": {"text": known.why},
        "help": {"text": known.instead},
    }


def _result(entry: dict[str, Any], rule_index: int) -> dict[str, Any]:
    text = f"{entry['what']}: {entry['why']}. Instead: {entry['instead']}."
    result: dict[str, Any] = {
        "ruleId": entry["rule"],
        "ruleIndex": rule_index,
        "level": "error" if entry["detector"] == "race" or entry["in_loop"] else "warning",
        "message": {"text": "\n".join([text, *entry["details"]])},
        "locations": [_location(entry)],
        "partialFingerprints": {"gaplessSan/v1": entry["fingerprint"]},
        "occurrenceCount": entry["count"],
    }
    if entry["stack"]:
        result["stacks"] = [{"frames": [{"location": _location(frame)} for frame in entry["stack"]]}]
    if "reason" in entry:
        result["suppressions"] = [{"kind": "external", "justification": entry["reason"]}]
    return result


def _location(frame: dict[str, Any]) -> dict[str, Any]:
    physical: dict[str, Any] = {"artifactLocation": _artifact(frame["file"])}
    if frame["line"] > 0:
        physical["region"] = {"startLine": frame["line"]}
    return {"physicalLocation": physical, "logicalLocations": [{"fullyQualifiedName": frame["function"]}]}


def _artifact(file: str) -> dict[str, Any]:
    path = root() / file
    if path.is_relative_to(root()):
        return {"uri": path.as_uri().removeprefix(root().as_uri() + "/"), "uriBaseId": _ROOT}
    return {"uri": path.as_uri()}


def write_files(report: dict[str, Any], options: argparse.Namespace) -> None:
    """Write a report where a path is given; `-` is standard output. Raises ValueError where that cannot be done."""
    for path, content in ((options.json, report), (options.sarif, sarif_log(report) if options.sarif else None)):
        if path:
            text = json.dumps(content, indent=2) + "\n"
            try:
                if path == "-":
                    print(text, end="", flush=True)
                else:
                    Path(path).write_text(text, encoding="utf-8")
            except OSError as error:
                raise ValueError(f"the report cannot be written to {path}: {error.strerror}") from error


class Base:
    """The findings of an earlier report, by their fingerprints."""

    def __init__(self, path: str) -> None:
        """Read a report of `--json` or of `--gapless-san-json`. Raises ValueError where it cannot be read."""
        self._found: Counter[str] = Counter()
        try:
            report = json.loads(Path(path).read_text(encoding="utf-8"))
            for part in report.get("tests", [report]):
                # A line that several tests run is one finding.
                found = [*part["findings"], *part.get("known", ())]
                self._found |= Counter(str(entry["fingerprint"]) for entry in found)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"--diff {path}: expected a report that --json wrote, got {error!r}") from error

    def split(self, entries: list[CountedFinding]) -> tuple[list[CountedFinding], list[CountedFinding]]:
        """Return the new or excused entries, and the entries that the base has as well."""
        left = self._found.copy()
        new: list[CountedFinding] = []
        known: list[CountedFinding] = []
        for entry in entries:
            name = entry.finding.fingerprint
            is_known = entry.excuse is None and left[name] > 0
            left[name] -= is_known
            (known if is_known else new).append(entry)
        return new, known

    def gone(self, known: list[CountedFinding]) -> int:
        """Return the number of findings of the base that are not known any more: they may be mended."""
        return (self._found - Counter(entry.finding.fingerprint for entry in known)).total()
