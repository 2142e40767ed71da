"""`gapless top` without a server. vllm_page.txt holds samples of two pages of vLLM 0.32 on a CPU under load."""

import math
import random
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from gapless.cli.top import visible
from gapless.lab.top import Page, TopView, bar, block, duration, grown, known, line, quantiles, rows

RECORDED = [row.split() for row in (Path(__file__).parent / "vllm_page.txt").read_text().splitlines()]
TEXTS = ["".join(f"{row[0]} {row[page]}\n" for row in RECORDED) for page in (1, 2)]
BEFORE, NOW = map(Page, TEXTS)
OURS = """
gapless:gpu_busy_seconds_total{model_name="m",engine="0"} %s
gapless:gpu_idle_seconds_total{model_name="m",engine="0"} %s
gapless:gpu_bubble_seconds_total{model_name="m",engine="0",cause="depth"} %s
gapless:gpu_bubble_seconds_total{model_name="m",engine="0",cause="host_late"} %s
gapless:depth{model_name="m",engine="0"} 4
gapless:steps_in_flight{model_name="m",engine="0"} 2
vllm:num_requests_running{model_name="m",engine="0"} 3
http_requests_total{handler="/",method="GET",status="5xx"} %s
"""


def test_labels_and_values_of_a_page_are_read():
    page = Page('a{x="q\\"\\\\}\\n",y=""} 1.5e3 1700000000\nb NaN\nc +Inf\n# a 3\n\n')
    (sample,) = page.samples("a")
    assert (sample.labels, sample.value) == ({"x": 'q"\\}\n', "y": ""}, 1500.0)
    assert math.isnan(page.total("b")) and math.isinf(page.total("c"))
    assert page.total("none") is None and page.by("none", "x") == {} and page.samples("none") == ()


@pytest.mark.parametrize("text", ["not a sample at all\n", 'd{x="1"} what\n', "<html>\n<body>up 1</body>\n"])
def test_a_page_in_another_format_is_refused(text):
    with pytest.raises(ValueError):
        Page(text)


def test_a_counter_that_began_again_grows_from_zero():
    assert grown(5.0, 7.0) == 2.0
    assert grown(5.0, 3.0) == 3.0
    assert grown(None, 3.0) == 3.0
    assert grown(5.0, None) is None


def test_quantiles_lie_in_the_bucket_of_the_true_one():
    bounds, draw = [0.001, 0.01, 0.1, 0.5, 1.0, 5.0], random.Random(3)
    registry = CollectorRegistry()
    histogram = Histogram("h", "", buckets=bounds, registry=registry)

    def page():
        return Page(generate_latest(registry).decode()).buckets("h")

    for _ in range(100):
        histogram.observe(draw.expovariate(100))
    before = page()
    values = sorted(draw.expovariate(3) for _ in range(1000))
    for value in values:
        histogram.observe(value)
    found = quantiles(before, page())
    assert found.n == 1000
    for estimate, true in ((found.p50, values[499]), (found.p99, values[989])):
        high = next(bound for bound in bounds if bound >= true)
        low = max([bound for bound in bounds if bound < high], default=0.0)
        assert low <= estimate <= high


def test_quantiles_of_histograms_equal_those_by_hand():
    inf = math.inf
    before, now = {1.0: 5.0, 2.0: 5.0, inf: 5.0}, {1.0: 6.0, 2.0: 9.0, inf: 9.0}
    # Four values: one up to 1, three up to 2. The second of four is a third of the way through the second bucket.
    assert quantiles(before, now) == (4, pytest.approx(1 + 1 / 3), pytest.approx(1 + 2.96 / 3))
    assert quantiles(now, now) is None and quantiles({}, {}) is None
    assert quantiles(now, before) == (5, pytest.approx(0.5), pytest.approx(0.99))  # the server began again
    assert quantiles({1.0: 0.0, inf: 0.0}, {1.0: 0.0, inf: 3.0}) == (3, 1.0, 1.0)


def test_metrics_of_a_real_vllm_are_shown():
    seen = TopView(BEFORE, NOW, 2.0)
    assert seen.models == ("tiny",)
    assert (seen.running, seen.waiting) == (24.0, 0.0)
    assert seen.generation_rate == (11878 - 5412) / 2
    assert seen.prompt_rate == (32552 - 13052) / 2
    assert seen.finished == {"length": (195 - 94) / 2}
    assert seen.hit_rate == pytest.approx((25984 - 9984) / (32552 - 13052))
    assert seen.ttft.n == 219 - 94 and 0.001 < seen.ttft.p50 < seen.ttft.p99 < 1
    assert seen.itl.p99 >= seen.itl.p50 > 0 and seen.e2e.n == 101
    assert 0 < seen.kv_usage < 0.01 and seen.counts == {"preemptions": 0}
    assert seen.http["2xx"] > 0 and seen.refused == 0
    assert (seen.busy, seen.bubbles, seen.depth) == (None, {}, None)  # series of ours
    text = block(seen, ["heading"])
    assert "3,233.0 generated" in text and "82.1 % prefix hits" in text and "24 running" in text
    assert "Bubbles" not in text and "Device" not in text and "None" not in text


