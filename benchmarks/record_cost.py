"""What recording costs: `python benchmarks/record_cost.py` prints the table of docs/measuring.md.

A step leaves one record with ten moments, the events. `record` is what the loop's thread spends on them in steady
decode: `launched` writes the launch half of the step's row; `committed` reads three fences and the clock, and writes
the other half; the clock is read six times more. `account` is the timeline's part, done for 64 steps at once. A
watched engine also packs its records (`send`), and the front unpacks them (`receive`); while it is not watched, a turn
pays for one look at a flag.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

from gapless.engine import checkers, messages
from gapless.engine.driver import EngineDriver
from gapless.engine.ports import QueuePort
from gapless.loop.loop import Loop
from gapless.loop.timeline import Timeline
from gapless.testing.core import FakeCore

sys.path.insert(0, str(Path(__file__).parent))
from host_step import steady_loop

EVENTS = 10
"""Planning, planned, packed, launched, started, ended, home, observing, observed, committed."""
CLOCKS = 6
"""Moments that are taken outside of `launched` and `committed`."""


def each_us(work: Callable[[], object], times: int) -> float:
    """Mean microseconds of one call, the best of five tries: what disturbs a try only adds."""
    tries = []
    for _ in range(5):
        begin = time.perf_counter_ns()
        for _ in range(times):
            work()
        tries.append((time.perf_counter_ns() - begin) / times / 1e3)
    return min(tries)


def record_us(loop: Loop, steps: int) -> float:
    """Median microseconds of `launched` and `committed` together, in the loop as it runs."""
    spent: dict[str, list[int]] = {"launched": [], "committed": []}

    def measured(name: str) -> Callable[..., object]:
        inner, times = getattr(loop.log, name), spent[name]

        def measure(*args: object) -> object:
            begin = time.perf_counter_ns()
            found = inner(*args)
            times.append(time.perf_counter_ns() - begin)
            return found

        return measure

    for name in spent:
        setattr(loop.log, name, measured(name))
    for _ in range(steps):
        loop.turn()
    for name in spent:
        delattr(loop.log, name)
    return sum(statistics.median(times) for times in spent.values()) / 1e3


def measure(rows: int, steps: int) -> tuple[float, ...]:
    device, loop = steady_loop(rows, 0, 2 * steps, 2, True)
    recorded = record_us(loop, steps)
    batch, timeline = loop.records.after(0)[-64:], Timeline()
    driver = EngineDriver(FakeCore(), QueuePort(asyncio.new_event_loop(), print))
    packed = messages.pack_steps(batch)
    account = each_us(lambda: timeline.add(batch.rows), 100) / len(batch)
    a_step = recorded + CLOCKS * each_us(device.clock, 10_000) + account
    unseen = each_us(driver.show, 10_000)
    send = each_us(lambda: messages.pack_steps(batch), 100) / len(batch)
    receive = each_us(lambda: messages.unpack_steps(packed), 100) / len(batch)
    device.close()
    return a_step, account, a_step / EVENTS, unseen, send, receive


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=3000)
    args = parser.parse_args()
    checkers.connect()
    print("Microseconds; a step, an event, or a turn.\n")
    print(
        "| rows | record, a step | of this: account | an event | unwatched, a turn | send, a step | receive, a step |"
    )
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for rows in (1, 32, 256):
        print(f"| {rows} | " + " | ".join(f"{us:.2f}" for us in measure(rows, args.steps)) + " |", flush=True)


if __name__ == "__main__":
    main()
