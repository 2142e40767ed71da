"""`serve --pd 1p1d` whose processes are killed: the router, its two servers, and the engine of each."""

from __future__ import annotations

import os
import random
import re
import signal
import time

import httpx
from fake_resp import free_port
from kills.clients import Clients, Outage
from kills.holdings import PINNED, alive, busy_series, children, settled, words_of
from served import Server

from gapless.offload.tiers.shelf import UNASKED_SECONDS

FLAGS = (
    *("demo", "--pd", "1p1d", "--enable-prompt-tokens-details", "--batch-invariant", "--max-num-seqs", "8"),
    *(
        "--disable-uvicorn-access-log",
        "--num-gpu-blocks-override",
        "300",
        "--kv-tier",
        "host:32MiB",
        "--kv-tier",
        "peer:32MiB",
    ),
)
"""Device and tiers are so small that a few answers fill them: from then on memory is flat."""
SIDES = {"prefill": "prefiller", "decode": "decoder"}
PARTS = ("", " engine")
"""What is killed of a side, in turns: the server, and the engine that is its child"""
UP = {"prefill": "up", "decode": "up"}
BACK_SECONDS = 60.0
"""Within this time a side that was killed answers again."""
KEPT_SECONDS = UNASKED_SECONDS + 30
"""Within this time a prefiller lets go of what no decoder has taken."""
ANSWERS = 8
"""Complete answers before and after each kill"""
MOST_DELAY = 0.3
"""Seconds from an answer to the kill, at most"""
CLOSED = {"connection": "close"}
"""A look at a server leaves no connection that would count."""


class Pair(Server):
    """The router and its two servers. A side is started again after a second, however often it is killed."""

    program = (
        "-c",
        "import sys; from gapless.server import pair; pair.LAST_PAUSE = 1.0; "
        "from gapless.cli.main import main; sys.exit(main())",
    )

    flags = FLAGS

    def __init__(self, port: int = 0) -> None:
        self.port = port or free_port()
        super().__init__(*self.flags, "--port", str(self.port))
        found = {name: re.search(rf"  {name} \d+ at (\S+)", "".join(self.greeting)) for name in SIDES.values()}
        self.paths = {name: match[1] for name, match in found.items() if match}
        self.sides = {
            name: httpx.Client(transport=httpx.HTTPTransport(uds=path), base_url="http://side", timeout=120)
            for name, path in self.paths.items()
        }
        self.client = httpx.Client(base_url=self.base, timeout=120)

    def processes(self) -> dict[str, int]:
        """Return the processes that run now, by name: those that were killed are not among them."""
        found = {"router": self.process.pid}
        for pid in children(self.process.pid):
            words = words_of(pid)
            name = next((name for role, name in SIDES.items() if role in words), None)
            if name is not None:  # one that was forked has not become a server yet
                found[name] = pid
                found |= {f"{name} engine": child for child in children(pid)}
        return found

    def up(self) -> bool:
        """Return whether the router says that both sides take requests."""
        try:
            return self.client.get("/health", headers=CLOSED).json() == UP
        except httpx.TransportError:
            return False

    def loaded(self) -> float:
        """Return how many of the prefiller's pages the decoder has taken."""
        page = self.sides["decoder"].get("/metrics", headers=CLOSED).text
        found = re.findall(r'^gapless:kv_lower_tier_pages_total{.*event="loaded".*} (\S+)$', page, re.MULTILINE)
        return sum(map(float, found))

    def rest(self) -> None:
        """Wait until no side runs anything, or holds a page for it."""
        for name, side in self.sides.items():
            settled(lambda side=side: busy_series(side.get("/metrics", headers=CLOSED).text), [], f"{name} at rest")

    def let_go(self) -> None:
        """Wait until no side keeps a page for the other one."""
        for name, side in self.sides.items():
            settled(
                lambda side=side: busy_series(side.get("/metrics", headers=CLOSED).text, PINNED),
                [], f"pages that the {name} keeps", KEPT_SECONDS,
            )  # fmt: skip

    def start_again(self) -> None:
        """Begin as new, at the same port."""
        Pair.__init__(self, self.port)

    def close(self) -> None:
        for client in (self.client, *self.sides.values()):
            client.close()
        self.process.kill()
        self.stop()


def kill(pair: Pair, clients: Clients, name: str, rng: random.Random) -> tuple[int, float]:
    """Kill a process while clients ask, at any time after some answers. Return which it was, and when."""
    clients.wait(ANSWERS)
    time.sleep(rng.uniform(0, MOST_DELAY))
    victim, at = pair.processes()[name], time.monotonic()
    os.kill(victim, signal.SIGKILL)
    return victim, at


def kill_side(pair: Pair, clients: Clients, name: str, part: str, rng: random.Random) -> float:
    """Kill a process of a side, and wait until it is back, and pages of the prefiller are taken again. Return how many
    seconds it was gone. Requests may fail meanwhile if it was the decoder's."""
    victim, began = kill(pair, clients, name + part, rng)
    settled(lambda: pair.processes().get(name + part) not in (victim, None), True, f"a new {name}{part}", BACK_SECONDS)
    settled(pair.up, True, f"{name} up", BACK_SECONDS)
    ended = time.monotonic()
    if name == "decoder":
        clients.outages.append(Outage(began, ended))
    clients.wait(ANSWERS)
    before = pair.loaded()
    settled(lambda: pair.loaded() > before, True, "pages of the prefiller are taken again", BACK_SECONDS)
    return ended - began


def kill_router(pair: Pair, clients: Clients, rng: random.Random) -> float:
    """Kill the router, with which its servers end, and start it again. Return the seconds without."""
    every = pair.processes().values()
    _, began = kill(pair, clients, "router", rng)
    pair.close()
    settled(lambda: [pid for pid in every if alive(pid)], [], "processes of a killed router", BACK_SECONDS)
    pair.start_again()
    clients.outages.append(Outage(began, time.monotonic()))
    clients.wait(ANSWERS)
    return clients.outages[-1].ended - began
