"""Servers behind vllm-router: apart as a prefiller and a decoder, and side by side, with one server's greedy tokens."""

import importlib.util
import json
import re
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest
from fake_resp import free_port
from served import Server

pytestmark = [
    pytest.mark.process,
    pytest.mark.net,
    pytest.mark.xdist_group("vllm-router"),  # they are killed at the end
    pytest.mark.skipif(importlib.util.find_spec("vllm_router") is None, reason="vllm-router is not installed"),
]

FLAGS = ("demo", "--batch-invariant", "--max-num-seqs", "8")
TIERS = ("--kv-tier", "host:256MiB", "--kv-tier", "peer:256MiB")
SUMS = (1, 3, 10, 22, 40, 80, 120)
"""Sums in a prompt; from 20 on it has more than 256 tokens, which are worth a transfer"""
LONG = 22
PATHS = ("/v1/completions", "/v1/chat/completions")


class Served(Server):
    """A server that comes back where it was, and a client of it."""

    def __init__(self, *flags):
        self.port = free_port()
        self.flags = (*FLAGS, *flags, "--port", str(self.port))
        super().__init__(*self.flags)
        self.client = httpx.Client(base_url=self.base, timeout=60)

    def kill(self):
        self.process.kill()
        self.stop()

    def back(self):
        super().__init__(*self.flags)

    def end(self):
        self.client.close()
        self.kill()


class Router:
    """vllm-router in a process of its own, ready."""

    def __init__(self, folder, *flags):
        port, self._log = free_port(), folder / "router.log"
        # Health is asked for each second, and not each minute.
        often = ("--worker-startup-check-interval", "1", "--health-check-interval-secs", "1")
        here = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()))
        command = [sys.executable, "-m", "vllm_router.launch_router", *here, *often, *flags]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self.base = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.base, timeout=60)

    def until(self, status, seconds=30):
        """Wait until it says that all of its servers are well, or one is not."""
        end = time.monotonic() + seconds
        while self.health() != status:
            assert self._process.poll() is None and time.monotonic() < end, self._log.read_text(errors="replace")
            time.sleep(0.1)

    def health(self):
        try:
            return self.client.get("/health").status_code
        except httpx.TransportError:
            return None

    def end(self):
        self.client.close()
        self._process.kill()
        self._process.wait()


def started(stack, *makers):
    """Start servers at the same time; those that have started end with the stack, whatever becomes of the others."""
    with ThreadPoolExecutor(len(makers)) as pool:
        futures = [pool.submit(maker) for maker in makers]
    for future in futures:
        if future.exception() is None:
            stack.callback(future.result().end)
    return [future.result() for future in futures]


@pytest.fixture(scope="module")
def mixed():
    """Two servers that compute prompts and answers, and publish what pages they have."""

    def publishing():
        events = f"tcp://127.0.0.1:{free_port()}"
        server = Served("--kv-events-config", json.dumps({"enable_kv_cache_events": True, "endpoint": events}))
        server.events = events
        return server

    with ExitStack() as stack:
        yield started(stack, publishing, publishing)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A prefiller and a decoder, as the guide starts them, and the router in front of them."""
    folder = tmp_path_factory.mktemp("pair")
    key, peer = folder / "key", f"127.0.0.1:{free_port()}"
    key.write_text("of thirty-two characters or more")
    both = (*TIERS, "--kv-peer-key-file", str(key))
    with ExitStack() as stack:
        prefiller, decoder = started(
            stack,
            lambda: Served("--role", "prefill", "--kv-peer-listen", peer, *both),
            lambda: Served("--role", "decode", "--kv-peer", peer, *both),
        )
        router = Router(folder, "--vllm-pd-disaggregation", "--prefill", prefiller.base, "--decode", decoder.base)
        stack.callback(router.end)
        router.until(200, 60)
        yield router, prefiller, decoder


def body(path, number, sums, **more):
    """A greedy request for 12 tokens, whose prompt no other number has."""
    text = " ".join(f"{number + place} + {place} = {number + 2 * place}." for place in range(sums))
    prompt = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    settings = {"max_tokens": 12, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {"model": "demo", **prompt, **settings, **more}


def answer(client, path, request):
    reply = client.post(path, json=request)
    assert reply.status_code == 200, reply.text
    return reply.json()


def said(client, path, request):
    """(text, tokens, finish reason) of each choice of a whole answer."""
    choices = answer(client, path, request)["choices"]
    texts = [one["text"] if "text" in one else one["message"]["content"] for one in choices]
    return [(text, one["token_ids"], one["finish_reason"]) for text, one in zip(texts, choices, strict=True)]


def streamed(client, path, request):
    """(text, tokens, finish reason) of the one choice of a streamed answer, which has to end with [DONE]."""
    asked = {**request, "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", path, json=asked) as reply:
        *lines, usage, done = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    assert done == "[DONE]" and json.loads(usage)["usage"]["completion_tokens"] == 12
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    text = "".join([one["text"] if "text" in one else one["delta"].get("content") or "" for one in choices])
    ids = [token for one in choices for token in one.get("token_ids") or ()]
    return [(text, ids, choices[-1]["finish_reason"])]


def series(server, name, **labels):
    """The sum of the series of this name with these labels; 0 where there is none."""
    lines = re.findall(rf"^{name}{{(.*)}} (\S+)$", server.get("/metrics"), re.MULTILINE)
    wanted = [f'{label}="{value}"' for label, value in labels.items()]
    return sum(float(value) for text, value in lines if all(one in text for one in wanted))


def reached(server, least, name, **labels):
    """The sum of these series when it is at least this, or after two seconds: the engine's numbers follow an answer."""
    end = time.monotonic() + 2
    while (total := series(server, name, **labels)) < least and time.monotonic() < end:
        time.sleep(0.02)
    return total


