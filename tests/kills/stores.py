"""`serve --kv-tier redis://...` and `lmcache://...` whose store is killed and started again."""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import time
from itertools import product
from urllib.parse import urlsplit

import httpx
from kills.clients import Clients, ask
from kills.holdings import PINNED, alive, busy_series, children, settled
from kills.pair import ANSWERS, BACK_SECONDS, MOST_DELAY
from served import Server
from tier_rig import setup_of
from tier_servers import Server as Store

FLAGS = (
    *("demo", "--batch-invariant", "--max-num-seqs", "8", "--enable-prompt-tokens-details"),
    *("--num-gpu-blocks-override", "400", "--kv-tier", "host:4MiB"),
)
"""Device and host keep less than clients ask for, so that pages come from the store."""
DURABLE = ("--appendonly", "yes", "--appendfsync", "always")
"""With these, what Redis has answered with OK is on its disk."""


class Tiered(Server):
    """A server whose pages are kept by a store that may die; it runs when this one is started."""

    def __init__(self, store: Store) -> None:
        self.store = store
        super().__init__(*FLAGS, "--kv-tier", store.url)

    def processes(self) -> dict[str, int]:
        return {"server": self.process.pid, "engine": children(self.process.pid)[0]}

    def counted(self, event: str) -> float:
        """Return the engine's count of pages of the tier below with this event."""
        series = rf'^gapless:kv_lower_tier_pages_total{{.*event="{event}".*}} (\S+)$'
        return sum(map(float, re.findall(series, self.get("/metrics"), re.MULTILINE)))

    def rest(self) -> None:
        settled(lambda: busy_series(self.get("/metrics"), PINNED), [], "the server at rest")

    def close(self) -> None:
        self.process.kill()
        self.stop()


def start(store: Store) -> None:
    """Start a store, or start it again, and wait until it answers."""
    store.start(setup_of(store.url)).close()


def kill_store(server: Tiered, clients: Clients, rng: random.Random) -> float:
    """Kill the store while clients ask, and start it again. Return how long it took until pages came from it again.

    What Redis had acknowledged is there again; LMCache keeps pages in memory alone.
    """
    clients.wait(ANSWERS)
    time.sleep(rng.uniform(0, MOST_DELAY))
    engine = server.processes()["engine"]
    os.kill(engine, signal.SIGSTOP)  # so that what has been acknowledged to it is what the store has now, and no more
    try:
        kept = keys_of(server.store)
        server.store.kill()
    finally:
        os.kill(engine, signal.SIGCONT)
    clients.wait(ANSWERS)
    start(server.store)
    began = time.monotonic()
    lost = kept - keys_of(server.store)
    assert not lost, f"{len(lost)} of {len(kept)} pages that were acknowledged are lost"
    before = server.counted("stored"), server.counted("loaded")
    settled(
        lambda: server.counted("stored") > before[0] and server.counted("loaded") > before[1],
        True, "pages go to the store and come from it again", BACK_SECONDS,
    )  # fmt: skip
    return time.monotonic() - began


def found_again(server: Tiered, clients: Clients) -> float:
    """Kill the server, start it again, and ask all questions. Return how many pages the store had kept for it.

    The new one's device and host have none, so that what is not computed comes from the store.
    """
    every = server.processes().values()
    server.close()
    settled(lambda: [pid for pid in every if alive(pid)], [], "processes of a killed server", BACK_SECONDS)
    new = Tiered(server.store)
    try:
        with httpx.Client(base_url=new.base, timeout=60) as client:
            for question, salt in product(clients.asked, range(clients.salts)):
                clients.replies.append(ask(client, question, f"salt {salt}", streamed=False))
        return new.counted("loaded")
    finally:
        new.close()


def keys_of(store: Store) -> frozenset[bytes]:
    """Return the pages that a Redis server has; of other stores none, as they do not say."""
    parts = urlsplit(store.url)
    if parts.scheme != "redis":
        return frozenset()
    with socket.create_connection((parts.hostname, parts.port), 10) as raw, raw.makefile("rb") as answers:
        raw.sendall(b"SELECT %s\r\nKEYS gapless:kv:*\r\n" % parts.path.strip("/").encode())
        assert answers.readline() == b"+OK\r\n"
        lengths = range(int(answers.readline()[1:]))
        return frozenset(answers.read(int(answers.readline()[1:]) + 2) for _ in lengths)
