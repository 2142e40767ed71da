"""The routes behind the live page: steps as they happen, traces, pages, requests, settings, the page's files."""

import asyncio
import gc
import json
import threading
import time
from contextlib import ExitStack, contextmanager
from importlib.resources import files
from types import SimpleNamespace

import httpx
import msgspec
import pytest
from server_harness import TOKENS, error_of, fake_core, serving
from waiting import until

import gapless
from gapless.base.config import EngineConfig
from gapless.base.errors import EngineDeadError
from gapless.cli.main import main
from gapless.engine.async_llm import AsyncLLM
from gapless.engine.frontdoor import ModelAssets
from gapless.engine.seam import EngineInfo, EngineView
from gapless.engine.stats import Stats
from gapless.engine.trace import STEP_COLUMNS
from gapless.lab.trace import read
from gapless.memory.pages import PageCounts
from gapless.offload.copies import HostCounts
from gapless.offload.lower import LowerCounts
from gapless.server import debug, pages, settings
from gapless.server.app import App
from gapless.server.config import ServerConfig
from gapless.server.state import MAX_TRACES, Debug


@pytest.fixture(scope="module")
def server():
    with serving() as running:
        yield running


def ask(client, text="hello", tokens=20, **fields):
    response = client.post("/v1/completions", json={"prompt": text, "max_tokens": tokens, **fields})
    assert response.status_code == 200
    return response


class Watcher:
    """Reads /debug/steps on a thread until it is closed."""

    def __init__(self, client):
        self.events = []
        self.status = None
        self._client = client
        self._stop = False
        self.thread = threading.Thread(target=self._run)

    def __enter__(self):
        self.thread.start()
        until(lambda: self.events or self.status not in (None, 200))
        return self

    def __exit__(self, *_):
        self._stop = True
        self.thread.join(20)

    def _run(self):
        with self._client.stream("GET", "/debug/steps") as response:
            self.status = response.status_code
            assert self.status != 200 or response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self.events.append(json.loads(line[6:]))
                if self._stop:
                    return

    @property
    def steps(self):
        return [dict(zip(self.events[0]["columns"], row, strict=True)) for e in self.events for row in e["steps"]]


@pytest.mark.process
def test_steps_arrive_while_a_client_watches(server, client):
    ask(client)
    with Watcher(client) as watcher:
        first = watcher.events[0]
        assert first["columns"] == list(STEP_COLUMNS) and first["steps"] == []
        asked = time.monotonic_ns()
        ask(client, "abc", 40)
        until(lambda: len(watcher.steps) >= 40)
        until(lambda: watcher.events[-1]["stats"]["queue"]["running"] == 0)
        steps, last = watcher.steps, watcher.events[-1]
    assert len(steps) == 40
    assert [step["step"] for step in steps] == list(range(steps[0]["step"], steps[0]["step"] + 40))
    for step in steps:
        assert asked < step["planning_at"] <= step["device_start"] <= step["device_end"] <= step["committed_at"]
        assert step["waited"] == 1 and (step["idle_ns"] > 0) == (step["cause"] is not None)
    assert sum("columns" in event for event in watcher.events) == 1
    gaps = [gap for event in watcher.events for gap in event["gaps"]]
    assert len(gaps) >= 39 and all(start < end and cause == "host_late" for start, end, cause, _ in gaps)
    assert sum(step["idle_ns"] for step in steps) == sum(end - start for start, end, _, _ in gaps)
    assert msgspec.convert(last["stats"], Stats).steps.steps == last["stats"]["steps"]["steps"] > 0
    assert last["counts"]["preemptions"] == 0
    assert last["now"] > steps[-1]["committed_at"] and all(event["skipped"] == 0 for event in watcher.events)
    server.until(lambda: server.llm.watch.watchers == 0)
    place = server.llm.watch.log.ended
    ask(client)
    assert server.llm.watch.log.ended == place, "the page is closed and the engine still sends"


