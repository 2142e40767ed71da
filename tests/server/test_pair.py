"""`serve --pd 1p1d`: a pair of servers answers as one, with the prefiller and without it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest
from served import Server

from gapless.server.pair import FOLDER, own_folder

pytestmark = pytest.mark.xdist_group("pair")  # they are killed at the end

FLAGS = (
    *("demo", "--pd", "1p1d", "--enable-prompt-tokens-details", "--batch-invariant", "--max-num-seqs", "8"),
    *("--kv-tier", "host:256MiB", "--kv-tier", "peer:256MiB"),
)


class Pair(Server):
    """The router and its two servers."""

    def __init__(self) -> None:
        super().__init__(*FLAGS)
        text = "".join(self.greeting)
        found = {name: re.search(rf"  {name} (\d+) at (\S+)", text) for name in ("prefiller", "decoder")}
        self.paths = {name: match[2] for name, match in found.items() if match}
        self.pids = {name: int(match[1]) for name, match in found.items() if match}
        self.sides = {
            name: httpx.Client(transport=httpx.HTTPTransport(uds=match[2]), base_url="http://side", timeout=120)
            for name, match in found.items()
            if match
        }
        self.client = httpx.Client(base_url=self.base, timeout=120)

    def kill(self, name: str) -> None:
        os.kill(self.pids[name], signal.SIGKILL)


@pytest.fixture(scope="module")
def pair():
    one = Pair()
    yield one
    one.client.close()
    for side in one.sides.values():
        side.close()
    one.process.kill()
    one.stop()


def body(number, **more):
    """A prompt of some hundred tokens."""
    text = " ".join(f"{number + place} + {place} = {number + 2 * place}." for place in range(40))
    return {"model": "demo", "prompt": text, "max_tokens": 12, "temperature": 0, **more}


def answer(client, request):
    reply = client.post("/v1/completions", json=request)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_answer_is_that_of_one_server_and_its_prompt_was_not_computed_twice(pair):
    taken = 0
    for number in (0, 1, 2, 20, 21, 22, 23, 24):
        request = body(number)
        got = answer(pair.client, request)
        usage = got["usage"]
        assert usage["prompt_tokens"] > 300
        alone = answer(pair.sides["prefiller"], request)
        assert got["choices"][0]["text"] == alone["choices"][0]["text"]
        # What comes late on a busy machine is computed.
        taken += usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 16
        if taken == 2:
            break
    assert taken
    page = pair.sides["decoder"].get("/metrics").text
    loaded = re.search(
        r'^gapless:kv_lower_tier_pages_total{.*event="loaded".*tier="peer".*} (\S+)$', page, re.MULTILINE
    )
    assert loaded and float(loaded[1]) >= taken * 300 // 16


def test_a_stream_passes_through_with_its_end(pair):
    request = body(10, stream=True, stream_options={"include_usage": True})
    with pair.client.stream("POST", "/v1/completions", json=request) as reply:
        *parts, usage, done = [line.removeprefix("data: ") for line in reply.iter_lines() if line]
    texts = [choice["text"] for part in parts for choice in json.loads(part)["choices"]]
    assert done == "[DONE]" and json.loads(usage)["usage"]["completion_tokens"] == 12
    assert "".join(texts) == answer(pair.client, body(10))["choices"][0]["text"]


def test_chats_and_several_prompts_are_served_too(pair):
    messages = [{"role": "user", "content": body(20)["prompt"]}]
    chat = {"model": "demo", "messages": messages, "max_tokens": 4, "temperature": 0, "max_completion_tokens": 4}
    reply = pair.client.post("/v1/chat/completions", json=chat)
    assert reply.status_code == 200 and reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 200
    several = body(21, max_tokens=2) | {"prompt": [body(21)["prompt"], body(22)["prompt"]]}
    choices = answer(pair.client, several)["choices"]
    assert len(choices) == 2
    alone = answer(pair.sides["prefiller"], several | {"kv_transfer_params": {"do_remote_decode": True}})
    assert alone["choices"] == choices and "kv_transfer_params" not in alone, "a name is one prompt's"


def test_what_a_client_says_about_peers_is_replaced(pair):
    elsewhere = {"remote_prefiller": {"kv_request_id": "x", "remote_host": "evil", "remote_port": 1}}
    assert answer(pair.client, body(30, kv_transfer_params=elsewhere))
    refused = pair.sides["decoder"].post("/v1/completions", json=body(31, kv_transfer_params=elsewhere))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "kv_transfer_params"


def test_errors_are_the_decoders_and_operators_have_no_way_in(pair):
    assert pair.client.post("/v1/completions", json=body(1) | {"temperature": "hot"}).status_code == 400
    wrong = pair.client.post("/v1/completions", content=b"{" * 400, headers={"content-type": "application/json"})
    assert wrong.status_code == 400
    assert pair.client.get("/v1/models").json()["data"][0]["id"] == "demo"
    for path in (
        "/server_info",
        "/debug/steps",
        "/ui",
        "/v1/load_lora_adapter",
        "/update_weights_from_disk",
        "/v1/modelsx",
    ):
        assert pair.client.get(path).status_code == 404
    assert pair.client.get("/health").json() == {"prefill": "up", "decode": "up"}


def test_the_prefiller_killed_under_load_costs_no_token(pair):
    requests = [body(100 + number) for number in range(12)]
    got = {}

    def ask(number):
        with httpx.Client(base_url=pair.base, timeout=120) as client:
            got[number] = answer(client, requests[number])["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(requests))]
    for number, thread in enumerate(threads):
        thread.start()
        if number == 5:
            time.sleep(0.1)
            pair.kill("prefiller")
    for thread in threads:
        thread.join()
    for number, request in enumerate(requests):
        assert got[number] == answer(pair.sides["decoder"], request)["choices"][0]["text"]
    assert answer(pair.client, body(200)), "whether there is a prefiller by now or not"


def both_up(pair, seconds=60):
    end = time.monotonic() + seconds
    while pair.client.get("/health").json() != {"prefill": "up", "decode": "up"}:
        assert time.monotonic() < end, "a side that was killed was meant to come back"
        time.sleep(0.1)


def test_the_prefiller_comes_back_and_gives_pages_again(pair):
    both_up(pair)
    for number in range(300, 320):
        usage = answer(pair.client, body(number))["usage"]
        if usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 16:
            return
        time.sleep(0.2)  # the decoder tries it again after a while
    raise AssertionError("the decoder was meant to take pages from the new prefiller")


def insist(base, request):
    """Ask until there is an answer."""
    with httpx.Client(base_url=base, timeout=120) as client:
        while True:
            try:
                reply = client.post("/v1/completions", json=request)
                if reply.status_code == 200:
                    return reply.json()["choices"][0]["text"]
                assert reply.status_code == 503, reply.text  # it is gone, or loads again
            except httpx.TransportError:
                pass
            time.sleep(0.1)


class Giver:
    """What the prefiller holds for its peer: memory, in bytes, and connections."""

    def __init__(self, pair):
        sides = subprocess.check_output(["pgrep", "-P", str(pair.process.pid)], text=True).split()
        (front,) = [pid for pid in sides if "prefill" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")]
        (self.pid,) = subprocess.check_output(["pgrep", "-P", front], text=True).split()  # its engine keeps the pages
        self._path = str(Path(pair.paths["prefiller"]).with_name("kv.sock"))

    def memory(self):
        return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def connections(self):
        return sum(line.endswith(self._path) for line in Path("/proc/net/unix").read_text().splitlines())


def test_the_decoder_killed_under_load_loses_nothing_for_good_and_the_prefiller_keeps_nothing_for_it(pair):
    requests = [body(400 + number, max_tokens=48) for number in range(12)]
    expected = [answer(pair.sides["prefiller"], request)["choices"][0]["text"] for request in requests]
    giver, got = Giver(pair), {}
    memory, connections = giver.memory(), giver.connections()
    threads = [
        threading.Thread(
            target=lambda number=number: got.update({number: insist(pair.base, requests[number])}), daemon=True
        )
        for number in range(len(requests))
    ]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    pair.kill("decoder")
    time.sleep(0.2)
    reply = pair.client.post("/v1/completions", json=body(1))
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "decoder_down"
    assert pair.client.get("/health").status_code == 503
    assert any("decoder has ended" in line for line in pair.lines)
    for thread in threads:
        thread.join(120)
    assert [got.get(number) for number in range(len(requests))] == expected
    both_up(pair)
    end = time.monotonic() + 20
    while giver.connections() != connections:
        assert time.monotonic() < end, "connections of the one that was killed are kept"
        time.sleep(0.05)
    assert giver.memory() - memory < 16 << 20
    page = pair.sides["prefiller"].get("/metrics").text
    owned = re.search(r'^gapless:kv_pages{.*state="owned".*} (\S+)$', page, re.MULTILINE)
    assert owned and float(owned[1]) == 0


def test_all_ends_with_a_router_that_is_killed_and_the_next_one_removes_its_folder(pair):
    folder = Path(pair.paths["decoder"]).parent
    sides = [int(pid) for pid in subprocess.check_output(["pgrep", "-P", str(pair.process.pid)]).split()]
    assert len(sides) == 2 and folder.name.startswith(FOLDER)
    pair.process.kill()
    pair.process.wait()
    end = time.monotonic() + 30
    while any(Path(f"/proc/{pid}/cmdline").exists() and not zombie(pid) for pid in sides):
        assert time.monotonic() < end, "children were meant to end with their router"
        time.sleep(0.05)
    assert folder.is_dir(), "a killed router removes nothing"
    os.utime(folder, (0, 0))
    with own_folder() as own, own_folder() as other:
        assert not folder.exists() and own.is_dir() and other.is_dir()
        os.utime(own, (0, 0))
        with own_folder():
            assert own.is_dir(), "one in use stays"


def zombie(pid):
    return "(zombie)" in Path(f"/proc/{pid}/status").read_text()