CACHED = "vllm:prompt_tokens_cached_total"
LOADED = {"name": "gapless:kv_lower_tier_pages_total", "tier": "peer", "event": "loaded"}
"""The pages that the decoder has loaded from its prefiller"""


@pytest.mark.parametrize("ask", [said, streamed])
@pytest.mark.parametrize("path", PATHS)
def test_a_pair_behind_the_router_gives_the_greedy_tokens_of_one_server(pair, mixed, path, ask):
    router, prefiller, _ = pair
    first = 1_000 * (1 + PATHS.index(path)) + 500 * (ask is streamed)
    requests = [body(path, first + sums, sums) for sums in SUMS]
    expected = [ask(mixed[0].client, path, request) for request in requests]
    given = series(prefiller, "vllm:generation_tokens_total")
    assert [ask(router.client, path, request) for request in requests] == expected
    generated = reached(prefiller, given + len(requests), "vllm:generation_tokens_total")
    assert generated == given + len(requests), "one of each prompt"


def test_the_decoder_loads_the_pages_that_the_prefiller_computed(pair):
    router, _, decoder = pair
    for number in range(3_000, 3_100, 10):
        before = series(decoder, CACHED), series(decoder, **LOADED)
        usage = answer(router.client, PATHS[0], body(PATHS[0], number, LONG))["usage"]
        pages = (usage["prompt_tokens"] - 1) // 16
        # What comes late on a busy machine is computed.
        if reached(decoder, before[0] + 16 * pages, CACHED) == before[0] + 16 * pages:
            assert series(decoder, **LOADED) == before[1] + pages
            return
    raise AssertionError("the decoder was meant to load the pages of one prompt at least")


def test_requests_that_run_at_once_have_the_tokens_of_one_server_each(pair, mixed):
    router, _, decoder = pair
    requests = [(PATHS[place % 2], body(PATHS[place % 2], 4_000 + place, 10 + 5 * place)) for place in range(16)]
    expected = [said(mixed[0].client, *request) for request in requests]
    before = series(decoder, **LOADED)
    with ThreadPoolExecutor(8) as pool:
        got = list(pool.map(lambda request: said(router.client, *request), requests))
    assert got == expected
    assert reached(decoder, before + 1, **LOADED) > before


@pytest.mark.parametrize(
    "more",
    [
        {"prompt": [body(PATHS[0], 5_001, LONG)["prompt"], body(PATHS[0], 5_002, LONG)["prompt"]]},
        {"n": 2},
        {"response_format": {"type": "json_object"}},
        {"guided_choice": ["forty", "forty-two"]},
        {"allowed_token_ids": [5, 6, 7]},
        {"min_tokens": 5, "stop": ["1"], "ignore_eos": False},
        {"kv_transfer_params": {"remote_prefiller": {"kv_request_id": "x", "remote_host": "evil", "remote_port": 1}}},
    ],
)
def test_requests_of_every_kind_give_the_tokens_of_one_server_behind_the_router(pair, mixed, more):
    request = body(PATHS[0], 5_000, LONG, **more)
    assert said(pair[0].client, PATHS[0], request) == said(mixed[0].client, PATHS[0], request)


def test_errors_of_the_prefiller_are_passed_on_as_they_are(pair):
    for request in (body(PATHS[0], 1, 200), body(PATHS[0], 1, 1, model="none"), body(PATHS[0], 1, 1, best_of=2)):
        through, direct = [one.client.post(PATHS[0], json=request) for one in pair[:2]]
        assert through.status_code == direct.status_code >= 400 and through.json() == direct.json()