def test_an_event_comes_at_least_every_second(client, monkeypatch):
    monkeypatch.setattr(debug, "QUIET_SECONDS", 0.05)
    with Watcher(client) as watcher:
        until(lambda: len(watcher.events) >= 4)
    nows = [event["now"] for event in watcher.events]
    assert nows == sorted(nows) and watcher.steps == []


@pytest.mark.process
def test_a_burst_is_decimated_and_says_so(client, monkeypatch):
    monkeypatch.setattr(debug, "MAX_STEPS", 1)
    monkeypatch.setattr(debug, "EVENT_SECONDS", 0.1)
    with Watcher(client) as watcher:
        ask(client, "abc", 60)
        until(lambda: sum(event["skipped"] + len(event["steps"]) for event in watcher.events) >= 60)
    assert sum(event["skipped"] for event in watcher.events) > 0
    assert max(len(event["steps"]) for event in watcher.events) == 1
    assert watcher.steps[-1]["step"] == watcher.events[-1]["stats"]["steps"]["steps"], "the newest are kept"


def test_the_number_of_watchers_is_bounded(server, client, monkeypatch):
    monkeypatch.setattr(debug, "MAX_WATCHERS", 1)
    monkeypatch.setattr(debug, "QUIET_SECONDS", 0.1)
    server.until(lambda: server.llm.watch.watchers == 0)  # those of the test before may still be leaving
    with Watcher(client) as watcher:
        assert watcher.status == 200
        response = client.get("/debug/steps")
        assert response.status_code == 429
        assert error_of(response)["code"] == "too_many_watchers"
    server.until(lambda: server.llm.watch.watchers == 0)
    with Watcher(client) as watcher:
        assert watcher.status == 200


def test_asking_for_the_head_alone_takes_no_place_and_ends(server):
    with server.client() as client:
        response = client.head("/debug/steps")
        assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
        assert client.get("/version").status_code == 200, "the connection goes on"
    assert server.llm.watch.watchers == 0


def test_a_watcher_does_not_hold_up_the_end_of_the_server():
    with serving() as server, server.client() as client, Watcher(client) as watcher:
        server.run(server.state.close)
        watcher.thread.join(5)
        assert not watcher.thread.is_alive()
    assert watcher.events


def test_a_trace_of_the_last_seconds_is_a_file(client):
    ask(client, "abc", 25)
    response = client.get("/debug/trace?seconds=60")
    assert response.status_code == 200
    assert response.headers["content-disposition"] == 'attachment; filename="gapless-trace.json"'
    events = response.json()["traceEvents"]
    names = {event["args"]["name"] for event in events if event["ph"] == "M" and "name" in event["args"]}
    assert {"engine", "requests", "host", "compute"} <= names
    assert sum(event["ph"] == "X" and event["name"].startswith("decode") for event in events) >= 25


def test_the_command_records_what_happens_from_now_on(server, client, tmp_path, capsys, monkeypatch):
    ask(client, "before", 9)
    server.until(lambda: server.llm.watch.watchers == 0)
    recorded, began = threading.Event(), time.monotonic()

    def ask_when_it_records():
        try:
            server.until(lambda: server.llm.watch.watchers == 1)
            before = server.llm.watch.log.ended
            ask(client, "abc", 33)
            server.until(lambda: server.llm.watch.log.ended >= before + 33)
        finally:
            recorded.set()

    # The second lasts until the request's steps have come, however busy the machine is.
    clock = SimpleNamespace(
        monotonic=lambda: time.monotonic() if recorded.is_set() else began, monotonic_ns=time.monotonic_ns
    )
    monkeypatch.setattr(debug, "time", clock)
    asking = threading.Thread(target=ask_when_it_records)
    asking.start()
    path = tmp_path / "t.jsonl"
    assert main(["trace", "record", server.url, "--seconds", "1", "-o", str(path)]) == 0
    asking.join()
    assert "33 steps (33 decode)" in capsys.readouterr().out
    recording = read(path)
    assert len(recording.steps) == 33
    (last,) = [request for request in recording.requests if request.prompt_tokens == 3]
    assert last.generation_tokens == 33
    assert {key for step in recording.steps for key in step.decode.tolist()} <= set(last.keys)
    server.until(lambda: server.llm.watch.watchers == 0)


