"""Refused requests are counted as refused, and not among those that the engine ended, nor in their latencies."""

import json
import threading

import pytest
from server_harness import error_of, fake_core, serving
from test_ops_api import families

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = [7] * 2000
MESSAGES = [{"role": "user", "content": "hi"}]
REFUSED = [
    (COMPLETIONS, {"prompt": LONG}),
    (COMPLETIONS, {"prompt": LONG, "stream": True}),
    (COMPLETIONS, {"prompt": ""}),
    (COMPLETIONS, {"prompt": LONG, "n": 3}),
    (COMPLETIONS, {"prompt": ["hi", "a", LONG[:0]]}),
    (COMPLETIONS, {"prompt": [[7], LONG, [8]], "stream": True, "n": 2}),
    (COMPLETIONS, {"prompt": [99_999]}),
    (COMPLETIONS, {"prompt": "hi", "logit_bias": {"99999": 1}}),
    (COMPLETIONS, {"prompt": "hi", "max_tokens": 1023}),
    (COMPLETIONS, {"prompt": "\ud800"}),
    (CHAT, {"messages": MESSAGES, "n": 3, "stop_token_ids": list(range(33))}),
    (CHAT, {"messages": MESSAGES, "n": 2, "allowed_token_ids": [99_999]}),
    (COMPLETIONS, {"prompt": "h" * 1025, "max_tokens": 0, "echo": True}),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 3000}]}),
    ("/v1/responses", {"input": "x" * 3000}),
    ("/v1/messages", {"model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "x" * 3000}]}),
]


def ran(client):
    """The series of requests that ran, without those of the engine's steps."""
    page = families(client)
    names = [name for name in page if name.startswith(("vllm:request_", "vllm:e2e_", "vllm:time_to_first"))]
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for name in names
        for sample in page[name].samples
        if not sample.name.endswith("_created")
    }


@pytest.mark.parametrize(("path", "body"), REFUSED, ids=lambda one: str(one)[:50])
def test_a_refused_request_is_no_abort_and_no_latency(server, client, path, body):
    server.until(lambda: server.run(lambda: server.state.open) == 0)
    before, refused = ran(client), sum(server.state.metrics.rejected.values())
    response = client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    assert ran(client) == before
    coded = path == "/v1/messages" or error_of(response)["code"] is not None
    assert sum(server.state.metrics.rejected.values()) - refused <= int(coded)


def test_a_request_that_a_full_queue_refuses_is_no_abort():
    with serving(core=lambda: fake_core(max_num_seqs=1, max_queue=1)) as server, server.client() as client:
        with client.stream("POST", COMPLETIONS, json={"prompt": "~", "max_tokens": 900, "stream": True}) as first:
            lines = first.iter_lines()
            next(lines)
            waiting = threading.Thread(
                target=client.post, args=(COMPLETIONS,), kwargs={"json": {"prompt": "a", "max_tokens": 1}}
            )
            waiting.start()
            server.until(lambda: server.stats().queue.waiting == 1)
            before = ran(client)
            for more in ({}, {"n": 3}, {"prompt": ["a", "b"]}, {"stream": True}):
                body = {"prompt": "a", "max_tokens": 1, **more}
                refused = client.post(COMPLETIONS, json=body)
                assert (refused.status_code, error_of(refused)["code"]) == (503, "queue_full")
                assert error_of(refused)["type"] == "service_unavailable" and int(refused.headers["retry-after"]) >= 1
            assert ran(client) == before and client.get("/health").status_code == 200
            assert server.state.metrics.rejected["queue_full"] == 4
        waiting.join(10)
        server.until(lambda: server.state.metrics.finished["length"] == 1)
        assert server.state.metrics.finished["abort"] == 1, "the client of the first one went"


def test_a_request_whose_time_is_up_while_it_runs_is_an_abort(server, client):
    aborts = server.state.metrics.finished["abort"]
    late = client.post(COMPLETIONS, json={"prompt": "~", "max_tokens": 900}, headers={"x-request-timeout": "0.2"})
    assert (late.status_code, server.state.metrics.finished["abort"]) == (408, aborts + 1)
