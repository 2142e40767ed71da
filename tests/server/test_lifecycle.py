"""What the server says and does while it loads, when the engine dies, when it is full, late or about to stop."""

import asyncio
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from server_harness import COMPLETIONS, broken_off, error_of, fake_core, posted, serving
from sharpest import sharpest

from gapless.server import answer
from gapless.testing.core import FakeCore

ASK = {"prompt": "~hi", "max_tokens": 5}
LONG = {"prompt": "~hi", "max_tokens": 1000}


def assert_unavailable(response, code):
    assert response.status_code == 503
    error = error_of(response)
    assert (error["type"], error["code"]) == ("service_unavailable", code)
    assert int(response.headers["retry-after"]) >= 1


@contextmanager
def loading():
    """A server, its client, and the event that its model waits for."""
    gate = threading.Event()

    def slow_core():
        assert gate.wait(20)
        return fake_core()

    with serving(core=slow_core, wait=False) as server, server.client() as client:
        yield server, client, gate


def test_a_server_whose_model_loads_is_unavailable():
    with loading() as (server, client, gate):
        for path in ("/health", "/ready", "/ping"):
            assert_unavailable(client.get(path), "loading")
        assert_unavailable(client.post("/v1/completions", json=ASK), "loading")
        assert_unavailable(client.post("/tokenize", json={"prompt": "x"}), "loading")
        assert client.get("/v1/models").json()["data"][0]["max_model_len"] is None
        assert "gapless:engine_up" in client.get("/metrics").text
        gate.set()
        server.until(lambda: client.get("/health").status_code == 200)
        assert client.get("/ready").status_code == 200
        assert client.post("/v1/completions", json=ASK).status_code == 200


def test_a_dead_engine_ends_every_request_with_an_error():
    with serving(core=lambda: fake_core(fail_at_step=30)) as server, server.client() as client:
        whole = []
        waiting = threading.Thread(target=lambda: whole.append(client.post("/v1/completions", json=LONG)))
        waiting.start()
        stream = client.post("/v1/completions", json={**LONG, "stream": True})
        waiting.join(10)
        assert_unavailable(whole[0], "engine_dead")
        *_, error, done = [line for line in stream.text.split("\n\n") if line]
        assert done == "data: [DONE]"
        assert json.loads(error[6:])["error"]["code"] == "engine_dead"
        for path in ("/health", "/ready"):
            assert_unavailable(client.get(path), "engine_dead")
        assert_unavailable(client.post("/v1/completions", json=ASK), "engine_dead")
        assert 'gapless:engine_up{engine="0",model_name="tiny"} 0.0' in client.get("/metrics").text


def test_too_much_text_work_is_refused(server, client, monkeypatch):
    monkeypatch.setattr(server.state, "text_jobs", asyncio.Semaphore(0))
    messages = [{"role": "user", "content": "x"}]
    assert_unavailable(client.post("/v1/chat/completions", json={"messages": messages}), "queue_full")


def test_draining_and_the_end_of_it():
    with serving() as server, server.client() as client:
        with client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as running:
            lines = running.iter_lines()
            next(lines)
            server.run(lambda: setattr(server.state, "stopping", True))
            assert client.get("/health").status_code == 200
            assert_unavailable(client.get("/ready"), "server_shutting_down")
            assert_unavailable(client.post("/v1/completions", json=ASK), "server_shutting_down")
            assert client.get("/metrics").status_code == 200
            next(lines), next(lines)
            server.run(server.state.close)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2][6:])["error"]["code"] == "server_shutting_down"
        server.until(lambda: server.stats().queue.running == 0)


def test_a_server_that_ends_before_its_model_is_there_is_not_healthy():
    with loading() as (server, client, gate):
        server.run(lambda: setattr(server.state, "stopping", True))
        for path in ("/health", "/ready"):
            assert_unavailable(client.get(path), "server_shutting_down")
        gate.set()
        server.until(lambda: client.get("/health").status_code == 200)


# Time limits


@pytest.mark.parametrize("how", sharpest(["header", "server"]))
@pytest.mark.process
def test_a_late_answer_is_an_error_not_a_short_answer(how):
    headers = {"x-request-timeout": "0.2" if how == "header" else "50"}
    with serving(request_timeout=0.2 if how == "server" else 50.0) as server, server.client() as client:
        response = client.post("/v1/completions", json=LONG, headers=headers)
        assert response.status_code == 408
        assert error_of(response)["type"] == "timeout_error"
        stream = client.post("/v1/completions", json={**LONG, "stream": True}, headers=headers)
        *chunks, error, done = [line for line in stream.text.split("\n\n") if line]
        assert done == "data: [DONE]"
        assert json.loads(error[6:])["error"]["code"] == "timeout"
        assert all(json.loads(chunk[6:])["choices"][0]["finish_reason"] is None for chunk in chunks)
        server.until(lambda: server.stats().queue.running == 0)