@contextmanager
def traces_under_way(server):
    """As many traces as the server makes at a time."""
    traces = server.state.debug.traces
    with ExitStack() as ended:
        for _ in range(MAX_TRACES):
            assert not traces.locked()
            asyncio.run(traces.acquire())
            ended.callback(traces.release)
        yield


@pytest.mark.parametrize("query", ["seconds=0", "seconds=61", "seconds=-1", "seconds=x", "seconds=1e3", "seconds=²"])
def test_a_trace_of_wrong_seconds_is_refused(client, query):
    response = client.get(f"/debug/trace?{query}")
    assert response.status_code == 400 and error_of(response)["param"] == "seconds"


def test_too_many_traces_at_once_are_refused_and_the_command_says_so(server, client, capsys, tmp_path):
    with traces_under_way(server):
        assert main(["trace", "record", server.url, "-o", str(tmp_path / "t.json")]) == 1
        assert "traces are being made already" in capsys.readouterr().err
        response = client.get("/debug/trace")
        assert response.status_code == 429 and error_of(response)["code"] == "too_many_traces"
    assert client.get("/debug/trace").status_code == 200


class Engine:
    """A backend that stands still."""

    info = EngineInfo("/models/secret/name", "cpu", "float32", 258, 1024, 4, 64, 9, 16, "auto", 7)

    def __init__(self):
        self.looks = []
        self.engines = (self,)
        self.silence = None
        """Set where it answers nothing: an error ends the wait."""

    async def start(self, sink):
        self.sink = sink

    def stats(self):
        return Stats(pages=PageCounts(5, 1, 1, 1))

    def ready(self):
        return True

    async def ask(self, question):
        asked = question(1)
        self.looks.append(asked.since)
        if self.silence is not None:
            await asyncio.shield(self.silence)
        return EngineView([], b"ffcoxfff")

    def forsake(self, error):
        pass

    def watch(self, on):
        pass

    def abort(self, key):
        pass

    async def close(self):
        pass


def silent_engine():
    engine = Engine()
    engine.silence = asyncio.get_running_loop().create_future()
    return engine


async def answer(engine, path, config=None, server=None):
    llm = AsyncLLM(engine, ModelAssets(TOKENS), config=config)
    await llm.start()
    app = App(llm, server or ServerConfig(), "shown")
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
            return await asyncio.gather(*(client.get(path) for _ in range(5)))
    finally:
        await llm.close()


async def test_the_page_map_is_made_once_for_all_who_ask():
    engine = Engine()
    answers = await answer(engine, "/debug/kv")
    counts = {"free": 5, "cached": 1, "owned": 1, "fenced": 1}
    for response in answers:
        assert response.json() == {"pages": 8, "page_size": 16, "counts": counts, "map": "ffcoxfff", "tiers": []}
    assert len(engine.looks) == 1


def test_each_tier_has_a_row_with_its_counts():
    numbers = Stats(
        tier=HostCounts(slots=64, used=48, hit=31, missed=9, read_bytes=4096, dropped_full=5),
        lower=(
            LowerCounts(used_bytes=70, size_bytes=99, hits=20, missed=1), LowerCounts(hits=3, missed=2, dropped_slow=8),
        ),
    )  # fmt: skip
    host, disk, redis = debug.tier_rows(numbers, ("disk", "redis"))
    assert [row["tier"] for row in (host, disk, redis)] == ["host", "disk", "redis"]
    assert [(row["used"], row["size"]) for row in (host, disk, redis)] == [(48, 64), (70, 99), (0, 0)]
    assert [(row["hits"], row["missed"]) for row in (host, disk, redis)] == [(31, 9), (20, 1), (3, 2)]
    assert host["dropped"] == {"full": 5, "gone": 0, "failed": 0} and host["read_bytes"] == 4096
    assert redis["dropped"] == {"busy": 0, "slow": 8, "gone": 0, "failed": 0}
    assert debug.tier_rows(Stats(), ("disk",)) == []


