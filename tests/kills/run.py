"""kill -9 in a loop, under load: `make kills ARGS="--rounds 20 --only decoder,redis"`.

Clients ask all the time, half of the answers streamed, and know the right ones. Each round kills one process, waits
until the service is back, and compares what all others hold at rest with what they held before.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from kills.clients import Clients, Question, questions
from kills.holdings import Ward
from kills.pair import PARTS, SIDES, Pair, kill_router, kill_side
from kills.ranks import RANKS, Ranked, kill_rank
from kills.stores import DURABLE, Tiered, found_again, kill_store, start
from kills.streams import HEAD, BothSides, OneDevice, RankStreams, of_streams
from tier_servers import lmcache_server, redis_server

STORES = {"redis": lambda folder: redis_server(folder, *DURABLE), "lmcache": lmcache_server}
STREAMS = {"streams": OneDevice, "pair streams": BothSides, "rank streams": RankStreams}
"""Targets that keep many streams open, and what is killed under them"""
TARGETS = (*SIDES.values(), "router", "ranks", *STORES, *STREAMS)
WARM = 60
"""Answers after which tiers are full"""
MANY, FEW = 1_000_000, 6
"""Salts for each prompt: with MANY, pages are computed; with FEW, they come again"""


class Verdict(NamedTuple):
    """What came of the rounds of one target."""

    target: str
    rounds: int
    answers: int
    failed: int
    longest: float
    """Seconds until the service was back"""
    growth: dict[str, int]
    faults: list[str]
    found: str = "-"
    """Pages that a new server found in the store"""

    def __str__(self) -> str:
        grown = ", ".join(f"{name} {bytes_ / 2**20:+.1f}" for name, bytes_ in sorted(self.growth.items()))
        return (
            f"| {self.target} | {self.rounds} | {self.answers} | {self.failed} | {self.longest:.1f} s "
            f"| {grown or '-'} | {self.found} | {len(self.faults)} |"
        )


def of_side(name: str, rounds: int, asked: Sequence[Question], seed: int) -> Verdict:
    """Kill the server and the engine of a side in turns."""
    rng, ward, pair = random.Random(seed), Ward(), Pair()
    clients = Clients(pair.base, asked, MANY, seed)
    try:
        seconds = _rounds(
            pair, clients, ward, rounds, lambda turn: kill_side(pair, clients, name, PARTS[turn % 2], rng)
        )
        pair.let_go()
    finally:
        pair.close()
    return _verdict(name, clients, ward, seconds)


def of_router(rounds: int, asked: Sequence[Question], seed: int) -> Verdict:
    """Kill the router: nothing survives that could grow."""
    rng, pair = random.Random(seed), Pair()
    clients, seconds = Clients(pair.base, asked, MANY, seed), []
    try:
        for turn in range(rounds):
            with clients.running():
                seconds.append(kill_router(pair, clients, rng))
            pair.rest()
            _say(turn, rounds, seconds[-1], clients)
    finally:
        pair.close()
    return _verdict("router", clients, Ward(), seconds)


def of_ranks(rounds: int, asked: Sequence[Question], seed: int) -> Verdict:
    """Kill a rank that follows and the one that leads in turns."""
    rng, ward, server = random.Random(seed), Ward(), Ranked()
    clients = Clients(server.base, asked, MANY, seed)
    try:
        seconds = _rounds(
            server, clients, ward, rounds, lambda turn: kill_rank(server, clients, RANKS[turn % 2], rng)[0]
        )
    finally:
        server.close()
    return _verdict("ranks", clients, ward, seconds)


def of_store(name: str, rounds: int, asked: Sequence[Question], seed: int) -> Verdict:
    """Kill a store; at the end also the server, which must find again what the store has kept."""
    with tempfile.TemporaryDirectory() as folder:
        store, rng, ward = STORES[name](Path(folder)), random.Random(seed), Ward()
        try:
            start(store)
            server = Tiered(store)
            clients = Clients(server.base, asked, FEW, seed)
            try:
                seconds = _rounds(server, clients, ward, rounds, lambda turn: kill_store(server, clients, rng))
                found = found_again(server, clients)
            finally:
                server.close()
        finally:
            store.kill()
    verdict = _verdict(name, clients, ward, seconds)
    verdict.faults.extend(["no page was found again"] if not found else [])
    return verdict._replace(found=f"{found:.0f}")


def _rounds(
    server: Pair | Tiered | Ranked, clients: Clients, ward: Ward, rounds: int, one: Callable[[int], float]
) -> list[float]:
    """Warm up, and run the rounds. Return the seconds until the service was back."""
    seconds = []
    for turn in range(-1, rounds):
        with clients.running():
            clients.wait(WARM) if turn < 0 else seconds.append(one(turn))
        server.rest()
        ward.note(server.processes())
        if turn >= 0:
            _say(turn, rounds, seconds[-1], clients)
    return seconds


def _say(turn: int, rounds: int, seconds: float, clients: Clients) -> None:
    faults = len(clients.faults())
    print(f"  kill {turn + 1} of {rounds}: back after {seconds:.1f} s, {clients.complete} answers, {faults} faults")
    sys.stdout.flush()


def _verdict(target: str, clients: Clients, ward: Ward, seconds: list[float]) -> Verdict:
    faults = clients.faults() + ward.faults()
    failed = len(clients.failed)
    return Verdict(target, len(seconds), clients.complete, failed, max(seconds), ward.growth(), faults)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="kills of each (default: 10)")
    parser.add_argument("--only", default=",".join(TARGETS), help=f"targets, from {', '.join(TARGETS)} (default: all)")
    parser.add_argument("--open", type=int, default=1000, help="streams that are open at each kill (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, help="seed of kill times and questions (default: 0)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that servers end with it
    targets = args.only.split(",")
    if unknown := {*targets} - {*TARGETS}:
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(TARGETS)}")
    asked, verdicts, begin, survived = questions(), [], time.monotonic(), []
    for target in targets:
        print(f"{target}:", flush=True)
        try:
            if target in STREAMS:
                texts = questions(length=20, least=16)
                survived.append(of_streams(target, STREAMS[target](), args.rounds, texts, args.open, args.seed))
                continue
            if target in STORES:
                verdict = of_store(target, args.rounds, asked, args.seed)
            elif target == "router":
                verdict = of_router(args.rounds, asked, args.seed)
            elif target == "ranks":
                verdict = of_ranks(args.rounds, asked, args.seed)
            else:
                verdict = of_side(target, args.rounds, asked, args.seed)
        except pytest.skip.Exception as reason:
            print(f"  skipped: {reason}", flush=True)
            continue
        except AssertionError as error:
            verdict = Verdict(target, 0, 0, 0, 0.0, {}, [str(error)])
        verdicts.append(verdict)
        print(*(f"  {fault}\n" for fault in verdict.faults[:10]), sep="", flush=True)
    if survived:
        print(HEAD, *survived, sep="\n")
        print(*(f"  {fault[:300]}" for one in survived for fault in one.faults[:10]), sep="\n")
    print("| killed | kills | answers | failed | longest until back | growth, MiB | found again | faults |")
    print("|---|---:|---:|---:|---:|---|---:|---:|", *verdicts, sep="\n")
    print(f"{time.monotonic() - begin:.0f} s")
    return 1 if any(verdict.faults for verdict in [*verdicts, *survived]) else 0


if __name__ == "__main__":
    sys.exit(main())
