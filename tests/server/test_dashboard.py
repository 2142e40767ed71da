"""docs/grafana: every series and label that dashboard and alarms ask for is on our /metrics; the files are sound."""

import itertools
import json
import re
from pathlib import Path

import pytest

from gapless.lab.top import Page

FILE = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "gapless.json"
ALARMS = FILE.with_name("gapless-alerts.yaml")
FIXED = Path(__file__).parent / "metrics_page.txt"
WORDS = {"sum", "by", "rate", "histogram_quantile", "max", "min", "avg", "le", "label_values"}
WORDS |= {"and", "increase", "min_over_time"}
SCRAPED = {"job", "instance"}
"""Labels that Prometheus adds."""
NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


def asked(expression):
    """The series that a PromQL expression names, and the labels that it uses on each."""
    groups = re.findall(r"(?:by|on) \(([^)]*)\)", expression)
    labels = {label for group in groups for label in NAME.findall(group)}
    bare = re.sub(r"(?:by|on) \([^)]*\)|\[[^\]]*\]", "", expression)
    found = []
    for match in re.finditer(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^}]*\})?", bare):
        if match[1] in WORDS or bare[: match.start()].endswith("$"):
            continue
        matchers = NAME.findall(re.sub(r'"[^"]*"', "", match[2] or ""))
        found.append((match[1], (labels | set(matchers)) - SCRAPED))
    return found


def missing(expression, *pages):
    return [
        (name, sorted(labels))
        for name, labels in asked(expression)
        if not any(labels <= set(sample.labels) for page in pages for sample in page.samples(name))
    ]


@pytest.fixture(scope="module")
def dashboard():
    return json.loads(FILE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def page(client):
    client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 3})
    client.post("/v1/completions", json={"prompt": "ab", "model": "no such"})  # gives the refusals a series
    return Page(client.get("/metrics").text)


@pytest.fixture(scope="module")
def tiers():
    return Page(FIXED.read_text(encoding="utf-8"))


def expressions(dashboard):
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(found) > 30
    return found


def test_every_series_is_on_our_page(dashboard, page, tiers):
    alarms = re.findall(r"^ +expr: (.+)$", ALARMS.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(alarms) > 10
    variables = [one["query"]["query"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
    for text in variables:
        expression, label = re.fullmatch(r"label_values\((\S+), (\S+)\)", text).groups()
        assert label in SCRAPED or label in page.samples(asked(expression)[0][0])[0].labels
    asked_for = [*expressions(dashboard), *alarms]
    assert [one for expression in asked_for for one in missing(expression, page, tiers)] == []
    # What any server has is on the page of one that has nothing special.
    special = re.compile(r"gapless:(kv_|adapter_|rank_)\w+|\w+:spec_decode_\w+_per_pos_total")
    lost = {name for expression in asked_for for name, _ in missing(expression, page)}
    assert {name for name in lost if not special.match(name)} <= {"vllm:num_preemptions_total"}


def test_the_check_can_fail(page):
    assert missing("sum(rate(vllm:no_such_total[5m]))", page) == [("vllm:no_such_total", [])]
    assert missing('sum by (cause) (gapless:depth{model_name=~"$model_name"})', page) == [
        ("gapless:depth", ["cause", "model_name"])
    ]


def test_panels_have_ids_of_their_own_and_do_not_overlap(dashboard):
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    boxes = [panel["gridPos"] for panel in panels]
    assert all(box["x"] >= 0 and box["x"] + box["w"] <= 24 for box in boxes)
    for one, two in itertools.combinations(boxes, 2):
        beside = one["x"] + one["w"] <= two["x"] or two["x"] + two["w"] <= one["x"]
        above = one["y"] + one["h"] <= two["y"] or two["y"] + two["h"] <= one["y"]
        assert beside or above, (one, two)


def test_everything_is_asked_of_the_chosen_data_source(dashboard):
    assert dashboard["schemaVersion"] == 42
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and len(variables) == 4
    asking = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    sources = [part["datasource"]["uid"] for panel in asking for part in (panel, *panel["targets"])]
    assert set(sources) == {"${datasource}"}
    for expression in expressions(dashboard):
        model = ',model_name=~"$model_name"' if "http_requests_total" not in expression else ""
        assert expression.count('{job=~"$job",instance=~"$instance"' + model) == len(asked(expression))
