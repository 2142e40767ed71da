"""`serve --pd 1p1d`: a pair of servers answers as one, with the prefiller and without it."""

import asyncio
import json
import os
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from kills.clients import Clients, Outage, questions
from kills.holdings import Ward, alive, settled
from kills.pair import ANSWERS, Pair, kill, kill_side

from gapless.base.config import EngineConfig
from gapless.server.folders import FOLDER_PREFIX, own_folder
from gapless.server.pair import devices_of, seen_devices

pytestmark = [pytest.mark.process, pytest.mark.xdist_group("pair")]  # they are killed at the end


@pytest.fixture(scope="module")
def pair():
    one = Pair()
    yield one
    one.close()


def body(number, **more):
    """A prompt of some hundred tokens."""
    text = " ".join(f"{number + place} + {place} = {number + 2 * place}." for place in range(40))
    return {"model": "demo", "prompt": text, "max_tokens": 12, "temperature": 0, **more}


def answer(client, request):
    reply = client.post("/v1/completions", json=request)
    assert reply.status_code == 200, reply.text
    return reply.json()


@pytest.mark.parametrize(
    ("options", "env", "seen", "prefiller", "decoder"),
    [
        ({}, {}, 0, "", ""),
        ({}, {}, 1, "", ""),
        ({}, {}, 2, "", "1"),
        ({"device_ids": "1"}, {}, 2, "", ""),
        ({"tensor_parallel_size": 2}, {}, 0, "", ""),
        ({"tensor_parallel_size": 2}, {}, 2, "", "2,3"),
        ({}, {"CUDA_VISIBLE_DEVICES": "5,3"}, 2, "CUDA_VISIBLE_DEVICES=5", "CUDA_VISIBLE_DEVICES=3"),
        ({}, {"CUDA_VISIBLE_DEVICES": "5"}, 1, "", ""),
    ],
)
def test_each_side_gets_devices_of_its_own_if_there_are_enough(options, env, seen, prefiller, decoder):
    for side, wanted in enumerate((prefiller, decoder)):
        flags, own = devices_of(side, EngineConfig(**options), env, seen)
        assert (*flags[1:], *(f"{name}={value}" for name, value in own.items())) == ((wanted,) if wanted else ())


def test_devices_are_counted_by_another_process():
    assert asyncio.run(seen_devices()) == torch.accelerator.device_count()


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


def test_peers_named_by_a_client_are_replaced(pair):
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


@pytest.fixture(scope="module")
def clients(pair):
    return Clients(pair.base, questions(8), salts=1_000_000, count=3, pause=0.2)


def test_a_side_killed_under_load_costs_no_answered_token_and_leaves_nothing_behind(pair, clients):
    rng, ward = random.Random(0), Ward()
    with clients.running():
        clients.wait(30)
    # The decoder computes prompts only when there is no prefiller: what that needs is no leak.
    with ThreadPoolExecutor(3) as several:
        list(several.map(lambda number: answer(pair.sides["decoder"], body(number)), range(1000, 3400, 100)))
    for name in ("", "prefiller", "decoder"):
        if name:
            with clients.running():
                kill_side(pair, clients, name, "", rng)
                clients.wait(30)  # a new process has grown to its size by then, as the first ones had
            assert any(f"the {name} has ended" in line for line in pair.lines)
            assert name == "decoder" or not clients.failed, "the decoder computes what the prefiller does not"
        pair.rest()
        ward.note(pair.processes())
    assert not clients.faults() and not ward.faults()
    assert any("decoder_down" in reply.trouble for reply in clients.failed)


def test_all_ends_with_a_router_that_is_killed_under_load_and_the_next_one_removes_its_folder(pair, clients):
    folder, rng, failed = Path(pair.paths["decoder"]).parent, random.Random(1), len(clients.failed)
    every = [*pair.processes().values()]
    assert len(every) == 5 and folder.name.startswith(FOLDER_PREFIX)
    with clients.running():
        kill(pair, clients, "prefiller engine", rng)
        clients.wait(ANSWERS)
        assert len(clients.failed) == failed, "the decoder goes on"
        _, began = kill(pair, clients, "decoder engine", rng)
        settled(lambda: pair.client.get("/health").status_code, 503, "health without a decoder")
        every += pair.processes().values()
        pair.process.kill()
        pair.process.wait()
        settled(lambda: [pid for pid in every if alive(pid)], [], "children of the router that has gone")
    clients.outages.append(Outage(began, time.monotonic()))
    assert not clients.faults()
    assert folder.is_dir(), "a killed router removes nothing"
    os.utime(folder, (0, 0))
    with own_folder() as own, own_folder() as other:
        assert not folder.exists() and own.is_dir() and other.is_dir()
        os.utime(own, (0, 0))
        with own_folder():
            assert own.is_dir(), "one in use stays"
