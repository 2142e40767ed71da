"""`serve` as a process with its engine as a child: start, crash, drain, and what is left behind."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from server_harness import error_of
from server_process import failing, gone, process, write_tiny
from waiting import until

from gapless.base.config import EngineConfig
from gapless.engine.child import WORKER
from gapless.engine.frontdoor import Located
from gapless.server import run as serving
from gapless.server.config import ServerConfig

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory)


class Streams:
    """Streams that are read on threads; `endings` holds the last event of each."""

    def __init__(self, server, count, tokens=1000):
        self.endings, self.texts = [], []
        self._first = threading.Barrier(count + 1)
        self._url = server.url
        self._tokens = tokens
        self._threads = [threading.Thread(target=self._read) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        self._first.wait(60)

    def _read(self):
        fields = {"prompt": "hi", "max_tokens": self._tokens, "ignore_eos": True, "stream": True, "seed": 1}
        with httpx.Client(timeout=60) as client, client.stream("POST", self._url + "/v1/completions", json=fields) as r:
            lines = (line for line in r.iter_lines() if line)
            seen = [next(lines)]
            self._first.wait(60)
            seen.extend(lines)
        assert seen[-1] == "data: [DONE]"
        events = [json.loads(line[6:]) for line in seen[:-1]]
        self.endings.append(events[-1])
        self.texts.append("".join(choice["text"] for event in events for choice in event.get("choices", ())))

    def join(self):
        for thread in self._threads:
            thread.join(60)
        return self.endings


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("bash")), reason="needs bash and curl")
def test_the_curl_line_of_the_banner_can_be_run(model):
    with process(model, served_model_name=["tiny"], api_key=["k"]) as server:
        server.wait_ready()
        first, page, curl = server.banner.splitlines()
        assert "serves tiny" in first and server.url in first
        assert page == f"  live page {server.url}/ui"
        command = curl.strip().replace("What is 12 + 30?", "hi")
        done = subprocess.run(
            ["bash", "-c", command.replace("curl ", "curl -s ")],
            env={**os.environ, "GAPLESS_API_KEY": "k"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert json.loads(done.stdout)["choices"][0]["message"]["role"] == "assistant"
        child = server.child()
        assert server.end() == 0
        assert gone(child)
        assert "Traceback" not in server.popen.stderr.read()


def test_an_engine_killed_during_sixteen_streams_is_followed_by_one_where_they_go_on(model):
    with process(model, pace=0.01) as server:
        server.wait_ready()
        with server.client() as client:
            streams = Streams(server, 16, tokens=200)
            child = server.child()
            os.kill(child, signal.SIGKILL)
            until(lambda: client.get("/health").status_code == 503)
            refused = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 5})
            assert refused.status_code == 503 and refused.headers["retry-after"]
            assert [last["choices"][0]["finish_reason"] for last in streams.join()] == ["length"] * 16
            assert client.get("/health").status_code == 200 and server.child() != child
            fields = {"prompt": "hi", "max_tokens": 200, "ignore_eos": True, "seed": 1}
            assert streams.texts == 16 * [client.post("/v1/completions", json=fields).json()["choices"][0]["text"]]
            page = client.get("/metrics").text
            assert re.search(r'^gapless:requests_resumed_total{.*outcome="finished"} 16', page, re.MULTILINE)
        assert server.end() == 0
        log = server.popen.stderr.read()
        assert "was killed by SIGKILL" in log and "16 open requests wait for the next engine" in log
        assert "Traceback" not in log


def test_requests_that_were_open_when_two_engines_died_end_with_an_error_and_others_go_on(model):
    with process(model, pace=0.01) as server:
        server.wait_ready()
        with server.client() as client:
            twice = Streams(server, 4)
            os.kill(server.child(), signal.SIGKILL)
            until(lambda: client.get("/health").status_code == 503)
            until(lambda: client.get("/health").status_code == 200)
            once = Streams(server, 4, tokens=200)
            os.kill(server.child(), signal.SIGKILL)
            assert [last["error"]["code"] for last in twice.join()] == ["engine_dead"] * 4
            assert [last["choices"][0]["finish_reason"] for last in once.join()] == ["length"] * 4
            page = client.get("/metrics").text
            for outcome in ("finished", "lost"):
                assert re.search(rf'^gapless:requests_resumed_total{{.*outcome="{outcome}"}} 4', page, re.MULTILINE)
        assert server.end() == 0


def test_prompts_of_one_request_that_come_while_no_engine_runs_wait_for_the_next(model):
    with process(model, pace=0.01) as server:
        server.wait_ready()
        prompts = ["a", "b", "c"] * 40
        fields = {"prompt": prompts, "max_tokens": 40, "ignore_eos": True, "seed": 1}
        with server.client() as client, ThreadPoolExecutor(1) as threads:
            asked = threads.submit(client.post, "/v1/completions", json=fields)
            with server.client() as other:
                until(lambda: count_of(other, "vllm:num_requests_running"))
                os.kill(server.child(), signal.SIGKILL)
            choices = asked.result().json()["choices"]
            assert [choice["text"] for choice in choices[:3]] * 40 == [choice["text"] for choice in choices]
            assert len(choices) == len(prompts)
        assert server.end() == 0


def count_of(client, name):
    return sum(map(float, re.findall(rf"^{name}{{.*}} (\S+)$", client.get("/metrics").text, re.MULTILINE)))


def test_sigterm_lets_the_running_finish(model):
    with process(model, pace=0.01) as server:
        server.wait_ready()
        with server.client() as client:
            streams = Streams(server, 4, tokens=100)
            child = server.child()
            server.popen.send_signal(signal.SIGTERM)
            until(lambda: client.get("/ready").status_code == 503)
            assert client.get("/health").status_code == 200
            refused = client.post("/v1/completions", json={"prompt": "hi"})
            assert refused.status_code == 503
            assert error_of(refused)["code"] == "server_shutting_down"
            assert refused.headers["retry-after"]
            for last in streams.join():
                assert last["choices"][0]["finish_reason"] == "length"
        assert server.popen.wait(60) == 0
        assert gone(child)


@pytest.mark.parametrize("how", ["time", "signal"])
def test_the_rest_gets_an_error_event(model, how):
    with process(model, pace=0.02, drain_seconds=0.3 if how == "time" else 60.0) as server:
        server.wait_ready()
        streams = Streams(server, 4)
        server.popen.send_signal(signal.SIGINT)
        if how == "signal":
            with server.client() as client:
                until(lambda: client.get("/ready").status_code == 503)
            server.popen.send_signal(signal.SIGINT)
        for last in streams.join():
            assert last["error"]["code"] == "server_shutting_down"
        assert server.popen.wait(60) == 0
        log = server.popen.stderr.read()
        assert "Traceback" not in log
        assert re.search(r"SIGINT: draining\n(.*\n)*.* ended after \d+ s\n", log)


def test_a_sigterm_while_loading_ends_both_processes(model):
    with process(model) as server:
        until(lambda: server.child() is not None)
        child = server.child()
        assert server.end() == 0
        assert gone(child)


def test_three_crashes_end_the_server(model):
    with process(model) as server:
        server.wait_ready()
        with server.client() as client:
            for crash in range(3):
                until(lambda: client.get("/health").status_code == 200)
                os.kill(server.child(), signal.SIGKILL)
                if crash < 2:
                    until(lambda: client.get("/health").status_code == 503)
        assert server.popen.wait(60) == 1
        assert server.popen.stderr.read().splitlines()[-1] == (
            "gapless: error: the engine process was killed by SIGKILL"
        )


def test_a_missing_model_is_one_line(tmp_path):
    code, said = failing(str(tmp_path / "nowhere"), worker=WORKER)
    assert code == 2
    (line,) = said.strip().splitlines()
    assert line.startswith("gapless: error: ") and "nowhere" in line


def test_a_bad_checkpoint_is_one_line_after_those_of_the_start(model):
    """The tokenizer is fine, so it is the engine's own process that finds out and says so."""
    code, said = failing(model, {"device": "cpu"}, WORKER)
    assert code == 1
    *start, line = said.strip().splitlines()
    phases = [re.fullmatch(r"[\d:]{8} I gapless.start: (.*)", one)[1] for one in start]
    assert phases == ["starting the engine's process", "loading torch", "opening the device"]
    assert line.startswith("gapless: error: ") and "safetensors" in line