def slowly(server, seconds, timeout):
    """Status of a request whose body comes `seconds` after its head."""
    head, _, data = posted(COMPLETIONS, ASK, f"x-request-timeout: {timeout}").partition(b"\r\n\r\n")
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall(head + b"\r\n\r\n")
        time.sleep(seconds)
        connection.sendall(data)
        return int(connection.recv(65536).split()[1])


@pytest.mark.process
def test_a_slow_body_counts_for_the_limit_but_not_as_latency():
    with serving() as server, server.client() as client:
        began = time.monotonic()
        assert slowly(server, 0.3, timeout=60) == 200
        most = time.monotonic() - began - 0.3
        text = client.get("/metrics").text
        for name in ("request_queue_time", "time_to_first_token", "e2e_request_latency"):
            (found,) = [line for line in text.splitlines() if line.startswith(f"vllm:{name}_seconds_sum")]
            assert 0 < float(found.split()[-1]) <= most
        assert slowly(server, 0.3, timeout=0.1) == 408


@pytest.mark.parametrize("path", sharpest(["/v1/completions", "/v1/chat/completions"]))
def test_a_complete_answer_is_given_when_writing_it_takes_past_the_limit(monkeypatch, path):
    monkeypatch.setattr(answer, "INLINE_SCORED", -1)
    ask = {**ASK, "messages": [{"role": "user", "content": "hi"}]} if "chat" in path else ASK
    with serving() as server, server.client() as client:
        in_pool = server.llm.in_pool

        async def late(work):
            if work.__name__ == "encode":
                loop = asyncio.get_running_loop()
                now = loop.time
                loop.time = lambda: now() + 61
            return await in_pool(work)

        server.llm.in_pool = late
        assert client.post(path, json=ask, headers={"x-request-timeout": "60"}).status_code == 200
        assert "admission_rejections_total{" not in client.get("/metrics").text


def test_time_runs_in_the_queue_too():
    with (
        serving(core=lambda: fake_core(max_num_seqs=1)) as server,
        server.client() as client,
        client.stream("POST", "/v1/completions", json={**LONG, "stream": True}) as first,
    ):
        lines = first.iter_lines()
        next(lines)
        response = client.post("/v1/completions", json={**ASK, "stream": True}, headers={"x-request-timeout": "0.1"})
        assert response.status_code == 408
        assert error_of(response)["code"] == "timeout"
        server.until(lambda: server.stats().queue.waiting == 0)


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon", ""])
def test_a_wrong_time_limit_is_refused(client, value):
    response = client.post("/v1/completions", json=ASK, headers={"x-request-timeout": value})
    assert response.status_code == 400
    assert error_of(response)["param"] == "X-Request-Timeout"


# A row that fails


def test_a_failed_row_is_an_error_and_its_neighbours_go_on(client):
    def ask(prompt):
        return client.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 40})

    with ThreadPoolExecutor(4) as pool:
        good, bad, other = pool.map(ask, ["~", "~!", "x"])
    assert (good.status_code, bad.status_code, other.status_code) == (200, 500, 200)
    assert len(good.json()["choices"][0]["text"]) == 40
    error = error_of(bad)
    assert error["type"] == "server_error" and "incident" in error["message"]


def test_a_failed_row_ends_its_stream_with_an_error_event(client):
    *chunks, error, done = filter(None, broken_off(client, COMPLETIONS, {"prompt": "!"}).split("\n\n"))
    assert done == "data: [DONE]" and set(json.loads(error[6:])) == {"error"}
    assert "".join(json.loads(chunk[6:])["choices"][0]["text"] for chunk in chunks) == "ab"


# A fault of our own


def test_a_fault_of_ours_is_a_number_to_quote(caplog):
    class Broken(FakeCore):
        def submit(self, request):
            raise RequestError("kept", "prompt", "code")

    from gapless.base.errors import RequestError
    from gapless.server.errors import to_api_error

    with serving(core=lambda: Broken(100_000)) as server, server.client() as client:
        response = client.post("/v1/completions", json={"prompt": "x"})
        assert (response.status_code, error_of(response)["param"]) == (400, "prompt")
    answer = to_api_error(KeyError("/secret/path"))
    assert answer.status == 500
    body = answer.encode().decode()
    assert "secret" not in body and "KeyError" not in body
    number = body.partition("incident ")[2].partition(")")[0]
    assert number and number in caplog.text and "/secret/path" in caplog.text
