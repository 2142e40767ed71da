"""The samples of the last half hour, and /debug/history, which tells them."""

import time
from types import SimpleNamespace

import pytest
from server_harness import idle

from gapless.engine.outputs import RequestMetrics
from gapless.engine.stats import Stats
from gapless.loop.records import StepCounts
from gapless.loop.timeline import DeviceTimes
from gapless.memory.pages import PageCounts
from gapless.pace.draft_gate import DraftCounts
from gapless.plan.queue import QueueCounts
from gapless.server import samples
from gapless.server.metrics import Metrics
from gapless.server.samples import SAMPLE_COLUMNS, SampleLog, quantile

SECOND = 10**9


@pytest.mark.parametrize(
    "counts, share, value",
    [
        ((0, 0, 0), 0.5, None),
        ((4, 0, 0), 0.5, 0.5),
        ((1, 3, 0), 0.5, 1 + 1 / 3),
        ((1, 3, 0), 1.0, 2.0),
        ((0, 0, 5), 0.5, 2.0),  # above the last bound
    ],
)
def test_a_quantile_is_in_the_bucket_of_its_rank(counts, share, value):
    assert quantile((1.0, 2.0), counts, share) == (value if value is None else pytest.approx(value))


def columns(log, number=0):
    _, rows = log.after(number)
    return {name: [row[place] for row in rows] for place, name in enumerate(SAMPLE_COLUMNS)}


def test_a_sample_is_what_happened_since_the_one_before(monkeypatch):
    clock = iter([100.0, 102.0, 103.0])
    ticks = iter([(10, 100), (60, 200), (60, 200)])
    # In this module alone: the threads of other tests' servers look at the clock too.
    monkeypatch.setattr(samples, "time", SimpleNamespace(monotonic=lambda: next(clock), time=time.time))
    monkeypatch.setattr(samples.host, "processor_time", lambda: next(ticks))
    metrics = Metrics("m")
    log = SampleLog(metrics)
    before = Stats(steps=StepCounts(generation_tokens=10), device=DeviceTimes(SECOND), pages=PageCounts(free=8))
    log.take(before)
    metrics.inter_token_latency.observe(2.4)
    metrics.observe_start(RequestMetrics(arrival=SECOND, started=2 * SECOND, first_token=4 * SECOND))
    now = Stats(
        steps=StepCounts(generation_tokens=50), queue=QueueCounts(3, 2), pages=PageCounts(free=6, owned=2),
        device=DeviceTimes(3 * SECOND, SECOND, idle(host_late=SECOND // 2, no_work=SECOND // 2)),
        drafts=DraftCounts((8,), (6,)),
    )  # fmt: skip
    log.take(now)
    log.take(now)
    seen = columns(log)
    assert seen["generated"] == [20.0, 0.0] and (seen["running"], seen["waiting"]) == ([3, 3], [2, 2])
    assert seen["kv"] == [0.25, 0.25] and seen["right_drafts"] == [0.75, None] and seen["cpu"] == [0.5, None]
    assert (seen["busy"], seen["host_late"], seen["no_work"]) == ([0.5, None], [0.25, None], [0.25, None])
    assert seen["itl_max"] == [2.5, None], "the upper bound of its bucket, in that second alone"
    assert 2.5 < seen["ttft_p50"][0] < 5 and seen["ttft_p50"][1] == seen["ttft_p50"][0], "of the last ten"
    assert 0.8 < seen["queue_p99"][0] <= 1
    assert log.latency()["ttft"]["many"] == 1


def test_samples_are_bounded_and_told_from_a_number_on(monkeypatch):
    log = SampleLog(Metrics("m"))
    for tokens in range(samples.KEPT + 12):
        log.take(Stats(steps=StepCounts(generation_tokens=tokens)))
    first, rows = log.after(0)
    assert (first, len(rows), log.ended) == (11, samples.KEPT, samples.KEPT + 11)
    first, rows = log.after(log.ended - 2)
    assert (first, len(rows)) == (log.ended - 2, 2)
    assert log.after(log.ended) == (log.ended, [])
    assert len(log.after(log.ended + 5)[1]) == samples.KEPT, "its reader knew another server"


def test_the_history_is_told_with_latency_and_memory(server, client):
    log = server.state.samples
    log.take(server.state.llm.stats())
    client.post("/v1/completions", json={"prompt": "ab", "max_tokens": 5})
    log.take(server.state.llm.stats())
    told = client.get("/debug/history").json()
    assert told["columns"] == list(SAMPLE_COLUMNS) and len(told["samples"][-1]) == len(SAMPLE_COLUMNS)
    assert told["latency"]["ttft"]["many"] >= 1 and 0 < told["latency"]["ttft"]["p50"] < 60
    assert told["memory"]["total"] > told["memory"]["free"] > 0
    assert client.get(f"/debug/history?after={told['next']}").json()["samples"] == []
    assert client.get("/debug/history?after=-1").status_code == 400