async def test_an_engine_that_is_slow_to_answer_is_not_asked_again_meanwhile(monkeypatch):
    monkeypatch.setattr("gapless.server.state.PAGES_SECONDS", 0.0)
    engine, state = silent_engine(), Debug()
    async with AsyncLLM(engine, ModelAssets(TOKENS)) as llm:
        asked = [asyncio.create_task(state.pages(llm)) for _ in range(3)]
        while not engine.looks:
            await asyncio.sleep(0)
        asked.append(asyncio.create_task(state.pages(llm)))
        await asyncio.sleep(0)
        engine.silence.set_exception(EngineDeadError("it says nothing"))
        assert {type(error) for error in await asyncio.gather(*asked, return_exceptions=True)} == {EngineDeadError}
        assert len(engine.looks) == 1


async def test_an_answer_without_a_waiting_client_is_no_fault():
    faults = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
    engine, state = silent_engine(), Debug()
    async with AsyncLLM(engine, ModelAssets(TOKENS)) as llm:
        asked = asyncio.create_task(state.pages(llm))
        while not engine.looks:
            await asyncio.sleep(0)
        asked.cancel()
        engine.silence.set_exception(EngineDeadError("it says nothing"))
        for _ in range(10):
            await asyncio.sleep(0)
    del state, asked
    gc.collect()
    assert not faults


async def test_traces_are_written_one_at_a_time(monkeypatch):
    """The threads that write them make tokens of prompts too."""
    now, most = [], []

    def write(recording):
        now.append(1)
        most.append(len(now))
        time.sleep(0.05)
        now.pop()
        return b"{}"

    monkeypatch.setattr(debug, "chrome_trace", write)
    answers = await answer(Engine(), "/debug/trace")
    assert sorted(response.status_code for response in answers) == [200, 200, 429, 429, 429]
    assert most == [1, 1]


async def test_an_engine_that_says_nothing_is_503(monkeypatch):
    monkeypatch.setattr("gapless.engine.watch.VIEW_SECONDS", 0.05)
    engine = silent_engine()
    for response in await answer(engine, "/debug/kv"):
        assert response.status_code == 503 and error_of(response)["code"] == "engine_dead"


async def test_server_info_has_tiers_and_peers_but_no_secret_and_no_directory():
    files = {f"kv_peer_ssl_{name}": f"/other/{name}.pem" for name in ("certfile", "keyfile", "ca_certs")}
    tiers = ["host:1GiB", "peer:1GiB", "redis://me:secret@cache:6379/0", "disk:/other/kv:1GiB"]
    peers = {"kv_peers": ["unix:/other/p.sock", "far:5600"], "kv_peer_key_file": "/other/key", **files}
    config = EngineConfig(model="demo", role="both", kv_tiers=tiers, **peers)
    (response, *_) = await answer(Engine(), "/server_info", config, ServerConfig(port=1))
    body = response.json()
    assert body["peers"] == {"listen": "127.0.0.1:5600", "peers": ["unix:p.sock", "far:5600"], "tls": True}
    assert body["tiers"] == [] and body["engine"]["kv_peers"] == ["unix:p.sock", "far:5600"]
    assert body["engine"]["kv_tiers"] == ["host:1GiB", "peer:1GiB", "redis://cache:6379/0", "disk:kv:1GiB"]
    assert body["engine"]["kv_peer_ssl_keyfile"] == "keyfile.pem" and body["engine"]["kv_peer_key_file"] == "key"
    assert "secret" not in response.text and "/other" not in response.text


