"""A server whose engine has two ranks, as its operator sees it: metrics, facts, the steps' records and traces."""

import json

import pytest
from server_process import process
from waiting import until

from gapless.base import host
from gapless.engine.trace import STEP_COLUMNS
from gapless.lab.top import Page

pytestmark = pytest.mark.process
ASK = {"prompt": "ab", "max_tokens": 24, "ignore_eos": True}


def test_two_ranks_are_on_every_page_of_an_operator():
    engine = {"tensor_parallel_size": 2, "max_model_len": 256}
    with process("demo", engine=engine, worker=["gapless.engine.worker"]) as server:
        server.wait_ready()
        assert ", 2 ranks) at " in server.banner
        with server.client() as client:
            with client.stream("GET", "/debug/steps") as events:
                assert client.post("/v1/completions", json=ASK).status_code == 200
                steps = next(found for line in events.iter_lines() if (found := of_event(line)))
            info = client.get("/server_info").json()["info"]
            held = client.get("/debug/history").json()["memory"]["engine"]
            assert held > 1.5 * host.resident(server.child()), "memory of both"
            trace = json.loads(client.get("/debug/trace?seconds=60").text)
            counted = sum(event["dur"] for event in trace["traceEvents"] if event["name"] == "ranks") / 1e6
            until(lambda: idle_of(client) == pytest.approx(counted, rel=0.001))  # what the leader waited is idle time
            page = Page(client.get("/metrics").text)
    assert info["ranks"] == 2
    lags, waits = page.by("gapless:rank_lag_steps", "rank"), page.by("gapless:rank_wait_seconds_total", "rank")
    assert lags == {"0": 0, "1": 0} and waits.keys() == {"0", "1"} and max(waits.values()) > 0
    records = [dict(zip(STEP_COLUMNS, row, strict=True)) for row in steps]
    assert {len(record["waits"]) for record in records} == {1}
    assert all(0 <= record["ranks_ns"] <= record["device_end"] - record["device_start"] for record in records)
    lanes = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert {"waits of rank 0", "waits of rank 1"} <= lanes
    assert counted > 0


def idle_of(client):
    return Page(client.get("/metrics").text).by("gapless:gpu_bubble_seconds_total", "cause")["ranks"]


def of_event(line):
    """The rows of steps in a line of the feed."""
    return json.loads(line.removeprefix("data: "))["steps"] if line.startswith("data: ") else []
