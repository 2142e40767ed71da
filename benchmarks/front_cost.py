"""Processor time of everything around the step: the server with a core that makes tokens without a model.

    python benchmarks/front_cost.py --streams 1 8 32
    python benchmarks/front_cost.py --streams 256 --pace 13.3 --fronts 1 2

The fake core sleeps so long a step, then gives each stream a token. Processor time is read from the kernel, thread by
thread, over whole runs: `front` is the processes that talk (text, JSON, HTTP) together, `busiest` the share of a core
of the one that works most, `engine` the one that computes, less what the fake core itself takes. `hop` is from the end
of a step in the engine until its token is in the client's hands, and `events` how many tokens an event carried. TTFT
and ITL are what the client sees; all streams begin at once.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import selectors
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, cast

from gapless.base.config import EngineConfig
from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.engine.frontdoor import ModelAssets, open_assets
from gapless.engine.inputs import Resolver
from gapless.lab.environment import describe_host
from gapless.server.config import ServerConfig
from gapless.server.fronts import FURTHER
from gapless.server.run import serve
from gapless.testing.core import FakeCore

PROMPT = list(range(40, 104))
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}


# A client that takes little time: it stamps the bytes that arrive, and parses them afterwards.


class Run(NamedTuple):
    seconds: float
    asked: list[int]
    """When each request was sent (monotonic ns)."""
    pieces: list[list[tuple[int, bytes]]]
    """The reads of each request: when bytes came (monotonic ns), and the bytes."""


def request(path: str, body: dict[str, object]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    return head.encode() + data


def body(kind: str, tokens: int) -> dict[str, object]:
    shared = {"max_tokens": tokens, "ignore_eos": True, "stream": True, "temperature": 0}
    if kind == "chat":
        return {**shared, "messages": [{"role": "user", "content": "What is 12 + 30?"}]}
    return {**shared, "prompt": PROMPT}


def drive(port: int, kind: str, streams: int, tokens: int, waves: int = 1) -> Run:
    """Run `streams` requests of `tokens` tokens at once, to their end; each client sends `waves` of them in a row."""
    wanted = selectors.DefaultSelector()
    asked: list[int] = []
    pieces: list[list[tuple[int, bytes]]] = []
    sent = request(PATHS[kind], body(kind, tokens))

    def ask(connection: socket.socket) -> list[tuple[int, bytes]]:
        asked.append(time.monotonic_ns())
        pieces.append([])
        connection.sendall(sent)
        return pieces[-1]

    sockets = [socket.create_connection(("127.0.0.1", port)) for _ in range(streams)]
    began = time.monotonic()
    current = {connection: ask(connection) for connection in sockets}
    for connection in sockets:
        wanted.register(connection, selectors.EVENT_READ)
    left = dict.fromkeys(sockets, waves)
    while left:
        for key, _ in wanted.select():
            connection = cast(socket.socket, key.fileobj)
            data = connection.recv(1 << 16)
            current[connection].append((time.monotonic_ns(), data))
            if data.endswith(b"\r\n0\r\n\r\n") and left[connection] > 1:
                left[connection] -= 1
                current[connection] = ask(connection)
            elif not data or data.endswith(b"\r\n0\r\n\r\n"):
                wanted.unregister(connection)
                del left[connection]
    for connection in sockets:
        connection.close()
    return Run(time.monotonic() - began, asked, pieces)


def events(run: Run) -> int:
    """Server-sent events with a token in them."""
    return sum(data.count(b'"index":') for pieces in run.pieces for _, data in pieces)


def latencies(runs: list[Run]) -> tuple[str, str]:
    """(TTFT, ITL) in ms, median / p99; events that one read found came at the same time."""
    first, later = [], []
    for run in runs:
        for asked, pieces in zip(run.asked, run.pieces, strict=True):
            times = [at for at, data in pieces for _ in range(data.count(b'"index":'))]
            first.append((times[0] - asked) / 1e6)
            later += [(b - a) / 1e6 for a, b in pairwise(times)]
    return _spread(first), _spread(later)


def _spread(values: list[float]) -> str:
    if len(values) < 2:
        return "".join(f"{value:.1f}" for value in values)
    return f"{statistics.median(values):.1f} / {statistics.quantiles(values, n=100)[98]:.1f}"


def hops(run: Run, committed: list[int]) -> list[float]:
    """Microseconds from the end of each step to the arrival of its event, where every token has one."""
    arrived = [at for at, data in run.pieces[0] for _ in range(data.count(b'"index":'))]
    return [(at - end) / 1e3 for at, end in zip(arrived[-len(committed) :], committed[-len(arrived) :], strict=False)]


# The server, in a process of its own.


class Spent(NamedTuple):
    """Nanoseconds of processor time by thread, and context switches, of one process."""

    threads: dict[str, int]
    switches: int

    def __sub__(self, before: Spent) -> Spent:  # type: ignore[override]
        threads = {name: ns - before.threads.get(name, 0) for name, ns in self.threads.items()}
        return Spent(threads, self.switches - before.switches)

    @property
    def total(self) -> int:
        return sum(self.threads.values())


def joined(parts: list[Spent]) -> Spent:
    """The processor time of several processes, thread by thread."""
    names = {name for part in parts for name in part.threads}
    threads = {name: sum(part.threads.get(name, 0) for part in parts) for name in names}
    return Spent(threads, sum(part.switches for part in parts))


def spent(pid: int) -> Spent:
    threads: dict[str, int] = {}
    switches = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has just ended
            name = (task / "comm").read_text().strip()
            name += " main" if int(task.name) == pid else ""
            threads[name] = threads.get(name, 0) + int((task / "schedstat").read_text().split()[0])
            status = (task / "status").read_text()
            switches += sum(int(line.split()[1]) for line in status.splitlines() if "ctxt_switches" in line)
    return Spent(threads, switches)


@contextlib.contextmanager
def server(step_seconds: float, fronts: int) -> Iterator[tuple[int, list[int], int]]:
    """(port, pids of the fronts, pid of the engine), when it is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", f"{port}:{step_seconds}:{fronts}"], stdout=subprocess.PIPE
    )
    try:
        wait_ready(process)
        further, engines = _children_of(process.pid)
        yield port, [process.pid, *further], engines[0]
    finally:
        process.terminate()
        process.wait(10)


