"""Rules that fail a comparison in CI: `--fail-if worse:1%`, `--fail-if tpot:worse:2%`, `--fail-if tokens:differ`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from gapless.base.errors import ConfigError

HOWS = ("worse", "maybe-worse", "differ")
HELP = (
    "[METRIC:]worse[:N%] (called worse, by N % or more), [METRIC:]maybe-worse:N% (the interval does not exclude that "
    "it is worse by more than N %), [METRIC:]differ (called better or worse), tokens:differ, requests:failed. METRIC "
    "is a part of a name in the JSON, such as tpot or p99_ttft_ms"
)


class FailRule(NamedTuple):
    """One condition."""

    text: str
    what: str
    """Part of a metric's key; "" for all; or tokens, or requests."""
    how: str
    share: float


def parse_rule(text: str) -> FailRule:
    """Raises ConfigError with all the forms that a rule may take."""
    words = text.split(":")
    share = 0.0
    if words[-1].endswith("%"):
        share = _share(words.pop(), text)
        if words and words[-1] == "differ":
            raise ConfigError(f"--fail-if {text}: differ takes no size")
    elif words[-1] == "maybe-worse":
        raise ConfigError(f"--fail-if {text}: maybe-worse needs a size, such as maybe-worse:2%")
    if words in (["tokens", "differ"], ["requests", "failed"]):
        return FailRule(text, words[0], words[1], share)
    if len(words) not in (1, 2) or words[-1] not in HOWS or words[0] in ("tokens", "requests"):
        raise ConfigError(f"--fail-if {text}: expected {HELP}")
    return FailRule(text, words[0] if len(words) == 2 else "", words[-1], share)


def _share(word: str, text: str) -> float:
    try:
        share = float(word[:-1]) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share < 1000:
        raise ConfigError(f"--fail-if {text}: {word} is not a size such as 1% or 0.5%")
    return share


def check_rules(rules: Sequence[FailRule], keys: Sequence[str]) -> None:
    """Raises ConfigError for a rule that no judged metric answers to: it could never fail."""
    for rule in rules:
        if rule.what not in ("", "tokens", "requests") and not any(rule.what in key for key in keys):
            raise ConfigError(
                f"--fail-if {rule.text}: no judged metric has {rule.what!r} in its name: {', '.join(keys)}"
            )


def apply_rules(rules: Sequence[FailRule], report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """{rule, failed, why} for each rule. What could not be judged fails: a gate must not open by itself."""
    return [{"rule": rule.text, "failed": bool(why := _why(rule, report)), "why": why} for rule in rules]


def _why(rule: FailRule, report: Mapping[str, Any]) -> str:
    if rule.what == "tokens":
        tokens = report["tokens"]
        if tokens["compared"] == 0:
            return "no answers could be compared"
        return f"{tokens['differ']} of {tokens['compared']} answers differ" if tokens["differ"] else ""
    if rule.what == "requests":
        counts = [f"{arm['failed']} of arm {arm['letter']}" for arm in report["arms"] if arm["failed"]]
        return f"requests failed: {', '.join(counts)}" if counts else ""
    rows = [row for row in report["metrics"] if rule.what in row["key"]]
    if not rows:
        return "there is no such metric in the runs"
    return "; ".join(filter(None, (_row(rule, row) for row in rows)))


def _row(rule: FailRule, row: Mapping[str, Any]) -> str:
    if row["verdict"] == "unknown":
        return f"{row['label']} could not be judged with {row['n']} runs an arm"
    loss = -row["delta"] if row["higher_is_better"] else row["delta"]
    most = -row["low"] if row["higher_is_better"] else row["high"]
    if rule.how == "differ" and row["verdict"] != "same":
        return f"{row['label']} is {row['verdict']} ({row['delta']:+.2%})"
    if rule.how == "worse" and row["verdict"] == "worse" and loss >= rule.share:
        return f"{row['label']} is worse by {loss:.2%}"
    if rule.how == "maybe-worse" and most > rule.share:
        return f"{row['label']} may be worse by {most:.2%}"
    return ""
