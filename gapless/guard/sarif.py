"""Turns a report into SARIF 2.1.0, the format in which code hosts take findings and show them in a pull request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .sync_rules import RULES

SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_RACE = "Two accesses to the same memory that nothing orders: one of them writes."
_ROOT = "SRCROOT"


def sarif_log(report: dict[str, Any]) -> dict[str, Any]:
    """Return the log of a report of `report_files.as_dict`. Allowed findings are in it as suppressed ones.

    Files below the working directory are named relative to it, as code hosts want them.
    """
    entries = [*report["findings"], *report["allowed"], *report.get("known", ())]
    rules = sorted({entry["rule"] for entry in entries})
    run: dict[str, Any] = {
        "tool": {"driver": {"name": "gapless san", "rules": [_rule(name) for name in rules]}},
        "columnKind": "unicodeCodePoints",
        "originalUriBaseIds": {_ROOT: {"uri": Path.cwd().as_uri() + "/"}},
        "results": [_result(entry, rules.index(entry["rule"])) for entry in entries],
    }
    if "known" in report:
        first_known = len(entries) - len(report["known"])
        for number, result in enumerate(run["results"]):
            result["baselineState"] = "unchanged" if number >= first_known else "new"
    if "exit_code" in report:
        run["invocations"] = [{"executionSuccessful": not report["incomplete"], "exitCode": report["exit_code"]}]
    return {"$schema": SCHEMA, "version": "2.1.0", "runs": [run]}


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
    path = Path(file).absolute()
    root = Path.cwd()
    if path.is_relative_to(root):
        return {"uri": path.as_uri().removeprefix(root.as_uri() + "/"), "uriBaseId": _ROOT}
    return {"uri": path.as_uri()}