def _children_of(pid: int) -> tuple[list[int], list[int]]:
    """(further fronts, engines)"""
    children = list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    further = [child for child in children if FURTHER in Path(f"/proc/{child}/cmdline").read_text()]
    return further, [child for child in children if child not in further]


def _serve(port: int, seconds: float, fronts: int) -> int:
    vocabulary = open_assets(EngineConfig()).tokenizer.vocab_size
    config = ServerConfig(port=port, api_server_count=fronts, disable_uvicorn_access_log=True, log_level="info")
    return serve(EngineConfig(), config, worker=("gapless.testing.worker", str(vocabulary), str(seconds)))


def wait_ready(process: subprocess.Popen[bytes]) -> None:
    """Wait for the announcement that all fronts take requests."""
    assert process.stdout is not None
    if not any(b" serves " in line for line in iter(process.stdout.readline, b"")):
        raise SystemExit("the server did not come up")


def committed(port: int) -> list[int]:
    """When the latest steps ended, monotonic ns."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.sendall(b"GET /debug/trace?seconds=60 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        data = b"".join(iter(lambda: connection.recv(1 << 20), b""))
    trace = json.loads(data.partition(b"\r\n\r\n")[2])
    place = 16  # of StepRecord.committed_at
    return [event["args"]["record"][place] for event in trace["traceEvents"] if "record" in event.get("args", {})]


# Tables.


class Load(NamedTuple):
    kind: str
    streams: int
    fronts: int


def whole(load: Load, tokens: int, pace: float, rounds: int, waves: int) -> str:
    kind, streams, fronts = load
    step = max(150e-6, streams * pace)
    with server(step, fronts) as (port, talking, engine):
        drive(port, kind, streams, 32)
        before = list(map(spent, (*talking, engine)))
        runs = [drive(port, kind, streams, tokens, waves) for _ in range(rounds)]
        every = [spent(pid) - then for pid, then in zip((*talking, engine), before, strict=True)]
        used = joined(every[:-1]), every[-1]
        late = hops(runs[-1], committed(port)) if streams == waves == 1 and events(runs[-1]) == tokens else []
    total, steps = streams * tokens * rounds * waves, tokens * rounds * waves
    seconds = sum(run.seconds for run in runs)
    core = engine_us(streams)
    hop = f"{statistics.median(late):.0f} / {statistics.quantiles(late, n=100)[98]:.0f}" if late else ""
    cells = [
        *(kind, f"{streams}", f"{fronts}", f"{total / seconds:,.0f}", f"{used[0].total / total / 1e3:.1f}"),
        f"{max(one.total for one in every[:-1]) / seconds / 1e9:.2f}",
        f"{used[0].total / steps / 1e3:.0f}",
        f"{used[1].total / steps / 1e3 - core:.0f}",
        f"{used[0].switches / steps:.1f} + {used[1].switches / steps:.1f}",
        f"{total / sum(map(events, runs)):.2f}",
        *latencies(runs),
        hop,
    ]
    by_thread = [
        f"{where} {name}: {ns / steps / 1e3:.1f}"
        for where, one in zip(("front", "engine"), used, strict=True)
        for name, ns in one.threads.items()
        if ns / steps / 1e3 >= 0.5
    ]
    return f"| {' | '.join(cells)} |\n<!-- us a step by thread: {', '.join(by_thread)} -->"


def _requests(front: ModelAssets, streams: int, tokens: int) -> list[Request]:
    resolver = Resolver(front, FakeCore(front.tokenizer.vocab_size).info)
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    return [resolver.resolve(PROMPT, params).requests[0] for _ in range(streams)]


def engine_us(streams: int) -> float:
    """What the fake core itself takes for a step."""
    front = open_assets(EngineConfig())
    core = FakeCore(front.tokenizer.vocab_size)
    for one in _requests(front, streams, 500):
        core.submit(one)
    core.step()
    begin = time.thread_time_ns()
    for _ in range(400):
        core.step()
    return (time.thread_time_ns() - begin) / 400 / 1e3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--fronts", type=int, nargs="+", default=[1], help="--api-server-count")
    parser.add_argument("--kind", nargs="+", default=["completions"], choices=tuple(PATHS))
    parser.add_argument("--tokens", type=int, default=800, help="a stream; at most 900")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--waves", type=int, default=1, help="requests that each client sends in a row")
    parser.add_argument("--pace", type=float, default=100.0, help="microseconds a token, of all streams together")
    options = parser.parse_args()
    if options.serve:
        port, seconds, fronts = options.serve.split(":")
        return _serve(int(port), float(seconds), int(fronts))
    print(f"{describe_host()['cpu']}, {os.cpu_count()} cores; microseconds of processor time\n")
    print("| api | streams | fronts | tokens/s | front a token | busiest, cores | front a step | engine a step")
    print("| switches a step, front + engine | tokens an event | TTFT ms, median / p99 | ITL ms | hop us |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---|---:|---|---|---|")
    for load in itertools.starmap(Load, itertools.product(options.kind, options.streams, options.fronts)):
        print(whole(load, options.tokens, options.pace * 1e-6, options.rounds, options.waves), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
