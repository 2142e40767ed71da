"""docs/grafana/gapless.json: every series and label that it asks for is on our /metrics, and the file is sound.

The page is that of a server without tiers; theirs are on the page of a fixed moment, which another test keeps true.
"""

import itertools
import json
import re
from pathlib import Path

import pytest

from gapless.lab.top import Page

FILE = Path(__file__).resolve().parents[2] / "docs" / "grafana" / "gapless.json"
FIXED = Path(__file__).parent / "metrics_page.txt"
WORDS = {"sum", "by", "rate", "histogram_quantile", "max", "min", "avg", "le", "label_values"}
NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")


def asked(expression):
    """The series that a PromQL expression names, and the labels that it uses on each."""
    groups = re.findall(r"by \(([^)]*)\)", expression)
    labels = {label for group in groups for label in NAME.findall(group)}
    bare = re.sub(r"by \([^)]*\)|\[[^\]]*\]", "", expression)
    found = []
    for match in re.finditer(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(\{[^}]*\})?", bare):
        if match[1] in WORDS or bare[: match.start()].endswith("$"):
            continue
        matchers = NAME.findall(re.sub(r'"[^"]*"', "", match[2] or ""))
        found.append((match[1], labels | set(matchers)))
    return found


def missing(expression, page):
    return [
        (name, sorted(labels))
        for name, labels in asked(expression)
        if not any(labels <= set(sample.labels) for sample in page.samples(name))
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


def about_tiers(name):
    return name.startswith(("gapless:kv_tier_", "gapless:kv_lower_tier_", "gapless:kv_event_"))


def expressions(dashboard):
    found = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", ())]
    assert len(found) > 30
    return found


def test_every_series_is_on_our_page(dashboard, page, tiers):
    lost = [one for expression in expressions(dashboard) for one in missing(expression, page)]
    assert [one for one in lost if not about_tiers(one[0])] == []
    asked_for = [expression for expression in expressions(dashboard) if about_tiers(asked(expression)[0][0])]
    assert len(asked_for) > 10
    assert [one for expression in asked_for for one in missing(expression, tiers)] == []
    variable = dashboard["templating"]["list"][1]["query"]["query"]
    name, label = re.fullmatch(r"label_values\((\S+), (\S+)\)", variable).groups()
    assert label in page.samples(name)[0].labels


def test_the_check_can_fail(page):
    assert missing("sum(rate(vllm:no_such_total[5m]))", page) == [("vllm:no_such_total", [])]
    assert missing('sum by (cause) (gapless:depth{model_name=~"$model_name"})', page) == [
        ("gapless:depth", ["cause", "model_name"])
    ]


def test_the_subjects_that_it_must_show(dashboard):
    text = " ".join(expressions(dashboard))
    for name in (
        *("vllm:time_to_first_token_seconds_bucket", "vllm:inter_token_latency_seconds_bucket"),
        *("vllm:e2e_request_latency_seconds_bucket", "vllm:generation_tokens_total", "vllm:prompt_tokens_total"),
        *("vllm:num_requests_waiting", "vllm:kv_cache_usage_perc", "vllm:prefix_cache_hits_total"),
        *("vllm:num_preemptions_total", "gapless:gpu_bubble_seconds_total", "gapless:gpu_busy_ratio"),
        *("gapless:kv_tier_pages_total", "gapless:kv_tier_bytes_total", "gapless:kv_tier_dropped_total"),
        *("gapless:kv_lower_tier_pages_total", "gapless:kv_lower_tier_room_bytes", "gapless:kv_event_batches_total"),
        "http_requests_total",
    ):
        assert name in text


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
    assert variables["datasource"]["type"] == "datasource" and "model_name" in variables
    asking = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    sources = [part["datasource"]["uid"] for panel in asking for part in (panel, *panel["targets"])]
    assert set(sources) == {"${datasource}"}
    ours = [expression for expression in expressions(dashboard) if "http_requests_total" not in expression]
    assert all('model_name=~"$model_name"' in expression for expression in ours)


def test_no_address_is_in_the_file():
    assert "://" not in FILE.read_text(encoding="utf-8")
