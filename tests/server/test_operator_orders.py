"""Operators' orders over HTTP: pauses, aborts, and an emptied prefix cache."""

import threading

import pytest
from server_harness import error_of, serving

from gapless.engine.seam import OperatorOrder

LONG = {"prompt": "~" * 3, "max_tokens": 900}


@pytest.fixture(scope="module")
def operated():
    with serving() as running:
        yield running


@pytest.fixture
def orders(operated):
    operated.core.orders.clear()
    return operated.core.orders


@pytest.fixture
def caller(operated):
    with operated.client() as client:
        yield client


@pytest.mark.parametrize(
    ("query", "given"),
    [
        ("", [OperatorOrder.HOLD, OperatorOrder.FORGET]),
        ("?mode=wait", [OperatorOrder.HOLD, OperatorOrder.FORGET]),
        ("?mode=abort&clear_cache=false", [OperatorOrder.HOLD]),
        ("?mode=keep", [OperatorOrder.FREEZE]),
        ("?wait_for_inflight_requests=true", [OperatorOrder.HOLD, OperatorOrder.FORGET]),
    ],
)
def test_a_pause_is_spelled_as_vllm_has_it_and_can_be_seen(caller, orders, query, given):
    assert caller.get("/is_paused").json() == {"is_paused": False}
    assert caller.post(f"/pause{query}").json() == {"status": "paused"}
    assert orders == given and caller.get("/is_paused").json() == {"is_paused": True}
    assert caller.post("/resume").json() == {"status": "resumed"}
    assert orders[-1] is OperatorOrder.RESUME and caller.get("/is_paused").json() == {"is_paused": False}


@pytest.mark.parametrize(("query", "field"), [("mode=stop", "mode"), ("clear_cache=perhaps", "clear_cache")])
def test_a_pause_that_nobody_knows_is_refused_by_name(caller, orders, query, field):
    answer = caller.post(f"/pause?{query}")
    assert answer.status_code == 400 and error_of(answer)["param"] == field
    assert not orders


@pytest.mark.parametrize("path", ["/reset_prefix_cache", "/flush_cache"])
def test_the_prefix_cache_is_emptied_under_both_names(caller, orders, path):
    assert caller.post(path).json()["success"] is True
    assert orders == [OperatorOrder.FORGET]


@pytest.mark.parametrize("named", ["X-Request-Id", "request_id", "id", None])
def test_requests_are_aborted_by_what_clients_know_of_them_or_all(operated, caller, named):
    answers = []

    def ask():
        headers = {"X-Request-Id": "mine"} if named == "X-Request-Id" else {}
        body = {**LONG, "request_id": "mine"} if named == "request_id" else LONG
        with operated.client() as client:
            answers.append(client.post("/v1/completions", json=body, headers=headers).json())

    thread = threading.Thread(target=ask)
    thread.start()
    operated.until(lambda: any(job.names for job in operated.state.jobs))
    (job,) = operated.state.jobs
    assert caller.post("/abort_requests", json={"request_ids": ["other"]}).json()["aborted"] == 0
    ids = {None: [], "id": [job.call.identity]}.get(named, ["mine"])
    body = {"request_ids": ids} if ids else {}
    assert caller.post("/abort_requests", json=body).json() == {"status": "aborted", "aborted": 1}
    thread.join(20)
    assert answers[0]["choices"][0]["finish_reason"] == "abort"
    assert not operated.state.jobs


def test_orders_are_not_for_pages_of_others():
    with serving() as server, server.client() as client:
        for origin in ("https://example.org", "null", ""):  # null: a frame that others have closed off
            assert client.post("/pause", headers={"Origin": origin}).status_code == 401
        assert client.post("/pause", headers={"Origin": server.url}).status_code == 200
        assert client.post("/resume").status_code == 200
