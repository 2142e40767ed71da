"""`serve --api-server-count 3`: three processes that speak HTTP, and one engine, seen from outside."""

import json
import os
import re
import signal
import threading
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import pytest
from server_harness import BODIES, CHAT, COMPLETIONS, MESSAGES, MODEL, RESPONSES, TOKENIZE
from server_process import failing, gone, process, write_tiny
from waiting import until

from gapless.base.config import EngineConfig
from gapless.server.config import ServerConfig
from gapless.server.pair import serve_pair

pytestmark = pytest.mark.process
FRONTS = 3


def tree(pid):
    """The processes below this one."""
    try:
        below = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [one for child in map(int, below) for one in (child, *tree(child))]


def command_of(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode()
    except FileNotFoundError:  # it has ended since it was listed
        return ""


class Fronts:
    """A running server, with a client whose one connection is with each of its fronts."""

    def __init__(self, server, stack):
        self.server = server
        children = tree(server.popen.pid)
        self.further = [pid for pid in children if "gapless.server.further" in command_of(pid)]
        (self.engine,) = [pid for pid in children if "gapless.testing.worker" in command_of(pid)]
        self.pids = [server.popen.pid, *self.further]
        found = {}
        while len(found) < FRONTS:  # the system draws
            client = stack.enter_context(httpx.Client(base_url=server.url, timeout=60))
            stream = client.get("/version").extensions["network_stream"]
            port = stream.get_extra_info("client_addr")[1]
            found.setdefault(self.holder(port), client)
        self.clients = [found[pid] for pid in self.pids]

    def holder(self, port):
        """The process with the server's end of a connection from this port."""
        inode = next(
            fields[9]
            for fields in map(str.split, Path("/proc/net/tcp").read_text().splitlines()[1:])
            if fields[2].endswith(f":{port:04X}") and fields[3] == "01"
        )
        return next(pid for pid in self.pids if f"socket:[{inode}]" in self.files(pid))

    @staticmethod
    def files(pid):
        found = []
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with suppress(FileNotFoundError):  # closed meanwhile
                found.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
        return found


@contextmanager
def fronts(model, **options):
    with process(model, api_server_count=FRONTS, served_model_name=(MODEL,), **options) as server, ExitStack() as stack:
        server.wait_ready()
        yield Fronts(server, stack)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny(tmp_path_factory)


@pytest.fixture(scope="module")
def three(model):
    with fronts(model, pace=0.002) as running:
        yield running


FIXED = {"temperature": 0, "seed": 1, "ignore_eos": True, "max_tokens": 12}
ASKED = {
    "whole": (COMPLETIONS, FIXED),
    "stream": (COMPLETIONS, {**FIXED, "stream": True, "stream_options": {"include_usage": True}}),
    "two with scores": (COMPLETIONS, {**FIXED, "n": 2, "logprobs": 3, "echo": True, "prompt": ["hi", "ho"]}),
    "scores streamed": (CHAT, {**FIXED, "logprobs": True, "top_logprobs": 2, "stream": True}),
    "stop": (COMPLETIONS, {**FIXED, "stop": ["a", "e", "i"], "max_tokens": 60}),
    "chat": (CHAT, {**FIXED, "stream": True}),
    "wrong message": (MESSAGES, {"stream": True, "max_tokens": -1}),
    "wrong response": (RESPONSES, {"max_output_tokens": -1}),
    "wrong": (COMPLETIONS, {"temperature": -1}),
    "no model": (COMPLETIONS, {"model": "other"}),
    "tokenize": (TOKENIZE, {}),
    "not JSON": (TOKENIZE, None),
}
_CHANGING = re.compile(r'(?<=")[a-z]+[-_][0-9a-f]{24}(?=")|(?<="created":)\d+|(?<=_at":)\d+')


def shown(answer):
    headers = {name: value for name, value in answer.headers.items() if name not in ("date", "content-length")}
    data = _CHANGING.sub("0", answer.text)
    if data.startswith(("data: ", "event: ")):  # tokens that come together may be one event
        events = [json.loads(line[6:]) for line in data.splitlines() if line.startswith("data: {")]
        texts = re.findall(r'"(?:text|content)": ?"(.*?)"', json.dumps(events))
        data = [sorted(events[0]), "".join(texts), events[-1] | {"choices": [], "delta": ""}]
    return answer.status_code, headers, answer.headers.get_list("date")[1:], data


@pytest.mark.parametrize(("path", "fields"), ASKED.values(), ids=ASKED)
def test_an_answer_of_each_front_is_that_of_the_first(three, path, fields):
    def ask(client):
        if fields is None:
            return client.post(path, content=b"{", headers={"content-type": "application/json"})
        return client.post(path, json={**BODIES[path], **fields}, headers={"x-request-id": "one"})

    first, *others = [shown(ask(client)) for client in three.clients]
    assert others == [first] * (FRONTS - 1)


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/responses/x", "/no%20w%C3%A9re", "/ui"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_a_route_that_does_not_generate_is_answered_by_the_first_front(three, path, method):
    first, *others = [shown(client.request(method, path)) for client in three.clients]
    assert others == [first] * (FRONTS - 1)


def count(page, name, **labels):
    lines = [line for line in page.splitlines() if line.startswith(f"{name}{{")]
    found = [line for line in lines if all(f'{label}="{value}"' in line for label, value in labels.items())]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def test_the_metrics_page_of_each_front_counts_all(three):
    for client in three.clients:  # no other test here has such answers: counts of earlier ones may be on their way
        assert client.post(MESSAGES, json=BODIES[MESSAGES]).status_code == 200

    def answers(client):
        return count(client.get("/metrics").text, "http_requests_total", handler=MESSAGES, status="2xx")

    for client in three.clients:
        until(lambda client=client: answers(client) == FRONTS)


class Long:
    """A long stream by each front; `ends` has the last event of each, once they are joined."""

    def __init__(self, running, tokens=900):
        self.ends, self._begun = [None] * FRONTS, threading.Semaphore(0)
        self.texts = [""] * FRONTS
        works = enumerate(running.server.url for _ in running.pids)
        self._threads = [threading.Thread(target=self._read, args=(running, tokens, number)) for number, _ in works]
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert self._begun.acquire(timeout=60)

    def _read(self, running, tokens, number):
        body = {"prompt": "hi", "max_tokens": tokens, "ignore_eos": True, "stream": True, "seed": 1}
        headers = {"x-request-id": f"long-{number}"}
        with running.clients[number].stream("POST", COMPLETIONS, json=body, headers=headers) as answer:
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    if self.ends[number] is None:
                        self._begun.release()
                    self.ends[number] = json.loads(line[6:])
                    self.texts[number] += "".join(one["text"] for one in self.ends[number].get("choices", ()))

    def join(self):
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        return self.ends

    def reasons(self):
        return [end["choices"][0]["finish_reason"] for end in self.join()]


def test_operators_orders_at_any_front_are_for_the_requests_of_all(three):
    with httpx.Client(base_url=three.server.url, timeout=60) as client:
        streams = Long(three)
        until(lambda: client.get("/load").json()["server_load"] == FRONTS)
        rows = client.get("/debug/requests").json()["requests"]
        running = [row for row in rows if row["state"] == "running"]
        assert {row["request_id"] for row in running} == {f"long-{number}" for number in range(FRONTS)}
        keys = [key for row in rows for key in row["keys"]]
        assert len(set(keys)) == len(keys)
        assert "cmpl-" in client.get("/debug/trace").text
        one = client.post("/abort_requests", json={"request_ids": ["long-1"]}).json()
        assert one == {"status": "aborted", "aborted": 1}
        assert client.post("/abort_requests", json={}).json()["aborted"] == FRONTS - 1
        assert streams.reasons() == ["abort"] * FRONTS
        until(lambda: client.get("/load").json()["server_load"] == 0)

        streams = Long(three)
        assert client.post("/pause?mode=abort").json() == {"status": "paused"}
        assert streams.reasons() == ["abort"] * FRONTS
        assert [one.get("/is_paused").json() for one in three.clients] == [{"is_paused": True}] * FRONTS
        client.post("/resume")

        adapter = {"lora_name": "sums", "lora_path": "sums"}
        assert client.post("/v1/load_lora_adapter", json=adapter).status_code == 200
        for one in three.clients:
            answer = one.post(COMPLETIONS, json={"prompt": "hi", "max_tokens": 2, "model": "sums"})
            assert answer.json()["model"] == "sums"


def test_requests_without_a_seed_draw_other_seeds_at_each_front(model):
    with fronts(model, engine={"seed": 5}) as running:
        body = {"prompt": "hi", "max_tokens": 12, "ignore_eos": True, "temperature": 1}
        texts = {client.post(COMPLETIONS, json=body).json()["choices"][0]["text"] for client in running.clients}
        assert len(texts) == FRONTS


def test_the_access_log_has_one_line_for_each_request_whichever_front_answers(model):
    with fronts(model) as running:
        for client in running.clients:
            assert client.post(TOKENIZE, json=BODIES[TOKENIZE]).status_code == 200
            assert client.get("/v1/models").status_code == 200
        assert running.server.end() == 0
        lines = running.server.popen.stderr.read()
        assert [lines.count(f'"{asked} HTTP/1.1" 200') for asked in (f"POST {TOKENIZE}", "GET /v1/models")] == 2 * [
            FRONTS
        ]


def test_an_engine_that_dies_is_followed_by_one_where_the_streams_of_all_fronts_go_on(model):
    with fronts(model, pace=0.01) as running:
        streams = Long(running, 300)
        os.kill(running.engine, signal.SIGKILL)
        assert streams.reasons() == ["length"] * FRONTS
        body = {"prompt": "hi", "max_tokens": 300, "ignore_eos": True, "seed": 1}
        for client in running.clients:
            assert client.get("/health").status_code == 200
            assert client.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == streams.texts[0]
        assert streams.texts == streams.texts[:1] * FRONTS
        for client in running.clients:
            counted = partial(count, client.get("/metrics").text, "gapless:requests_resumed_total")
            assert counted(outcome="finished") == FRONTS


def test_the_streams_of_all_fronts_end_when_no_engine_follows_one_that_died(model):
    with fronts(model, pace=0.01) as running:
        streams = Long(running)
        for _ in range(3):
            below = partial(tree, running.server.popen.pid)
            engine = until(lambda below=below: [pid for pid in below() if "testing.worker" in command_of(pid)])
            os.kill(engine[0], signal.SIGKILL)
            until(lambda engine=engine: gone(engine[0]))
        assert [end["error"]["code"] for end in streams.join()] == ["engine_dead"] * FRONTS
        assert running.server.popen.wait(60) == 1


def test_sigterm_lets_the_running_finish_at_each_front(model):
    with fronts(model, pace=0.01) as running:
        streams = Long(running, 100)
        for pid in running.further:  # as a process manager does that signals all
            os.kill(pid, signal.SIGTERM)
        running.server.popen.send_signal(signal.SIGTERM)
        assert streams.reasons() == ["length"] * FRONTS
        assert running.server.popen.wait(60) == 0
        assert all(map(gone, (*running.further, running.engine)))
        assert "Traceback" not in running.server.popen.stderr.read()


@pytest.mark.parametrize("how", ["time", "signal"])
def test_the_rest_of_each_front_ends_with_an_error(model, how):
    with fronts(model, pace=0.02, drain_seconds=0.3 if how == "time" else 60.0) as running:
        streams = Long(running)
        running.server.popen.send_signal(signal.SIGTERM)
        if how == "signal":
            until(lambda: running.clients[0].get("/ready").status_code == 503)
            running.server.popen.send_signal(signal.SIGTERM)
        assert [end["error"]["code"] for end in streams.join()] == ["server_shutting_down"] * FRONTS
        assert running.server.popen.wait(60) == 0


@pytest.mark.parametrize("which", ["further", "first"])
def test_a_front_that_is_killed_ends_the_server(model, which):
    with fronts(model, pace=0.01) as running:
        others = (*running.further, running.engine)
        os.kill(running.further[0] if which == "further" else running.server.popen.pid, signal.SIGKILL)
        code = running.server.popen.wait(60)
        assert all(map(gone, others))
        if which == "further":
            assert code > 0 and "front 1 of --api-server-count has ended" in running.server.popen.stderr.read()


def test_a_shared_port_in_use_is_refused(model):
    with fronts(model) as running:
        port = int(running.server.url.rpartition(":")[2])
        code, errors = failing(model, port=port, api_server_count=2)
        assert code == 2 and f"port {port}" in errors


def test_several_fronts_share_a_unix_socket(model, tmp_path):
    path = str(tmp_path / "server.sock")
    with process(model, api_server_count=2, uds=path) as server:
        server.wait_ready()
        for _ in range(4):
            with httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://localhost") as client:
                assert client.get("/health").status_code == 200
        assert server.end() == 0


def test_several_fronts_for_a_pair_of_servers_are_refused(capsys):
    assert serve_pair([], EngineConfig(), ServerConfig(pd="1p1d", api_server_count=2)) == 2
    assert "api_server_count" in capsys.readouterr().err
