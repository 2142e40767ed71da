"""A call to another server of ours: its answer is passed on as it comes, and no faster than it is taken."""

import asyncio
from contextlib import asynccontextmanager

import pytest
from starlette.requests import Request

from gapless.base.http import HttpError
from gapless.server.errors import unavailable
from gapless.server.upstream import called, passed_on, passed_through

HEAD = b"HTTP/1.1 200 OK\r\nSet-Cookie: a\r\nSet-Cookie: b\r\nConnection: close\r\n"


@asynccontextmanager
async def upstream(tmp_path, answer):
    """The path of a server that reads a request's head and then does `answer(writer)`; and what it has heard."""
    heard = []

    async def handle(reader, writer):
        heard.append(await reader.readuntil(b"\r\n\r\n"))
        await answer(writer)
        heard.append(await reader.read())
        writer.close()

    path = str(tmp_path / "s")
    async with await asyncio.start_unix_server(handle, path):
        yield path, heard


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request):
    """Runs a coroutine on the loop of Python's own, or on that of servers."""
    loops = pytest.importorskip(request.param)
    with asyncio.Runner(loop_factory=loops.new_event_loop) as runner:
        yield runner.run


def test_an_answer_is_passed_on_as_it_comes(tmp_path, run):
    run(passed_on_as_it_comes(tmp_path))


async def passed_on_as_it_comes(tmp_path):
    go_on = asyncio.Event()

    async def answer(writer):
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await go_on.wait()
        writer.write(b"3\r\ntwo\r\n0\r\n\r\n")

    async with upstream(tmp_path, answer) as (path, heard):
        async with called(path, "POST", "/v1?a=b", [(b"X-Id", b"7"), (b"TE", b"x"), (b"Host", b"h")]) as call:
            assert call.status == 200
            assert passed_on(call.headers) == [(b"set-cookie", b"a"), (b"set-cookie", b"b")]
            body = call.body()
            assert await anext(body) == b"one"
            go_on.set()
            assert [part async for part in body] == [b"two"]
        assert heard[0].startswith(b"POST /v1?a=b HTTP/1.1\r\nhost: localhost\r\n")
        assert b"x-id: 7\r\n" in heard[0] and b"te: x" not in heard[0]


TARGETS = {
    "plain": ("/v1/models/a:b@c", b"limit=5", b"/v1/models/a:b@c?limit=5"),
    "no query": ("/v1", b"", b"/v1"),
    "reserved": ("/a b?c#d%e", b"", b"/a%20b%3Fc%23d%25e"),
    "no ASCII": ("/\u00e9\u6f22", b"q=%20\xe9+", b"/%C3%A9%E6%BC%A2?q=%20\xe9+"),
    "control characters": ("/a\r\nb", b"", b"/a%0D%0Ab"),
    "two slashes": ("//a", b"", b"//a"),
}


@pytest.mark.parametrize(("path", "query", "expected"), TARGETS.values(), ids=TARGETS)
async def test_a_request_is_passed_on_with_its_path_quoted_and_its_query_as_it_came(tmp_path, path, query, expected):
    async def answer(writer):
        writer.write(HEAD + b"Content-Length: 0\r\n\r\n")

    async def send(message):
        pass

    scope = {"type": "http", "method": "GET", "path": path, "query_string": query, "headers": []}
    async with upstream(tmp_path, answer) as (server, heard):
        await passed_through(server, Request(scope), b"", send, unavailable("", "down"))
    assert heard[0].startswith(b"GET " + expected + b" HTTP/1.1\r\n")


@pytest.mark.parametrize("wire", [b"", b"HTTP/1.1 200", HEAD + b"Content-Length: 9\r\n\r\nfour", b"SSH-2.0\r\n\r\n"])
async def test_an_answer_that_is_none_or_breaks_off_is_an_error(tmp_path, wire):
    async def answer(writer):
        writer.write(wire)
        writer.write_eof()

    with pytest.raises(HttpError, match=r"broke off|does not speak HTTP"):
        async with upstream(tmp_path, answer) as (path, _), called(path, "GET", "/") as call:
            [part async for part in call.body()]


async def test_a_server_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(HttpError, match="no server answers at"):
        async with called(str(tmp_path / "none"), "GET", "/"):
            pass


async def test_leaving_the_call_hangs_up(tmp_path):
    left = asyncio.Event()

    async def answer(writer):
        writer.write(HEAD + b"\r\nx")
        with pytest.raises(ConnectionError):
            while True:
                writer.write(b"x" * 1000)
                await writer.drain()
                await asyncio.sleep(0)
        left.set()

    async with upstream(tmp_path, answer) as (path, _):
        async with called(path, "GET", "/") as call:
            assert (await anext(call.body())).startswith(b"x")
        await asyncio.wait_for(left.wait(), 10)


def test_an_answer_that_is_not_taken_makes_its_server_wait(tmp_path, run):
    run(makes_its_server_wait(tmp_path))


async def makes_its_server_wait(tmp_path):
    written, most = 0, 256 << 20

    async def answer(writer):
        nonlocal written
        writer.write(HEAD + b"Content-Length: %d\r\n\r\n" % most)
        while written < most:
            writer.write(bytes(1 << 20))
            written += 1 << 20
            await writer.drain()

    async with upstream(tmp_path, answer) as (path, _), called(path, "GET", "/") as call:
        before = -1
        while written > before:  # until it waits
            before = written
            await asyncio.sleep(0.05)
        assert 0 < written < most / 4
        assert sum([len(part) async for part in call.body()]) == most
