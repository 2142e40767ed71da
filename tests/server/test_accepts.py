"""Connections that come together are accepted in a few turns of the event loop."""

import asyncio
import socket

import pytest

from gapless.server import run
from gapless.server.run import ACCEPTS, descriptors

uvloop = pytest.importorskip("uvloop", reason="uvloop is not there on Windows")
CONNECTIONS = 96


async def turns_for(listeners: list[socket.socket]) -> int:
    """Turns of the event loop until all connections that wait have been accepted."""
    loop, accepted, turns = asyncio.get_running_loop(), 0, 0

    class Counting(asyncio.Protocol):
        def connection_made(self, transport):
            nonlocal accepted
            accepted += 1

    clients = [socket.create_connection(listeners[0].getsockname()) for _ in range(CONNECTIONS)]
    servers = [await loop.create_server(Counting, sock=one) for one in listeners]
    while accepted < CONNECTIONS and turns < 100 * CONNECTIONS:
        turns += 1
        await asyncio.sleep(0)
    for open_one in (*servers, *clients):
        open_one.close()
    assert accepted == CONNECTIONS
    return turns


def test_a_turn_accepts_many_connections():
    with socket.socket() as listener, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        listener.bind(("127.0.0.1", 0))
        listener.listen(2 * CONNECTIONS)
        listeners = descriptors(listener)
        assert len(listeners) == ACCEPTS
        assert runner.run(turns_for(listeners)) <= 2 * CONNECTIONS / ACCEPTS


def test_a_loop_that_accepts_all_gets_one_descriptor(monkeypatch):
    monkeypatch.setattr(run, "loop_factory", lambda: None)
    with socket.socket() as listener:
        assert descriptors(listener) == [listener]
