"""Health, models, tokens, metrics, headers."""

import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_harness import TOKENS, error_of, events, serving

import gapless
from gapless.engine.stats import Stats
from gapless.loop.timeline import DeviceTimes
from gapless.server.metrics import Metrics


def test_probes_of_a_healthy_server(client):
    for method, path in (
        ("GET", "/health"),
        ("GET", "/ready"),
        ("GET", "/ping"),
        ("POST", "/ping"),
        ("HEAD", "/health"),
    ):
        response = client.request(method, path)
        assert (response.status_code, response.content) == (200, b"")


def test_version_and_load_are_answered(client):
    assert client.get("/version").json() == {"version": gapless.__version__}
    assert client.get("/load").json() == {"server_load": 0}


def test_the_list_of_models_has_a_card_for_each(client):
    listed = client.get("/v1/models").json()
    (card,) = listed["data"]
    assert listed["object"] == "list"
    assert (card["id"], card["root"], card["object"], card["max_model_len"]) == ("tiny", "tiny", "model", 1024)
    assert client.get("/v1/models/tiny").json() == card
    response = client.get("/v1/models/org/other")
    assert response.status_code == 404
    assert error_of(response)["code"] == "model_not_found"


def test_every_served_name_is_listed_and_answers():
    with serving(served_model_name=("org/a", "b")) as server, server.client() as client:
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == ["org/a", "b"]
        assert client.get("/v1/models/org/a").json()["id"] == "org/a"
        for name in ("org/a", "b", None):
            answer = client.post("/v1/completions", json={"prompt": "x", "model": name}).json()
            assert answer["model"] == (name or "org/a")
        assert client.post("/v1/completions", json={"prompt": "x", "model": "tiny"}).status_code == 404


def test_a_text_is_tokenized_as_the_tokenizer_does(client):
    answer = client.post("/tokenize", json={"model": "tiny", "prompt": "hé", "return_token_strs": True}).json()
    assert answer["tokens"] == TOKENS.encode("hé")
    assert answer["count"] == 3
    assert answer["max_model_len"] == 1024
    assert answer["token_strs"] == [TOKENS.token_str(token) for token in answer["tokens"]]
    assert client.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []


def test_a_conversation_is_tokenized_by_the_chat_template(client):
    messages = [{"role": "user", "content": "x"}]
    answer = client.post("/tokenize", json={"messages": messages}).json()
    assert TOKENS.decode(answer["tokens"]) == "<user>x<assistant>"
    answer = client.post("/tokenize", json={"messages": messages, "add_generation_prompt": False}).json()
    assert TOKENS.decode(answer["tokens"]) == "<user>x"


def test_a_text_tokenized_and_detokenized_is_the_same(client):
    ids = client.post("/tokenize", json={"prompt": "héllo ✓</s>"}).json()["tokens"]
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "héllo ✓</s>"}
    assert client.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


def test_the_info_of_the_tokenizer_is_answered(client):
    info = client.get("/tokenizer_info").json()
    assert (info["eos_token"], info["bos_token"]) == ("</s>", "<s>")
    assert "{{ m.content }}" in info["chat_template"]


# Metrics


def families(client):
    response = client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return {family.name: family for family in text_string_to_metric_families(response.text)}


def value(page, name, **labels):
    for family in page.values():
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                return sample.value
    return None


