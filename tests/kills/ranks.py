"""A server of several ranks, one of which is killed: the leader, which is the engine's process, or one that follows."""

from __future__ import annotations

import json
import os
import random
import signal
import time
import urllib.error

from kills.clients import Clients, Outage
from kills.holdings import alive, busy_series, children, settled
from kills.streams import OneDevice
from served import Server

FLAGS = ("demo", "--tensor-parallel-size", "2", "--max-num-seqs", "8", "--max-model-len", "1024")
RANKS = ("rank 1", "rank 0")
"""Ranks to kill, in turns"""
BACK_SECONDS = 120.0
ANSWERS = 8
"""Complete answers before and after each kill"""
MOST_DELAY = 0.3


class Ranked(Server):
    """A server that starts its engine again after a second, however often that dies."""

    program = OneDevice.program

    def __init__(self) -> None:
        super().__init__(*FLAGS)

    def processes(self) -> dict[str, int]:
        found = {"server": self.process.pid}
        for leader in children(self.process.pid):
            found["rank 0"] = leader
            found |= dict(zip(RANKS[:1], children(leader), strict=False))
        return found

    def health(self) -> str:
        """Return what is wrong, or nothing."""
        try:
            self.get("/health")
        except urllib.error.HTTPError as error:
            return str(json.loads(error.read())["error"]["message"])
        return ""

    def rest(self) -> None:
        settled(lambda: busy_series(self.get("/metrics")), [], "the server at rest")

    def close(self) -> None:
        self.process.kill()
        self.stop()


def kill_rank(server: Ranked, clients: Clients, name: str, rng: random.Random) -> tuple[float, str]:
    """Kill a rank while clients ask. Return how many seconds the engine was gone, and what the server said then."""
    clients.wait(ANSWERS)
    time.sleep(rng.uniform(0, MOST_DELAY))
    before = server.processes()
    began = time.monotonic()
    os.kill(before[name], signal.SIGKILL)
    said: list[str] = []
    settled(lambda: said.append(server.health()) or bool(said[-1]), True, f"{name} missed", BACK_SECONDS)
    settled(server.health, "", f"a new engine after {name}", BACK_SECONDS)
    ended = time.monotonic()
    clients.outages.append(Outage(began, ended))
    gone = [pid for rank, pid in before.items() if rank in RANKS]
    settled(lambda: [pid for pid in gone if alive(pid)], [], "processes of the engine that died", BACK_SECONDS)
    clients.wait(ANSWERS)
    return ended - began, said[-1]