def test_a_taken_port_is_one_line(model):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        code, said = failing(model, port=port)
    assert code == 2
    (line,) = said.strip().splitlines()
    assert line.startswith("gapless: error: cannot listen on 127.0.0.1 port")
    assert "--port" in line


async def test_a_start_that_breaks_in_an_unforeseen_way_ends_the_server(caplog):
    class Broken:
        async def start(self):
            raise OSError("no more processes")

    run = serving.Serving(EngineConfig(), Located(EngineConfig()), ServerConfig(), None, "")
    await run.start(Broken(), None)
    assert run.asked_to_end.is_set() and "no more processes" in str(run.failure)
    assert "no more processes" in caplog.text


def test_a_unix_socket_takes_the_place_of_a_port(model, tmp_path):
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)  # left by a server that is gone
    with process(model, uds=path) as server:
        server.wait_ready()
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://x", timeout=20) as client:
            assert client.get("/health").status_code == 200
        code, said = failing(model, uds=path)
        assert code == 2 and "cannot listen" in said and "--uds" in said
        assert server.end() == 0
    assert not Path(path).exists()


def test_a_port_answers_from_the_first_moment_and_a_quiet_server_says_nothing(model, tmp_path):
    path = str(tmp_path / "s")
    with process(model, uds=path, log_level="error") as server:
        until(lambda: Path(path).exists())
        transport = httpx.HTTPTransport(uds=path, retries=3)
        with httpx.Client(transport=transport, base_url="http://x", timeout=60) as client:
            loading = client.get("/health")
            assert (loading.status_code, error_of(loading)["code"]) == (503, "loading")
            until(lambda: client.get("/ready").status_code == 200)
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        assert server.end() == 0
        assert server.popen.communicate(timeout=60) == ("", "")


def test_a_killed_front_leaves_no_engine(model):
    with process(model) as server:
        server.wait_ready()
        child = server.child()
        server.popen.kill()
        assert gone(child)


def said(server):
    """The seed of a server, and four answers to requests without one."""
    server.wait_ready()
    with server.client() as client:
        info = client.get("/server_info").json()
        assert info["changed"]["seed"] == info["engine"]["seed"]
        ask = {"prompt": "hi", "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
        answers = [client.post("/v1/completions", json=ask).json() for _ in range(4)]
    return info["engine"]["seed"], [answer["choices"][0]["token_ids"] for answer in answers]


def test_servers_draw_seeds_of_their_own_and_a_drawn_seed_repeats_its_answers(model):
    with process(model) as one, process(model) as other:
        (seed, answers), (another, others) = said(one), said(other)
        assert seed != another and answers != others
        assert len(set(map(tuple, answers))) == 4
        assert one.end() == 0 and f"seed={seed}" in one.popen.stderr.read()
    with process(model, engine={"seed": seed}) as again:
        assert said(again) == (seed, answers)