def test_the_metrics_page_counts_what_happened():
    with serving() as server, server.client() as client:
        assert client.post("/v1/completions", json={"prompt": "hell~", "max_tokens": 7, "n": 2}).status_code == 200
        events(client.post("/v1/completions", json={"prompt": ["$", "b"], "max_tokens": 7, "stream": True}))
        client.post("/v1/completions", json={"prompt": "!", "max_tokens": 7})
        client.get("/nowhere")
        client.post("/v1/completions", json={"prompt": 3})
        server.until(lambda: server.stats().queue.running == 0)
        page = families(client)
        assert value(page, "vllm:request_success_total", finished_reason="length") == 3
        assert value(page, "vllm:request_success_total", finished_reason="stop") == 1
        assert value(page, "vllm:request_success_total", finished_reason="error") == 1
        assert value(page, "vllm:time_to_first_token_seconds_count", model_name="tiny", engine="0") == 4
        assert value(page, "vllm:inter_token_latency_seconds_count") <= 6 * 3 + 3 + 1
        assert value(page, "vllm:e2e_request_latency_seconds_count") == 3
        assert value(page, "vllm:request_queue_time_seconds_count") == 4
        assert value(page, "vllm:request_prompt_tokens_sum") == 5 + 1 + 1 + 1
        assert value(page, "vllm:request_generation_tokens_sum") == 7 * 3 + 4 + 2
        assert value(page, "vllm:generation_tokens_total") >= 7 * 3 + 4
        assert value(page, "vllm:num_requests_running") == 0
        assert value(page, "vllm:request_params_n_count") == 3
        assert value(page, "vllm:request_params_max_tokens_sum") == 21
        assert value(page, "vllm:request_max_num_generation_tokens_sum") == 7 + 7 + 2
        for name in ("inference", "prefill", "decode"):
            assert value(page, f"vllm:request_{name}_time_seconds_count") == 4
        whole, first, later = (
            value(page, f"vllm:request_{name}_time_seconds_sum") for name in ("inference", "prefill", "decode")
        )
        assert whole == pytest.approx(first + later, rel=1e-6) and first > 0
        assert value(page, "vllm:request_prefill_kv_computed_tokens_sum") == 5 + 1 + 1 + 1
        assert value(page, "vllm:request_num_preemptions_sum") == 0
        assert value(page, "vllm:request_num_preemptions_count") == 4
        assert value(page, "vllm:request_time_per_output_token_seconds_count") == 4
        assert value(page, "gapless:step_seconds_sum", phase="detok") > 0
        assert value(page, "gapless:engine_up") == 1
        for status, count in (("2xx", 2), ("5xx", 1), ("4xx", 1)):
            labels = {"handler": "/v1/completions", "method": "POST", "status": status}
            assert value(page, "http_requests_total", **labels) == count
        assert value(page, "http_requests_total", handler="none", status="4xx") == 1
        assert value(page, "vllm:admission_rejections_total", reason="not_found") is None
        assert value(page, "vllm:admission_rejections_total", reason="internal_error") == 1
        assert client.get("/v1/models/nope").status_code == 404
        assert client.get("/ui/nope.js").status_code == 404
        again = families(client)
        refused = "vllm:admission_rejections_total"
        for reason in ("model_not_found", "not_found"):
            assert value(again, refused, reason=reason) == value(page, refused, reason=reason), "no request was refused"
        assert value(again, "http_requests_total", handler="none", model_name="tiny") == 1
        if sys.platform == "linux":
            assert value(again, "process_resident_memory_bytes") > 1e6 and value(again, "process_open_fds") > 0
        assert client.head("/metrics").status_code == 200


def test_the_busy_ratio_is_that_of_the_last_seconds():
    metrics = Metrics("tiny")
    second = 10**9
    assert metrics.busy_ratio(Stats(device=DeviceTimes(100 * second, 100 * second)), 0.0) == 1.0
    for now in range(1, 30):
        ratio = metrics.busy_ratio(
            Stats(device=DeviceTimes((100 + now) * second, (100 + now // 2) * second)), float(now)
        )
        assert abs(ratio - 0.5) <= 0.51 / now
    assert len(metrics.busy_looks) <= 12
    for now in range(30, 45):
        ratio = metrics.busy_ratio(Stats(device=DeviceTimes((100 + now) * second, 115 * second)), float(now))
    assert ratio == 0.0


def test_an_engine_that_is_down_is_not_busy():
    metrics, second = Metrics("tiny"), 10**9
    for now in range(20):
        ratio = metrics.busy_ratio(Stats(device=DeviceTimes(100 * second, 90 * second)), float(now))
    assert ratio == 0.0


def test_label_values_cannot_break_the_page():
    with serving(served_model_name=('a"b\\c\nd',)) as server, server.client() as client:
        assert value(families(client), "vllm:num_requests_running", model_name='a"b\\c\nd') == 0


# Headers


def test_a_request_id_comes_back(client):
    assert client.get("/health", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    assert client.get("/nowhere", headers={"x-request-id": "abc-1"}).headers["x-request-id"] == "abc-1"
    stream = client.post("/v1/completions", json={"prompt": "x", "stream": True}, headers={"x-request-id": "s"})
    assert stream.headers["x-request-id"] == "s"
    assert "x-request-id" not in client.get("/health").headers


@pytest.mark.parametrize("label", ["x" * 129, b"\xff", "a\tb"])
def test_a_label_that_is_no_label_is_dropped(client, label):
    assert "x-request-id" not in client.get("/health", headers={"x-request-id": label}).headers


def test_the_same_request_id_twice_is_nobodys_problem(client):
    """The id is a label: it never indexes the engine."""

    def ask(_):
        fields = {"prompt": "~x", "max_tokens": 20, "request_id": "same"}
        return client.post("/v1/completions", json=fields, headers={"x-request-id": "same"})

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(4)))
    assert [answer.status_code for answer in answers] == [200] * 4
    assert len({answer.json()["id"] for answer in answers}) == 4


def test_every_answer_has_a_request_id_by_flag():
    with serving(enable_request_id_headers=True) as server, server.client() as client:
        first, second = (client.get("/health").headers["x-request-id"] for _ in range(2))
        assert len(first) == 32 and first != second


def test_cors_is_off_unless_an_origin_is_named():
    asked = {"origin": "https://a.example", "access-control-request-method": "POST"}
    with serving() as server, server.client() as client:
        response = client.options("/v1/completions", headers=asked)
        assert response.status_code == 405
        assert "access-control-allow-origin" not in response.headers
