"""Many open streams, whose engine is killed again and again: each ends with the answer that nothing interrupts."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import threading
import time
import urllib.error
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import urlsplit

from kills.clients import Question
from kills.holdings import children, settled, words_of
from kills.pair import SIDES, Pair
from served import Server

from gapless.engine.rank_process import FOLLOWER

FLAGS = ("demo", "--batch-invariant", "--max-num-seqs", "256", "--disable-uvicorn-access-log")
PAIR_FLAGS = (*FLAGS, "--pd", "1p1d", "--kv-tier", "host:128MiB", "--kv-tier", "peer:128MiB")
NO_LIMIT = "from gapless.engine import process_backend; process_backend.CRASH_WINDOW = 0.0; "
"""An engine is started again however often it is killed."""
BACK_SECONDS = 120.0
OPEN_SECONDS = 600.0
"""All streams are open, or those of a kill have ended, within this time, also on a busy machine"""
AGAIN_SECONDS = 1.0, 4.0
"""How long a client waits after a 503 before it asks again, from and to"""
A_SECOND = 50
"""Clients that begin in a second"""
FULL = 0.9
"""Part of the clients whose streams are open at a kill, at least: some are between two"""
BUSY = re.compile(r"^vllm:num_requests_(?:running|waiting){.*} (\S+)$", re.MULTILINE)


class OneDevice(Server):
    """A server with one engine."""

    program = ("-c", f"{NO_LIMIT}import sys; from gapless.cli.main import main; sys.exit(main())")

    flags = FLAGS

    def __init__(self, *flags: str) -> None:
        super().__init__(*(flags or self.flags))

    def engine(self, turn: int) -> int | None:
        """Return the process to kill in this turn, if it is there: the engine's."""
        return next(iter(children(self.process.pid)), None)

    def up(self) -> bool:
        """Return whether an engine is ready."""
        try:
            return bool(self.get("/health")) or True
        except urllib.error.HTTPError:
            return False

    def page(self) -> str:
        return self.get("/metrics")

    def close(self) -> None:
        self.process.kill()
        self.stop()


class RankStreams(OneDevice):
    """A server whose engine has `world` ranks, which are killed in turns."""

    flags = (*FLAGS, "--tensor-parallel-size", "2")

    def __init__(self, world: int = 2, *flags: str) -> None:
        self.world = world
        super().__init__(*flags)

    def engine(self, turn: int) -> int | None:
        leader = super().engine(turn)
        followers = [pid for pid in children(leader) if FOLLOWER in words_of(pid)] if leader else []
        return ([leader, *followers] + [None] * self.world)[turn % self.world]


class BothSides(Pair):
    """A prefiller and a decoder, whose engines are killed in turns."""

    program = (
        "-c",
        f"from gapless.server import pair; pair.SIDE_PROGRAM = {OneDevice.program!r}; {Pair.program[1]}",
    )
    flags = PAIR_FLAGS

    def engine(self, turn: int) -> int | None:
        side = [*SIDES.values()][1 - turn % 2]
        return self.processes().get(f"{side} engine")

    def page(self) -> str:
        return self.sides["decoder"].get("/metrics").text


class Ended(NamedTuple):
    """A stream that the server had begun to answer, and its fault, if there is one."""

    began: float
    ended: float
    fault: str
    pause: float
    """Longest time between two events"""


