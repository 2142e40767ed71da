"""A scripted OpenAI server in memory, on an event loop whose clock jumps to the next thing to do: times are exact."""

from __future__ import annotations

import asyncio
import json
import selectors
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Deadlock(Exception):
    """Everybody waits, and nothing is going to happen."""


class _Jump(selectors.SelectSelector):
    """Waits for nothing: the time that would be waited is added to the loop's clock."""

    loop: VirtualLoop

    def select(self, timeout: float | None = None) -> list[Any]:
        found = super().select(0)
        if not found:
            if timeout is None:
                raise Deadlock
            self.loop.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self.now = 1000.0
        jump = _Jump()
        jump.loop = self
        super().__init__(jump)

    def time(self) -> float:
        return self.now


def play(main: Any) -> Any:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)


class Request(NamedTuple):
    method: str
    path: str
    headers: dict[str, str]
    body: Any
    at: float


Part = tuple[float, bytes]
"""Seconds after the part before it, and bytes. None instead of bytes closes the connection."""
Script = Callable[[Request], list[tuple[float, bytes | None]]]


def respond(value: Any, status: int = 200) -> bytes:
    body = value if isinstance(value, bytes) else json.dumps(value).encode()
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: Any) -> bytes:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return chunk(b"data: " + data + b"\n\n")


class Model:
    """Answers as an OpenAI server would: the first token after `ttft` seconds, the others every `itl`."""

    def __init__(self, ttft: float = 0.05, itl: float = 0.01, *, usage: bool = True, offset: int = 0) -> None:
        self.ttft, self.itl, self.usage, self.offset = ttft, itl, usage, offset
        self.requests: list[Request] = []
        self.refuses: set[str] = set()
        self.key = ""
        self.routes: dict[str, tuple[int, Any]] = {
            "/v1/models": (200, {"data": [{"id": "m", "max_model_len": 4096}]}),
            "/tokenizer_info": (200, {"vocab_size": 500, "added_tokens_decoder": {"499": {"special": True}}}),
        }

    @property
    def asked(self) -> list[Request]:
        return [r for r in self.requests if r.path in ("/v1/completions", "/v1/chat/completions")]

    def __call__(self, request: Request) -> list[tuple[float, bytes | None]]:
        self.requests.append(request)
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return [(0.0, respond({"error": {"message": "no key"}}, 401))]
        if request.path == "/tokenize" and request.path not in self.routes:
            return [(0.0, respond({"tokens": list(range(len(request.body["prompt"].split())))}))]
        if request not in self.asked:
            status, value = self.routes.get(request.path, (404, {"error": {"message": "no such route"}}))
            return [(0.0, respond(value, status))]
        for name in self.refuses & set(request.body):
            return [(0.0, respond({"error": {"message": f"unknown field {name}"}}, 400))]
        return list(self.stream(request))

    def stream(self, request: Request) -> Iterator[tuple[float, bytes | None]]:
        body, count = request.body, request.body["max_tokens"]
        chat = "messages" in body
        yield 0.0, HEAD
        if chat:
            yield 0.0, event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        for i in range(count):
            finish = "length" if i == count - 1 else None
            said: dict[str, Any] = {"delta": {"content": f"t{i} "}} if chat else {"text": f"t{i} "}
            yield (self.itl if i else self.ttft), event({"choices": [{"index": 0, **said, "finish_reason": finish}]})
        if self.usage and "stream_options" in body:
            usage = {"prompt_tokens": self.length(body) + self.offset, "completion_tokens": count}
            yield 0.0, event({"choices": [], "usage": usage})
        yield 0.0, event(b"[DONE]") + b"0\r\n\r\n"

    @staticmethod
    def length(body: Any) -> int:
        if "messages" in body:
            return sum(len(m["content"].split()) for m in body["messages"])
        return len(body["prompt"].split()) if isinstance(body["prompt"], str) else len(body["prompt"])


class MemoryTransport(asyncio.Transport):
    """The server's end of one connection."""

    def __init__(self, protocol: Any, script: Script) -> None:
        super().__init__()
        self._protocol, self._script = protocol, script
        self._data = b""
        self._closing = False
        self._loop = asyncio.get_running_loop()
        protocol.connection_made(self)

    def write(self, data: Any) -> None:
        self._data += bytes(data)
        request, self._data = parse_request(self._data, self._loop.time())
        if request is None:
            return
        self._play(iter(self._script(request)), self._loop.time())

    def _play(self, parts: Iterator[tuple[float, bytes | None]], at: float) -> None:
        """One part after the other: timers of the same moment have no order."""
        for wait, part in parts:
            self._loop.call_at(at + wait, self._deliver, part, parts, at + wait)
            return

    def _deliver(self, part: bytes | None, parts: Iterator[tuple[float, bytes | None]], at: float) -> None:
        if self._closing:
            return
        if part is None:
            self._closing = True
            self._protocol.connection_lost(None)
        elif part:
            self._protocol.data_received(part)
        self._play(parts, at)

    def is_closing(self) -> bool:
        return self._closing

    def abort(self) -> None:
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._protocol.connection_lost, None)


def parse_request(data: bytes, at: float) -> tuple[Request | None, bytes]:
    head, found, rest = data.partition(b"\r\n\r\n")
    if not found:
        return None, data
    first, *lines = head.decode().split("\r\n")
    method, path, _ = first.split(" ")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    length = int(headers.get("content-length", 0))
    if len(rest) < length:
        return None, data
    body = json.loads(rest[:length]) if length else None
    return Request(method, path, headers, body, at), rest[length:]


class Network:
    """Opens connections to a script, after `delay` seconds; `opened` counts them."""

    def __init__(self, script: Script, delay: float = 0.0) -> None:
        self.script, self.delay, self.opened = script, delay, 0
        self.transports: list[MemoryTransport] = []

    async def __call__(self, factory: Callable[[], Any]) -> Any:
        await asyncio.sleep(self.delay)
        self.opened += 1
        protocol = factory()
        self.transports.append(MemoryTransport(protocol, self.script))
        return protocol


@contextmanager
def serving(script: Script, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """The same script on a real socket of this machine, for commands; yields the base URL."""
    up, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    listener = socket.create_server(("127.0.0.1", 0))

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        data = b""
        try:
            while more := await reader.read(1 << 16):
                request, data = parse_request(data + more, loop.time())
                for wait, part in script(request) if request else ():
                    await asyncio.sleep(wait)
                    if part is None:
                        return
                    writer.write(part)
                    await writer.drain()
        except ConnectionError:
            return
        finally:
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(handle, sock=listener, ssl=tls)
        up.set()
        await stop.wait()
        server.close()

    def run() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(main())
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()

    thread = threading.Thread(target=run, name="scripted server")
    thread.start()
    assert up.wait(10)
    try:
        yield f"http{'s' if tls else ''}://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
