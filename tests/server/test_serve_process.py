"""`serve` as a process with its engine as a child: start, crash, drain, and what is left behind."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from server_harness import VOCAB, error_of, write_model

from gapless.base.config import EngineConfig
from gapless.engine.child import WORKER
from gapless.engine.frontdoor import Located
from gapless.server import run as serving
from gapless.server.config import ServerConfig

FAKE = ("gapless.testing.worker", str(VOCAB))
ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import json, sys
from gapless.base.config import EngineConfig
from gapless.server.config import ServerConfig
from gapless.server.run import serve
engine, server, worker = json.loads(sys.argv[1])
server = {name: tuple(v) if isinstance(v, list) else v for name, v in server.items()}
sys.exit(serve(EngineConfig(**engine), ServerConfig(**server), worker=worker))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(write_model(tmp_path_factory.mktemp("model")))


class Process:
    """A `serve` in a process of its own."""

    def __init__(self, engine, server, worker):
        settings = json.dumps([engine, server, worker])
        self.popen = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, settings],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.banner = ""

    def wait_ready(self):
        for line in self.popen.stdout:
            self.banner += line
            if line.startswith("  curl "):  # its last line
                break
        assert self.banner.strip(), self.popen.stderr.read()
        found = re.search(r"http://[^ ,]+:\d+", self.banner)
        self.url = found[0] if found else ""

    def client(self):
        return httpx.Client(base_url=self.url, timeout=20)

    def child(self):
        """Process id of the engine."""
        pids = Path(f"/proc/{self.popen.pid}/task/{self.popen.pid}/children").read_text().split()
        return int(pids[0]) if pids else None

    def end(self, number=signal.SIGTERM, seconds=10):
        self.popen.send_signal(number)
        return self.popen.wait(seconds)


@contextmanager
def process(model, pace=0.0, **server):
    started = Process({"model": model}, {"port": 0, **server}, [*FAKE, str(pace)])
    try:
        yield started
    finally:
        if started.popen.poll() is None:
            started.popen.kill()
        started.popen.wait()
        started.popen.stdout.close()
        started.popen.stderr.close()


def gone(pid, seconds=2.0):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def until(truth, seconds=10.0):
    end = time.monotonic() + seconds
    while not truth():
        assert time.monotonic() < end, "it never became true"
        time.sleep(0.02)


class Streams:
    """Streams that are read on threads; `endings` holds (when, last event) of each."""

    def __init__(self, server, count, tokens=1000):
        self.endings = []
        self._first = threading.Barrier(count + 1)
        self._url = server.url
        self._tokens = tokens
        self._threads = [threading.Thread(target=self._read) for _ in range(count)]
        for thread in self._threads:
            thread.start()
        self._first.wait(20)

    def _read(self):
        fields = {"prompt": "hi", "max_tokens": self._tokens, "ignore_eos": True, "stream": True}
        with httpx.Client(timeout=20) as client, client.stream("POST", self._url + "/v1/completions", json=fields) as r:
            lines = (line for line in r.iter_lines() if line)
            seen = [next(lines)]
            self._first.wait(20)
            seen.extend(lines)
        assert seen[-1] == "data: [DONE]"
        self.endings.append((time.monotonic(), json.loads(seen[-2][6:])))

    def join(self):
        for thread in self._threads:
            thread.join(20)
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


def test_the_port_answers_from_the_first_moment(model):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with process(model, port=port) as server, httpx.Client(timeout=20, verify=False) as client:
        answers = []

        def ask():
            try:
                answers.append(client.get(f"http://127.0.0.1:{port}/health"))
            except httpx.ConnectError:
                return False
            return answers[-1].status_code == 200

        until(ask)
        assert answers[0].status_code == 503
        assert error_of(answers[0])["code"] == "loading"
        assert server.end() == 0


def said(server):
    """The seed of a server, and four answers to requests without one."""
    server.wait_ready()
    with server.client() as client:
        info = client.get("/server_info").json()
        assert info["changed"]["seed"] == info["engine"]["seed"]
        ask = {"prompt": "hi", "max_tokens": 8, "ignore_eos": True, "return_token_ids": True}
        answers = [client.post("/v1/completions", json=ask).json() for _ in range(4)]
    return info["engine"]["seed"], [answer["choices"][0]["token_ids"] for answer in answers]


def test_servers_without_a_seed_answer_differently_and_a_seed_that_one_drew_repeats_it(model):
    with process(model) as one, process(model) as other:
        (seed, answers), (another, others) = said(one), said(other)
        assert seed != another and answers != others
        assert len(set(map(tuple, answers))) == 4
        assert one.end() == 0 and f"seed={seed}" in one.popen.stderr.read()
    again = Process({"model": model, "seed": seed}, {"port": 0}, [*FAKE, "0.0"])
    with process(model) as third:
        assert said(third)[1] not in (answers, others)
    try:
        assert said(again) == (seed, answers)
    finally:
        again.end()
        again.popen.stdout.close()
        again.popen.stderr.close()


def test_an_engine_killed_during_sixteen_streams_ends_them_with_an_error(model):
    with process(model, pace=0.01) as server:
        server.wait_ready()
        with server.client() as client:
            streams = Streams(server, 16)
            at, child = time.monotonic(), server.child()
            os.kill(child, signal.SIGKILL)
            until(lambda: client.get("/health").status_code == 503, 2.0)
            endings = streams.join()
            assert len(endings) == 16
            for when, last in endings:
                assert when - at < 2.0
                assert last["error"]["code"] == "engine_dead"
            until(lambda: client.get("/health").status_code == 200)
            assert server.child() != child
            answer = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 5, "ignore_eos": True})
            assert answer.json()["usage"]["completion_tokens"] == 5
        assert server.end() == 0
        log = server.popen.stderr.read()
        assert "was killed by SIGKILL" in log and "Traceback" not in log


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
            for _, last in streams.join():
                assert last["choices"][0]["finish_reason"] == "length"
        assert server.popen.wait(10) == 0
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
        for _, last in streams.join():
            assert last["error"]["code"] == "server_shutting_down"
        assert server.popen.wait(10) == 0
        log = server.popen.stderr.read()
        assert "Traceback" not in log
        assert re.search(r"SIGINT: draining\n(.*\n)*.* ended after \d+ s\n", log)


def test_a_sigterm_while_loading_ends_both_processes(model):
    with process(model) as server:
        until(lambda: server.child() is not None)
        child = server.child()
        assert server.end() == 0
        assert gone(child)


def test_a_killed_front_leaves_no_engine(model):
    with process(model) as server:
        server.wait_ready()
        child = server.child()
        server.popen.kill()
        assert gone(child)
        server.popen.wait()
    with process(model, port=int(server.url.rpartition(":")[2])) as again:
        again.wait_ready()
        assert again.end() == 0


def test_three_crashes_end_the_server(model):
    with process(model) as server:
        server.wait_ready()
        with server.client() as client:
            for crash in range(3):
                until(lambda: client.get("/health").status_code == 200)
                os.kill(server.child(), signal.SIGKILL)
                if crash < 2:
                    until(lambda: client.get("/health").status_code == 503)
        assert server.popen.wait(10) == 1
        assert server.popen.stderr.read().splitlines()[-1] == (
            "gapless: error: the engine process was killed by SIGKILL"
        )


def failing(engine, server, worker=WORKER):
    """(exit code, stderr, seconds) of a serve that must not come up."""
    began = time.monotonic()
    settings = json.dumps([engine, server, worker])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, settings], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    return done.returncode, done.stderr, time.monotonic() - began


def test_a_missing_model_is_one_line(tmp_path):
    code, said, _ = failing({"model": str(tmp_path / "nowhere")}, {"port": 0})
    assert code == 2
    (line,) = said.strip().splitlines()
    assert line.startswith("gapless: error: ") and "nowhere" in line


def test_a_bad_checkpoint_is_one_line_after_those_of_the_start(model):
    """The tokenizer is fine, so it is the engine's own process that finds out and says so."""
    code, said, _ = failing({"model": model, "device": "cpu"}, {"port": 0})
    assert code == 1
    *start, line = said.strip().splitlines()
    phases = [re.fullmatch(r"[\d:]{8} I gapless.start: (.*)", one)[1] for one in start]
    assert phases == ["starting the engine's process", "loading torch", "opening the device"]
    assert line.startswith("gapless: error: ") and "safetensors" in line