class OpenStreams:
    """Keeps `count` streams open at the server at `base`, on a thread with an event loop of its own."""

    def __init__(self, base: str, asked: Sequence[Question], count: int, seed: int) -> None:
        self.ended: list[Ended] = []
        self.refused = 0
        self.open: dict[int, float] = {}
        """Start of each client's request that has not ended"""
        self._at, self._asked, self._count, self._seed = urlsplit(base), asked, count, seed
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let the open streams end, and open no more."""
        self._stopping.set()
        self._thread.join(OPEN_SECONDS)
        assert not self._thread.is_alive(), "a stream does not end"

    def since(self, moment: float) -> None:
        """Wait until all streams that were open then have ended."""
        settled(lambda: any(began < moment for began in self.open.values()), False, "old streams", OPEN_SECONDS)

    @property
    def faults(self) -> list[str]:
        return [stream.fault for stream in self.ended if stream.fault]

    async def _run(self) -> None:
        await asyncio.gather(*[self._client(number) for number in range(self._count)])

    async def _client(self, number: int) -> None:
        rng = random.Random(f"{self._seed} {number}")
        await asyncio.sleep(number / A_SECOND)
        while not self._stopping.is_set():
            question = rng.choice(self._asked)
            try:
                reader, writer = await asyncio.open_connection(self._at.hostname, self._at.port)
                writer.write(_asking(question, f"salt {rng.randrange(4)}"))
                taken = await self._read(number, question, reader)
                writer.close()
            except ConnectionError:
                taken = False
            if not taken:
                await asyncio.sleep(rng.uniform(*AGAIN_SECONDS))

    async def _read(self, number: int, question: Question, reader: asyncio.StreamReader) -> bool:
        """Read one answer. Returns False for a 503, after which clients ask again."""
        self.open[number] = began = last = time.monotonic()
        text, reason, fault, pause = "", None, "", 0.0
        try:
            status = await reader.readline()
            if b" 503 " in status:
                self.refused += 1
                del self.open[number]
                return False
            async for line in reader:
                now = time.monotonic()
                pause, last = max(pause, now - last), now
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        fault = str(event)
                    for choice in event.get("choices", ()):
                        text, reason = text + choice["text"], choice["finish_reason"] or reason
            if not fault and (text, reason) != (question.right, question.reason):
                fault = f"an answer is {text!r}, {reason}, and not {question.right!r}; its status was {status!r}"
        except OSError as error:
            fault = repr(error)
        del self.open[number]
        self.ended.append(Ended(began, time.monotonic(), fault, pause))
        return True


def _asking(question: Question, salt: str) -> bytes:
    body = {
        "model": "demo", "prompt": question.prompt, "max_tokens": question.tokens, "temperature": 0,
        "cache_salt": salt, "stream": True,
    }  # fmt: skip
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.0\r\nHost: x\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


class Survived(NamedTuple):
    """What came of the kills of a server's engines."""

    name: str
    kills: int
    streams: int
    open_at_kills: float
    """Streams that the engine had, on average over the kills"""
    refused: int
    """Requests that were answered with 503 while there was no engine"""
    longest: float
    """[s] Longest pause within a stream"""
    ready: list[float]
    """[s] From each kill until another engine is ready"""
    resumed: dict[str, float]
    faults: list[str]

    def __str__(self) -> str:
        resumed = ", ".join(f"{outcome} {count:.0f}" for outcome, count in self.resumed.items())
        return (
            f"| {self.name} | {self.kills} | {self.streams} | {self.open_at_kills:.0f} | {len(self.faults)} "
            f"| {self.refused} | {self.longest:.1f} s | {max(self.ready):.1f} s | {resumed} |"
        )


HEAD = (
    "| engine of | kills | streams | open at a kill | failed | 503 meanwhile | longest pause | ready | resumed |\n"
    "|---|---:|---:|---:|---:|---:|---:|---:|---|"
)


def of_streams(
    name: str, server: OneDevice | BothSides, rounds: int, asked: Sequence[Question], count: int, seed: int
) -> Survived:
    """Kill an engine under `count` open streams, once they are all open and none has met the kill before."""
    rng, open_at_kills, ready = random.Random(seed), list[float](), list[float]()
    streams = OpenStreams(server.base, asked, count, seed)
    try:
        for turn in range(rounds):
            settled(lambda: _open(server) >= FULL * count, True, f"{count} open streams", OPEN_SECONDS)
            time.sleep(rng.uniform(0, 1))
            victim, now_open = server.engine(turn), _open(server)
            assert victim is not None
            began = time.monotonic()
            os.kill(victim, signal.SIGKILL)
            open_at_kills.append(now_open)
            gone = (victim, None)
            settled(lambda turn=turn, gone=gone: server.engine(turn) in gone, False, "another engine", BACK_SECONDS)
            settled(server.up, True, "another engine that is ready", BACK_SECONDS)
            ready.append(time.monotonic() - began)
            streams.since(time.monotonic())
            ended, failed = len(streams.ended), len(streams.faults)
            deaths = [line.strip() for line in server.lines if "the engine died" in line]
            print(f"  kill {turn + 1} of {rounds}: {ended} ended, {failed} failed; {deaths[-2:]}", flush=True)
        streams.stop()
        found = re.findall(r'^gapless:requests_resumed_total{.*outcome="(\w+)"} (\S+)$', server.page(), re.MULTILINE)
    finally:
        server.close()
    longest = max(stream.pause for stream in streams.ended)
    resumed = {outcome: float(number) for outcome, number in found}
    mean = sum(open_at_kills) / rounds
    return Survived(name, rounds, len(streams.ended), mean, streams.refused, longest, ready, resumed, streams.faults)


def _open(server: OneDevice | BothSides) -> float:
    """Return the streams that the engine runs, or that wait there."""
    return sum(map(float, BUSY.findall(server.page())))
