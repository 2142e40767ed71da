"""Sums of ranks that are processes of this host, each with one thread, quiet and beside busy programs; and orders.

A sum is a recorded step with one `add` of float32, replayed in a loop by all ranks: us from its begin to its end, of
rank 0. An order goes through the ring to a reader that waits for it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from gapless.base.share import Share
from gapless.comm.shared import Commons
from gapless.device import CpuDevice
from gapless.engine import checkers

SIZES = (4, 16, 128)
"""KiB of float32"""
ORDER = bytes(2048)


def times(commons: Commons, device: CpuDevice, nbytes: int, rounds: int) -> list[float]:
    """Return us of each sum."""
    y = torch.zeros(nbytes // 4)
    with commons.group.muted():
        graph = device.capture(nbytes, commons.group.add, (y,))
    found = []
    for _ in range(rounds):
        begin = time.perf_counter_ns()
        graph.run_here()
        found.append((time.perf_counter_ns() - begin) / 1000)
    return found


def send_orders(commons: Commons, rounds: int) -> list[float]:
    """Return us from before an order is put until the reader, rank 1, has it."""
    found = []
    for number in range(1, rounds + 1):
        time.sleep(0.002)  # as between two steps: the reader sleeps
        commons.ring.put(time.perf_counter_ns().to_bytes(8, "little") + ORDER)
        while (line := commons.board.line(1)).taken < number:
            time.sleep(0.0002)
        found.append(line.ended / 1000)
    return found


def take_orders(commons: Commons, rounds: int) -> None:
    for number in range(1, rounds + 1):
        while not commons.ring.wait(1.0):
            assert not commons.stopped
        order = commons.ring.take()
        assert order is not None
        commons.board.ended(time.perf_counter_ns() - int.from_bytes(order[:8], "little"))
        commons.board.taken(number)


def work(commons: Commons, rounds: int, tell: Callable[[str, list[float]], None]) -> None:
    """Do what every rank does."""
    device = CpuDevice(threads=1)
    for size in SIZES:
        tell(f"sum of {size} KiB", times(commons, device, size << 10, rounds))
    device.close()
    if commons.share.leads:
        tell("order of 2 KiB", send_orders(commons, rounds // 4))
    elif commons.share.rank == 1:
        take_orders(commons, rounds // 4)


@contextmanager
def busy(programs: int) -> Iterator[None]:
    """Run programs beside that never rest."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(programs)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def measure(world: int, rounds: int, programs: int) -> None:
    """Print a table of the ranks' times beside busy programs."""

    def tell(name: str, found: list[float]) -> None:
        found.sort()
        middle, late = statistics.median(found), found[len(found) * 99 // 100]
        print(f"| {name} | {programs} | {found[0]:.1f} | {middle:.1f} | {late:.1f} |", flush=True)

    commons = Commons.create(world)
    command = [sys.executable, __file__, "--ranks", str(world), "--rounds", str(rounds), "--fd", str(commons.fd)]
    peers = [subprocess.Popen([*command, "--rank", str(rank)], pass_fds=[commons.fd]) for rank in range(1, world)]
    with busy(programs):
        try:
            work(commons, rounds, tell)
        finally:
            commons.group.stop()
            assert not any([peer.wait(60) for peer in peers])
    commons.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--busy", type=int, nargs="*", default=[0, 2], help="busy programs beside")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    checkers.connect()
    if args.rank:
        work(Commons.attach(args.fd, Share(args.rank, args.ranks)), args.rounds, lambda name, found: None)
        return
    print("| work | busy programs beside | least, us | p50, us | p99, us |\n|---|---:|---:|---:|---:|")
    for programs in args.busy:
        measure(args.ranks, args.rounds, programs)


if __name__ == "__main__":
    main()
