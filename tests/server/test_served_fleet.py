"""`serve --data-parallel-size 2` over the demo: one port, two engines, and the death of one under load."""

import os
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import failing, gone, process
from waiting import until

from gapless.engine.child import WORKER

pytestmark = pytest.mark.process
STORIES = [
    f"Question: Mia has {number} pens and buys 7 more. How many pens does Mia have?\nAnswer:" for number in range(12)
]


def text_of(client, prompt, **more):
    fields = {"prompt": prompt, "max_tokens": 300, "ignore_eos": True, "temperature": 1.0, "seed": 7}
    answer = client.post("/v1/completions", json=fields, **more)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def number(client, name, **labels):
    found = text_string_to_metric_families(client.get("/metrics").text)
    return [
        sample.value for family in found for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]  # fmt: skip


@pytest.fixture(scope="module")
def engine():
    return {"data_parallel_size": 2, "device": "cpu", "dtype": "float32", "max_num_seqs": 16, "batch_invariant": True}


def test_a_killed_engine_costs_no_stream(engine):
    with process("demo", engine=engine, worker=WORKER) as server:
        server.wait_ready()
        assert "2 engines" in server.banner
        with server.client() as client, ThreadPoolExecutor(len(STORIES)) as threads:
            wanted = [text_of(client, prompt) for prompt in STORIES]
            by_rank = [text_of(client, STORIES[0], headers={"X-data-parallel-rank": str(rank)}) for rank in range(2)]
            assert by_rank == [wanted[0]] * 2, "a seed is the same on each engine"
            assert number(client, "gapless:placed_requests_total", by="rank") == [1, 1]
            refused = client.post("/v1/completions", json={"prompt": "hi"}, headers={"x-data-parallel-rank": "2"})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == "X-data-parallel-rank"
            reading = [threads.submit(text_of, client, prompt) for prompt in STORIES]
            until(lambda: min(number(client, "vllm:num_requests_running")) > 1)
            child = server.child()
            os.kill(child, signal.SIGKILL)
            assert gone(child)
            assert client.get("/health").status_code == 200
            assert [one.result(60) for one in reading] == wanted
            assert sum(number(client, "gapless:placed_requests_total", by="moved")) > 1
            assert number(client, "gapless:requests_resumed_total", outcome="lost") == [0]
            until(lambda: client.get("/health").json() == {"engines": 2, "ready": 2})
            assert number(client, "gapless:engine_up") == [1, 1]
            assert sum(number(client, "vllm:request_success_total", engine="all")) == 26
        assert server.end() == 0


def test_a_prompt_goes_to_the_engine_that_has_its_beginning(engine):
    with process("demo", engine=engine, worker=WORKER, enable_prompt_tokens_details=True) as server:
        server.wait_ready()
        with server.client() as client:
            beginnings = [" ".join(f"{story} and {word}" for word in range(120)) for story in range(6)]
            for story, beginning in enumerate(beginnings):
                text_of(client, beginning, headers={"X-data-parallel-rank": str(story % 2)})
            until(lambda: [sum(number(client, "vllm:num_requests_running"))] == [0])
            for beginning in beginnings:
                answer = client.post("/v1/completions", json={"prompt": f"{beginning} so", "max_tokens": 3})
                assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 400
            assert number(client, "gapless:placed_requests_total", by="prefix") == [3, 3]
            assert client.post("/reset_prefix_cache").status_code == 200
            again = client.post("/v1/completions", json={"prompt": f"{beginnings[0]} so", "max_tokens": 3})
            assert again.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
            assert number(client, "gapless:placed_requests_total", by="prefix") == [3, 3]


@pytest.mark.parametrize(
    ("more", "server", "says"),
    [
        ({}, {"api_server_count": 2}, "api_server_count does not go with data_parallel_size above 1"),
        ({"kv_tiers": ["host:8MiB", "disk:/tmp:8MiB"]}, {}, "kv_tiers does not go with"),
        ({"role": "prefill"}, {}, "role does not go with"),
        ({"kv_peers": ["127.0.0.1:1"]}, {}, "kv_peers does not go with"),
    ],
)
def test_a_setting_that_does_not_go_with_several_engines_is_refused_at_the_start(engine, more, server, says):
    code, log = failing("demo", {**engine, **more}, **server)
    assert code == 2 and re.search(f"error: {says}", log), log
