"""Requests that come together begin a few at a time, in their order."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from server_harness import serving

from gapless.server.turnstile import LEAST, MOST, REQUEST_SECONDS, SHARE, Turnstile


class Turns:
    """Counts the turns of the event loop."""

    def __init__(self):
        self.count = 0
        self._tick()

    def _tick(self):
        self.count += 1
        self._next = asyncio.get_running_loop().call_soon(self._tick)

    def stop(self):
        self._next.cancel()


async def begun_in(count, cancelled=(), turn_seconds=0.0):
    """The turn in which each of so many that come together begins, by its number, in the order of beginning."""
    turns, began = Turns(), {}
    gate = Turnstile(lambda: turns.count * turn_seconds)

    async def one(number):
        await gate.enter()
        began[number] = turns.count

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
    assert max(in_turn) == LEAST and len(in_turn) == -(-50 // LEAST)


async def test_more_begin_where_turns_are_long():
    """As many as take the share of a turn, but not all of a crowd."""
    ten = 10 * REQUEST_SECONDS / SHARE
    for seconds, most in ((ten, 10), (100 * ten, MOST), (ten / 100, LEAST)):
        turns = list((await begun_in(200, turn_seconds=seconds * 1.001)).values())
        assert max(map(turns.count, turns)) == most


async def test_who_was_cancelled_takes_no_place():
    gone = range(10, 30)
    began = await begun_in(50, gone)
    assert list(began) == [number for number in range(50) if number not in gone]
    assert len(set(began.values())) == -(-30 // LEAST)


async def test_it_opens_again_after_a_rest():
    gate = Turnstile()
    for _ in range(3):
        async with asyncio.timeout(5):
            await asyncio.gather(*(gate.enter() for _ in range(LEAST + 1)))
        await asyncio.sleep(0.01)


def test_requests_that_come_together_are_all_answered():
    body = {"prompt": "hi", "max_tokens": 5}
    with serving() as server, server.client() as client, ThreadPoolExecutor(30) as pool:
        replies = list(pool.map(lambda _: client.post("/v1/completions", json=body), range(30)))
    assert {reply.json()["choices"][0]["text"] for reply in replies} == {"abcde"}
