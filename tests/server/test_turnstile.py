"""Requests that come together begin a few at a time, in their order."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
from server_harness import error_of, serving
from sharpest import sharpest

from gapless.server.turnstile import LEAST_PER_TURN, MOST_PER_TURN, REQUEST_SECONDS, Turnstile


class Turns:
    """Counts the turns of the event loop. Its clock goes on by `seconds` in each, and where a test lets it."""

    def __init__(self, seconds=0.0):
        self.count = 0
        self.now = 0.0
        self._seconds = seconds
        self._tick()

    def _tick(self):
        self.count += 1
        self.now += self._seconds
        self._next = asyncio.get_running_loop().call_soon(self._tick)

    def stop(self):
        self._next.cancel()


async def begun_in(count, cancelled=(), others=0.0, own=0.0):
    """Return the turn in which each of `count` requests that come together begins, in the order of beginning.

    Others take `others` seconds of each turn, and what begins takes `own`.
    """
    turns, began = Turns(others), {}
    gate = Turnstile(lambda: turns.now)

    async def one(number):
        await gate.enter()
        began[number] = turns.count
        turns.now += own

    tasks = [asyncio.create_task(one(number)) for number in range(count)]
    await asyncio.sleep(0)
    for number in cancelled:
        tasks[number].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    turns.stop()
    return began


async def test_a_few_begin_in_each_turn_in_their_order():
    began = await begun_in(50)
    assert list(began) == list(range(50))
    in_turn = [list(began.values()).count(turn) for turn in sorted(set(began.values()))]
    assert max(in_turn) == LEAST_PER_TURN and len(in_turn) == -(-50 // LEAST_PER_TURN)


@pytest.mark.parametrize("own", [0.0, 20 * REQUEST_SECONDS])
@pytest.mark.parametrize(
    ("fit", "most"), [(0.1, LEAST_PER_TURN), (LEAST_PER_TURN + 2, LEAST_PER_TURN + 2), (100, MOST_PER_TURN)]
)
async def test_more_begin_where_others_take_long(fit, most, own):
    """As many as take the time that others take, but not all of a crowd. Their own time gives them no more."""
    turns = list((await begun_in(200, others=fit * REQUEST_SECONDS * 1.001, own=own)).values())
    assert max(map(turns.count, turns)) == most


async def test_a_cancelled_request_takes_no_place():
    gone = range(10, 30)
    began = await begun_in(50, gone)
    assert list(began) == [number for number in range(50) if number not in gone]
    assert len(set(began.values())) == -(-30 // LEAST_PER_TURN)


async def test_the_turnstile_opens_again_after_a_rest():
    gate = Turnstile()
    for _ in range(3):
        async with asyncio.timeout(5):
            await asyncio.gather(*(gate.enter() for _ in range(LEAST_PER_TURN + 1)))
        await asyncio.sleep(0.01)


COUNT = 30
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5})
TEXT = ("/v1/completions", {"prompt": "hi", "max_tokens": 5})
MANY = ("/v1/completions", {"prompt": ["hi"] * COUNT, "max_tokens": 5})


def all_at_once(state):
    """Let the requests that make text wait until each of them has it."""
    made, all_made, work = [], asyncio.Event(), state.text_work

    async def held(job):
        made.append(await work(job))
        if len(made) == COUNT:
            all_made.set()
        await all_made.wait()
        return made[0]

    state.text_work = held


@pytest.mark.parametrize(("path", "body", "requests"), [(*CHAT, COUNT), (*MANY, 1)], ids=["chats", "prompts"])
def test_prompts_that_are_ready_together_reach_the_engine_a_few_at_a_time(path, body, requests):
    with serving() as server, server.client() as client, ThreadPoolExecutor(COUNT) as pool:
        if requests > 1:
            server.run(lambda: all_at_once(server.state))
        turns, opened = opened_in(server)
        replies = list(pool.map(lambda _: client.post(path, json=body).json()["choices"], range(requests)))
        server.run(turns.stop)
    texts = [choice.get("text") or choice["message"]["content"] for choices in replies for choice in choices]
    assert texts == ["abcde"] * COUNT
    assert len(opened) == COUNT and max(map(opened.count, opened)) <= LEAST_PER_TURN


def opened_in(server):
    """A counter of turns, and a list to which each request adds the turn in which it goes to the engine.

    Turns are short by the turnstile's clock.
    """
    server.state.turnstile = Turnstile(lambda: 0.0)
    turns, opened, submit = server.run(Turns), [], server.llm.backend.submit

    def noted(request, engine=None):
        opened.append(turns.count)
        submit(request, engine)

    server.llm.backend.submit = noted
    return turns, opened


class Waits:
    """Stands in for the turnstile: who comes waits for this many seconds, but the first `free` do not."""

    def __init__(self, seconds, free=0):
        self.seconds = seconds
        self.free = free

    async def enter(self):
        self.free -= 1
        if self.free < 0:
            await asyncio.sleep(self.seconds)


@pytest.mark.parametrize(
    ("path", "body", "free"),
    sharpest([(*CHAT, 1), (*MANY, 1), (*CHAT, 0), (*TEXT, 0), (*MANY, 0)], keep=2),
    ids=["chat-with-text", "many-prompts", "chat", "text", "many"],
)
@pytest.mark.parametrize("stream", sharpest([False, True]))
def test_time_runs_while_a_request_waits_for_its_turn(path, body, free, stream):
    with serving() as server, server.client() as client:
        server.state.turnstile = Waits(60, free)
        reply = client.post(path, json={**body, "stream": stream}, headers={"x-request-timeout": "0.1"})
        assert (reply.status_code, error_of(reply)["code"]) == (408, "timeout")
        assert server.run(lambda: server.state.open) == 0


@pytest.mark.parametrize(("path", "body"), sharpest([CHAT, TEXT]), ids=["chat", "text"])
@pytest.mark.process
def test_the_wait_is_part_of_the_time_in_the_queue(path, body):
    with serving() as server, server.client() as client:
        server.state.turnstile = Waits(0.2)
        assert client.post(path, json=body).status_code == 200
        text = client.get("/metrics").text
    for name in ("request_queue_time", "time_to_first_token", "e2e_request_latency"):
        (found,) = [line for line in text.splitlines() if line.startswith(f"vllm:{name}_seconds_sum")]
        assert float(found.split()[-1]) >= 0.2