def test_a_plug_in_tier_is_shown_without_user_and_password():
    for text in ("acme:me:secret@cache:8GiB", "acme:redis://me:secret@cache:8GiB", "acme:/kv/me:secret@cache:8GiB"):
        assert settings.shown("kv_tiers", (text,))[0].rpartition("/")[2].endswith("cache:8GiB")
        assert "secret" not in settings.shown("kv_tiers", (text,))[0]


async def test_server_info_tells_settings_but_no_secret_and_no_directory():
    config = EngineConfig(model="/models/secret/name", depth=4, tokenizer="/other/tok/")
    server = ServerConfig(port=1, api_key=("hidden",), uds="/run/gapless.sock", served_model_name=("org/shown",))
    responses = await answer(Engine(), "/server_info", config, server)
    assert {response.status_code for response in responses} == {401}
    (response, *_) = await answer(Engine(), "/server_info", config, ServerConfig(port=1))
    body = response.json()
    assert body["version"] == gapless.__version__
    assert body["engine"]["model"] == "name" and body["engine"]["tokenizer"] == "tok"
    assert body["engine"]["max_num_seqs"] == 0 and body["engine"]["depth"] == "4"
    assert body["changed"] == {"model": "name", "tokenizer": "tok", "depth": "4", "port": 1}
    assert body["info"]["pages"] == 9 and body["info"]["model"] == "shown"
    for leak in ("secret", "/models", "/other", "hidden"):
        assert leak not in response.text
    shown = settings.settings(server)
    assert shown["api_key"] == "<secret>" and shown["uds"] == "gapless.sock"


def test_the_latest_requests_are_listed_up_to_the_limit(client):
    ask(client, "abcd", 12)
    ask(client, "ab", 3, n=2)
    answer = client.get("/debug/requests?limit=2").json()["requests"]
    assert [(r["prompt_tokens"], r["generation_tokens"], r["finish_reason"]) for r in answer] == [
        (4, 12, "length"),
        (2, 6, "length"),
    ]
    assert all(r["state"] == "done" and r["arrival"] <= r["started"] <= r["first_token"] for r in answer)
    assert len(answer[1]["keys"]) == 2 and answer[0]["chunks"] == []
    for query in ("limit=0", "limit=501", "limit=a"):
        assert client.get(f"/debug/requests?{query}").status_code == 400


def test_nothing_is_answered_while_the_engine_is_down():
    gate = threading.Event()

    def slow():
        assert gate.wait(20)
        return fake_core()

    with serving(wait=False, core=slow) as server:
        with server.client() as client:
            for path in ("/debug/steps", "/debug/trace", "/debug/kv"):
                assert client.get(path).status_code == 503
            assert client.get("/debug/requests").json() == {"requests": []}
            assert client.get("/server_info").json()["info"] == {}
        gate.set()
        server.until(lambda: server.state.llm.started)


# The page's own files.


def test_every_file_of_the_page_is_served_with_a_strict_policy(client):
    assert {"__init__.py"}.isdisjoint(pages.FILES)
    assert set(pages.FILES) == {
        entry.name for entry in files("gapless.ui").iterdir() if entry.name.rpartition(".")[2] in pages.MEDIA_TYPES
    } | {name for name in pages.FILES if "/" in name}
    for name in pages.FILES:
        response = client.get(f"/ui/{name}")
        assert response.status_code == 200 and response.content == pages.FILES[name].read_bytes()
        assert response.headers["content-type"] == pages.MEDIA_TYPES[name.rpartition(".")[2]]
        assert response.headers["x-content-type-options"] == "nosniff"
        policy = response.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
    assert client.get("/ui/").headers["location"] == "../ui"
    assert client.get("/ui/chat").content == pages.FILES["chat.html"].read_bytes()


@pytest.mark.parametrize(
    "path",
    ["__init__.py", "../app.py", "%2e%2e/app.py", "..%2fapp.py", "/etc/passwd", "//etc/passwd", "index.html/", "x"],
)
def test_nothing_else_is_served(client, path):
    response = client.get(f"/ui/{path}")
    assert response.status_code == 404
    error_of(response)
