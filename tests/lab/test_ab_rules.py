"""--fail-if: what its rules mean, and which are no rules."""

from __future__ import annotations

from typing import Any

import pytest
from ab_made_up import made_report, made_runs, sample

from gapless.base.errors import ConfigError
from gapless.lab.compare import JUDGED
from gapless.lab.rules import apply_rules, check_rules, parse_rule


def fails(text: str, report: dict[str, Any]) -> bool:
    (found,) = apply_rules([parse_rule(text)], report)
    assert found["rule"] == text and bool(found["why"]) == found["failed"]
    return bool(found["failed"])


@pytest.fixture(scope="module")
def slower() -> dict[str, Any]:
    return made_report(made_runs(effect=0.05))


@pytest.fixture(scope="module")
def same() -> dict[str, Any]:
    return made_report(made_runs(effect=0.0))


@pytest.mark.parametrize(
    "rule, when_slower, when_same",
    [
        ("worse", True, False),
        ("worse:1%", True, False),
        ("worse:20%", False, False),
        ("tpot:worse:2%", True, False),
        ("mean_tpot_ms:worse:2%", True, False),
        ("throughput:worse:1%", True, False),
        ("maybe-worse:20%", False, False),
        ("maybe-worse:0.01%", True, True),
        ("differ", True, False),
        ("tokens:differ", False, False),
        ("requests:failed", False, False),
    ],
)
def test_a_rule_fails_when_its_limit_is_passed(rule, when_slower, when_same, slower, same):
    assert (fails(rule, slower), fails(rule, same)) == (when_slower, when_same)


def test_an_improvement_is_not_worse():
    faster = made_report(made_runs(effect=-0.05))
    assert not fails("worse", faster) and not fails("maybe-worse:1%", faster) and fails("differ", faster)


def test_a_rule_that_cannot_be_judged_fails():
    few = made_report(made_runs(pairs=2))
    assert fails("worse:50%", few) and fails("tpot:maybe-worse:90%", few)
    no_tokens = {**few, "tokens": {**few["tokens"], "compared": 0}}
    assert fails("tokens:differ", no_tokens)
    assert fails("tpot:worse", {**few, "metrics": []})


def test_other_tokens_and_failed_requests():
    runs = made_runs(pairs=2)
    runs[1] = runs[1]._replace(load=runs[1].load._replace(samples=(sample(0, text="x"), sample(1, error="gone"))))
    report = made_report(runs)
    assert fails("tokens:differ", report) and fails("requests:failed", report)


@pytest.mark.parametrize(
    "text",
    ["", "bad", "worse:", "worse:x%", "worse:-1%", "worse:1", "tpot:tpot:worse", "maybe-worse", "differ:2%",
     "tokens:worse", "worse:nan%", "requests:differ:1%"],
)  # fmt: skip
def test_a_text_that_is_no_rule_is_refused(text):
    with pytest.raises(ConfigError, match="--fail-if"):
        rule = parse_rule(text)
        check_rules([rule], JUDGED)


def test_a_rule_about_nothing_is_refused():
    with pytest.raises(ConfigError, match="no judged metric has 'tptt'"):
        check_rules([parse_rule("tptt:worse:1%")], JUDGED)