def test_a_taken_port_is_one_line(model):
    with socket.create_server(("127.0.0.1", 0)) as holder:
        port = holder.getsockname()[1]
        code, said, _ = failing({"model": model}, {"port": port}, [*FAKE, "0"])
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
        code, said, _ = failing({"model": model}, {"uds": path}, [*FAKE, "0"])
        assert code == 2 and "cannot listen" in said and "--uds" in said
        assert server.end() == 0
    assert not Path(path).exists()


def gauge(client, name, state=""):
    """A value of the metrics page."""
    (line,) = (
        row
        for row in client.get("/metrics").text.splitlines()
        if row.startswith(name + "{") and (not state or f'state="{state}"' in row)
    )
    return float(line.rpartition(" ")[2])


def test_fifty_disconnects_on_the_real_engine_leave_every_page_free_or_cached(model):
    """The whole way: a random-weight model, its loop and pages in the child, clients that leave in mid-stream."""
    engine = {"model": model, "load_format": "dummy", "device": "cpu", "num_gpu_blocks_override": 600}
    server = Process(engine, {"port": 0, "disable_uvicorn_access_log": True}, WORKER)
    try:
        server.wait_ready()
        with server.client() as client:
            fields = {"prompt": "hello there", "max_tokens": 900, "ignore_eos": True, "temperature": 0}
            body = json.dumps({**fields, "stream": True}).encode()
            head = b"POST /v1/completions HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
            for _ in range(5):
                leaving = [
                    socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2]))) for _ in range(10)
                ]
                for connection in leaving:
                    connection.sendall(head % len(body) + body)
                for connection in leaving:
                    while b"data: " not in connection.recv(4096):
                        pass
                    connection.close()
            until(lambda: gauge(client, "vllm:num_requests_running") == 0)
            until(lambda: gauge(client, "gapless:kv_pages", "owned") + gauge(client, "gapless:kv_pages", "fenced") == 0)
            assert gauge(client, "gapless:kv_pages", "free") + gauge(client, "gapless:kv_pages", "cached") > 590
            short = {**fields, "max_tokens": 20}
            first, again = (client.post("/v1/completions", json=short).json()["choices"] for _ in range(2))
            assert first == again and first[0]["finish_reason"] == "length"
        assert server.end() == 0
    finally:
        if server.popen.poll() is None:
            server.popen.kill()
        server.popen.wait()
        server.popen.stdout.close()
        server.popen.stderr.close()