@pytest.mark.parametrize("policy", ["cache_aware", "consistent_hash", "round_robin"])
def test_two_servers_behind_the_router_give_the_greedy_tokens_of_one(mixed, tmp_path, policy):
    router = Router(tmp_path, "--worker-urls", *[server.base for server in mixed], "--policy", policy)
    first = 6_000 + 10 * len(policy)
    try:
        router.until(200, 60)
        asked = [
            (ask, path, body(path, first + sums, sums)) for ask in (said, streamed) for path in PATHS for sums in SUMS
        ]
        with ThreadPoolExecutor(4) as pool:
            got = list(pool.map(lambda one: one[0](router.client, *one[1:]), asked))
        assert got == [ask(mixed[1].client, *request) for ask, *request in asked]
        before = [series(server, "vllm:prompt_tokens_total") for server in mixed]
        router.client.headers["x-session-id"] = "one"
        for number in range(4):
            said(router.client, PATHS[0], body(PATHS[0], first + 200, LONG + number))
        used = [series(server, "vllm:prompt_tokens_total") > old for server, old in zip(mixed, before, strict=True)]
        assert sum(used) == (2 if policy == "round_robin" else 1), "a session, or a prefix, has one server"
    finally:
        router.end()


def test_the_router_finds_the_server_that_has_a_prefix_by_the_events_of_its_pages(mixed, tmp_path):
    sources = [word for server in mixed for word in ("--kv-event-source", f"{server.base}={server.events}")]
    urls = [server.base for server in mixed]
    router = Router(tmp_path, "--worker-urls", *urls, "--policy", "kv_aware", *sources, "--kv-event-model", "demo")
    right = 0
    try:
        router.until(200, 60)
        for number in range(8):
            path, has = PATHS[number // 2 % 2], mixed[number % 2]
            request = body(path, 8_000 + 100 * number, LONG)
            del request["return_token_ids"]  # with it the router looks for no prefix
            answer(has.client, path, request)
            time.sleep(0.5)  # events come when they come
            before = series(has, "vllm:prefix_cache_hits_total")
            answer(router.client, path, request)
            right += reached(has, before + 256, "vllm:prefix_cache_hits_total") >= before + 256
    finally:
        router.end()
    assert right >= 7


def running(router, tokens=1_000):
    """A stream that has begun, of this many tokens: its thread, and its lines; an error's name is the last one."""
    request, lines, begun = body(PATHS[0], 7_000, LONG, max_tokens=tokens, stream=True), [], threading.Event()

    def read():
        try:
            with httpx.stream("POST", router.base + PATHS[0], json=request, timeout=60) as reply:
                for line in filter(None, reply.iter_lines()):
                    lines.append(line)
                    begun.set()
        except httpx.TransportError as error:
            lines.append(type(error).__name__)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    assert begun.wait(30)
    return thread, lines


def refused(router):
    """The status of a request that cannot be served now."""
    return router.client.post(PATHS[0], json=body(PATHS[0], 7_001, LONG)).status_code


def test_a_prefiller_that_is_killed_ends_no_stream_and_new_requests_are_refused_until_it_is_back(pair, mixed):
    router, prefiller, decoder = pair
    thread, lines = running(router)
    prefiller.kill()
    assert refused(router) in (500, 503), "as long as the router has not seen it, it tries"
    thread.join(60)
    assert lines[-1] == "data: [DONE]"
    router.until(503)
    assert refused(router) == 503
    prefiller.back()
    router.until(200)
    for number in range(7_100, 7_200, 10):
        request, cached = body(PATHS[0], number, LONG), series(decoder, CACHED)
        assert said(router.client, PATHS[0], request) == said(mixed[0].client, PATHS[0], request)
        if reached(decoder, cached + 1, CACHED) > cached:
            return
        time.sleep(0.3)  # the decoder tries it again after a while
    raise AssertionError("the decoder was meant to take pages from the new prefiller")


def test_a_decoder_that_is_killed_ends_its_streams_early_and_is_used_again_when_it_is_back(pair, mixed):
    router, _, decoder = pair
    thread, lines = running(router)
    decoder.kill()
    thread.join(60)
    assert not thread.is_alive() and lines[-1] == "RemoteProtocolError"
    assert refused(router) in (500, 503)
    decoder.back()
    router.until(200)
    request = body(PATHS[0], 7_300, LONG)
    assert said(router.client, PATHS[0], request) == said(mixed[0].client, PATHS[0], request)