def test_the_names_of_older_servers():
    registry = CollectorRegistry()
    label = {"model_name": "m"}
    Gauge("vllm:num_requests_running", "", list(label), registry=registry).labels(**label).set(2)
    Gauge("vllm:gpu_cache_usage_perc", "", list(label), registry=registry).labels(**label).set(0.25)
    Counter("vllm:gpu_prefix_cache_queries", "", list(label), registry=registry).labels(**label).inc(10)
    Counter("vllm:gpu_prefix_cache_hits", "", list(label), registry=registry).labels(**label).inc(4)
    Histogram("vllm:time_per_output_token_seconds", "", list(label), registry=registry).labels(**label).observe(0.02)
    seen = TopView(Page(""), Page(generate_latest(registry).decode()), 1.0)
    assert (seen.running, seen.kv_usage, seen.hit_rate, seen.itl.n) == (2, 0.25, 0.4, 1)
    assert seen.generation_rate is None and seen.ttft is None


def test_bubbles_are_shares_of_the_time():
    seen = TopView(Page(OURS % (10, 50, 1, 1, 0)), Page(OURS % (17, 51, 1.5, 2.5, 2)), 10.0)
    assert (seen.busy, seen.no_work) == (0.7, 0.1)
    assert seen.bubbles == {"depth": 0.05, "host_late": 0.15}
    shown = {row.kind: row for row in rows(seen) if row.bar}
    # On the scale of the device's bar: 16 characters are all of the time.
    bars = [shown[kind].bar.rstrip("·") for kind in ("good", "host_late", "depth")]
    assert bars == ["███████████▎", "██▍", "▊"]
    assert [row.kind for row in rows(seen) if row.label == "HTTP"] == ["bad"]
    assert line(seen, "12:00:00") == "12:00:00 | running 3 waiting - | bubbles depth 5.0 % host_late 15.0 % | errors 2"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_every_line_fits_the_terminal(width):
    ours = Page(TEXTS[1] + OURS % (17, 51, 1.5, 2.5, 2))
    seen = TopView(Page(TEXTS[0] + OURS % (10, 50, 1, 1, 0)), ours, 2.0)
    heading = ["http://a-server.of.a-long-name.example:8000", "org/a-model-of-a-long-name", "the last 2 s", "12:00:00"]
    lines = block(seen, heading, width).splitlines()
    assert max(map(len, lines)) <= width
    text = " ".join(lines)
    for part in (*heading, "preemptions", "in flight", "ended/s", "host_late", "p99", "5xx"):
        assert part in text


def test_ranks_have_a_row_where_there_are_several():
    lines = "".join(f'gapless:rank_lag_steps{{rank="{n}"}} {3 * n}\n' for n in range(2))
    waits = [f'{lines}gapless:rank_wait_seconds_total{{rank="1"}} {waited}\n' for waited in (1.5, 2.0)]
    seen = TopView(Page(TEXTS[0] + waits[0]), Page(TEXTS[1] + waits[1]), 2.0)
    assert "Ranks     0: 0 behind, waits 0.0 %   1: 3 behind, waits 25.0 %" in block(seen, ["s"]).splitlines()
    assert "Ranks" not in block(TopView(BEFORE, NOW, 2.0), ["s"])


def test_rows_that_a_low_terminal_has_no_room_for_are_told_of():
    shown = rows(TopView(BEFORE, NOW, 2.0))
    assert visible(shown, len(shown)) == shown
    assert [row.text for row in visible(shown, 3)][2] == f"{len(shown) - 2} more lines: make the window higher"


def test_a_page_without_known_metrics_shows_nothing():
    assert known(NOW) and not known(Page("up 1\n"))
    still = Page(OURS % (1, 1, 1, 1, 0))
    assert TopView(still, still, 1.0).bubbles == {}


def test_bars_and_durations_are_drawn_to_scale():
    assert bar(0, 4) == "····" and bar(1, 4) == "████" and bar(0.5, 4) == "██··" and bar(7, 2) == "██"
    assert bar(1 / 32, 4) == "▏···" and bar(-1, 2) == "··"
    shown = [duration(value) for value in (0.0, 0.00051, 0.0123, 0.75, 1.5, 120.0)]
    assert shown == ["0 ms", "0.51 ms", "12.3 ms", "750 ms", "1.50 s", "120 s"]
