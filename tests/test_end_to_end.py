"""The main job, as a user does it: start the server on the demo model, talk to it with the official client."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from served import START_SECONDS, Server
from vllm_events import AllBlocksCleared, BlockStored, Clients, count, decode, router

CHAT = [{"role": "user", "content": "Mia has 17 pens. She buys 25 more. How many pens does she have?"}]


@pytest.fixture(scope="module")
def events(tmp_path_factory) -> Iterator[Clients | None]:
    """Reads the server's KV events, where the extra for them is installed; one subscriber never reads."""
    if importlib.util.find_spec("zmq") is None:
        yield None
        return
    folder = tmp_path_factory.mktemp("events")
    clients = Clients(f"ipc://{folder}/out", f"ipc://{folder}/again")
    clients.subscriber(most=1)
    yield clients
    clients.close()


@pytest.fixture(scope="module")
def server(findings_of_children: Path, events: Clients | None) -> Iterator[Server]:
    settings = {"enable_kv_cache_events": True, "hwm": 1}
    if events is not None:
        settings |= {"endpoint": events.endpoint, "replay_endpoint": events.again}
    server = Server("--max-num-seqs", "32", *(["--kv-events-config", json.dumps(settings)] if events else []))
    yield server
    assert server.stop() == 0, "".join(server.lines)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.base + "/v1", api_key="none", timeout=120, max_retries=0) as client:
        yield client


def async_client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=server.base + "/v1", api_key="none", timeout=120, max_retries=0)


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("bash")), reason="needs bash and curl")
@pytest.mark.process
def test_the_curl_line_that_it_prints_gets_an_answer(server):
    line = next(line for line in server.lines if line.strip().startswith("curl "))
    answer = subprocess.run(
        ["bash", "-c", line.strip() + " -s"], capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(answer.stdout)["choices"][0]["message"]["content"]


def test_chat_with_and_without_streaming_gives_the_same_text(client):
    whole = client.chat.completions.create(model="demo", messages=CHAT, temperature=0, max_tokens=96)
    chunks = list(
        client.chat.completions.create(
            model="demo", messages=CHAT, temperature=0, max_tokens=96, stream=True,
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage


def test_a_long_chat_arrives_in_several_chunks(client):
    """A busy machine may merge tokens into fewer chunks: those of a short answer into one, of a long one never."""
    stream = client.chat.completions.create(
        model="demo", messages=CHAT, temperature=0, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in stream) > 1


def test_a_streamed_completion_equals_the_whole_one(client):
    prompt = "Question: What is 12 + 30?\nAnswer:"
    whole = client.completions.create(model="demo", prompt=prompt, temperature=0, max_tokens=64)
    parts = client.completions.create(model="demo", prompt=prompt, temperature=0, max_tokens=64, stream=True)
    assert "".join(part.choices[0].text for part in parts) == whole.choices[0].text


async def test_the_async_client_streams_both(server):
    async with async_client(server) as client:
        chat = await client.chat.completions.create(
            model="demo", messages=CHAT, temperature=0, max_tokens=64, stream=True
        )
        assert "".join([chunk.choices[0].delta.content or "" async for chunk in chat])
        text = await client.completions.create(model="demo", prompt="Question:", max_tokens=16, stream=True, seed=1)
        assert "".join([chunk.choices[0].text async for chunk in text])


@pytest.mark.process
async def test_200_requests_at_concurrency_32_all_answer(server):
    gate = asyncio.Semaphore(32)

    async def ask(client: openai.AsyncOpenAI, number: int) -> int:
        async with gate:
            content = f"Tom has {number} apples and buys {number % 7} more. How many?"
            answer = await client.chat.completions.create(
                model="demo", messages=[{"role": "user", "content": content}], max_tokens=24,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            return answer.usage.completion_tokens

    async with async_client(server) as client:
        counts = await asyncio.gather(*(ask(client, number) for number in range(200)))
    assert counts == [24] * 200


async def test_50_disconnects_in_mid_stream_leave_nothing_behind(server):
    async def leave(client: openai.AsyncOpenAI, number: int) -> None:
        stream = await client.chat.completions.create(
            model="demo", messages=CHAT, max_tokens=1500, stream=True, seed=number, temperature=1.0,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        seen = 0
        async for _ in stream:
            seen += 1
            if seen > number % 8:
                break
        await stream.close()

    async with async_client(server) as client:
        await asyncio.gather(*(leave(client, number) for number in range(50)))
    await asyncio.to_thread(wait_for_rest, server)
    total = sum(server.pages(state) for state in ("free", "cached", "owned", "fenced"))
    assert server.pages("free") + server.pages("cached") == total > 0


def wait_for_rest(server: Server) -> None:
    end = time.monotonic() + START_SECONDS
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "gapless:steps_in_flight")
    while any(server.metric(name) for name in names):
        assert time.monotonic() < end, server.get("/metrics")
        time.sleep(0.05)


@pytest.mark.process
def test_a_killed_engine_is_replaced_its_stream_goes_on_and_it_answers_as_before(server, client):
    before = client.chat.completions.create(model="demo", messages=CHAT, temperature=0, max_tokens=48)
    stream = client.chat.completions.create(
        model="demo", messages=CHAT, max_tokens=1900, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    os.kill(engine_pid(server), signal.SIGKILL)
    assert [*stream][-1].choices[0].finish_reason == "length", "the next engine has continued it"
    end = time.monotonic() + START_SECONDS
    while True:
        try:
            server.get("/ready")
            break
        except OSError:
            assert time.monotonic() < end, "".join(server.lines)
            time.sleep(0.1)
    after = client.chat.completions.create(model="demo", messages=CHAT, temperature=0, max_tokens=48)
    assert after.choices[0].message.content == before.choices[0].message.content


@pytest.mark.process
def test_a_router_knows_the_blocks_of_the_engine_that_came_after_the_killed_one(server, events):
    if events is None:
        pytest.skip("needs the extra events")
    deadline = time.monotonic() + START_SECONDS
    while not (found := events.replay(0)) or len(router(found)) != server.pages("cached"):
        assert time.monotonic() < deadline, (len(router(found)), server.pages("cached"))
        time.sleep(0.05)
    assert [int.from_bytes(number, "big") for _, number, _ in found] == [*range(len(found))]
    assert decode(found[0][2]).events[0] == AllBlocksCleared() and count(found, AllBlocksCleared) == 2
    assert count(found, BlockStored) > 200 and server.pages("cached") > 0


def test_the_steps_of_the_engine_are_checked(server, findings_of_children):
    """Those of the child process too; what is found there fails the test that runs."""
    if "STEPS_UNDER_GUARD" not in os.environ:
        pytest.skip("children are not checked with --guard-steps off")
    assert (findings_of_children / f"{engine_pid(server)}.guarded").exists()


def engine_pid(server: Server) -> int:
    pid = server.process.pid
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)