def test_a_whole_run_in_lines_of_json(model):
    settings = {"log_format": "json", "enable_log_requests": True, "api_key": ["s3cret"]}
    with process(model, **settings) as server:
        said = []
        while not said or " serves " not in said[-1]:
            said.append(server.popen.stderr.readline())
            assert said[-1], "it ended"
        assert len(said) <= 8
        url = re.search(r"http://[^ ,]+:\d+", said[-1])[0]
        with httpx.Client(base_url=url, timeout=20, headers={"authorization": "Bearer s3cret"}) as client:
            client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}, headers={"x-request-id": "r1"})
            client.get("/metrics")
        assert server.end() == 0
        out, rest = server.popen.communicate(timeout=10)
    assert out == ""
    lines = [json.loads(line) for line in "".join([*said, rest]).splitlines()]
    assert "s3cret" not in str(lines)
    assert (lines[0]["level"], lines[0]["phase"]) == ("info", "starting the engine's process")
    assert lines[1]["settings"]["api_key"] == "<secret>"
    assert any("startup_seconds" in line and line["startup_seconds"]["ready"] > 0 for line in lines)
    (asked,) = [line for line in lines if "request_id" in line]
    assert (asked["request_id"], asked["generation_tokens"]) == ("r1", 3)
    assert [line["path"] for line in lines if line["logger"] == "uvicorn.access"] == ["/v1/completions"]


def test_a_quiet_server_says_nothing(model):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with process(model, port=port, log_level="error") as server:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:

            def ready():
                try:
                    return client.get("/ready").status_code == 200
                except httpx.ConnectError:
                    return False

            until(ready)
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        assert server.end() == 0
        assert server.popen.communicate(timeout=10) == ("", "")
