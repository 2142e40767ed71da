"""Graphs on the CPU: what an operator costs, and how much of the stream's work is hidden behind the host's.

`python benchmarks/cpu_graph.py` prints two tables. All arms of a table take turns in one process; the
shortest time of each counts, which a busy machine disturbs least.

Cost: microseconds an operator, of programs of 100 small operators, run by torch eagerly, replayed from Python, and
replayed natively.

Overlap: the stream runs steps (upload, about 100 operators, fence) while the host runs pure Python for about as long.
overlap = (stream alone + host alone - both at once) / the shorter of the two: 1 is perfect, 0 is one after the other.
One torch thread, so two idle cores are needed for figures that mean something.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn.functional import linear, rms_norm

from gapless.device import CpuDevice
from gapless.device.record import record
from gapless.engine import checkers

STEPS = 8
LAYERS = 8


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def in_turns(arms: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Least seconds of each arm."""
    spent: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, work in arms.items():
            spent[name].append(seconds(work))
    return {name: min(times) for name, times in spent.items()}


# What an operator costs.

SMALL = torch.zeros(1, 64)
WEIGHT = torch.randn(64, 64) / 8


def in_place() -> None:
    for _ in range(100):
        SMALL.add_(1)


def views_of_what_is_made() -> None:
    x = SMALL + 0
    for _ in range(50):
        x = x.view(64, 1).view(1, 64)


def views_of_what_was_there() -> None:
    for _ in range(50):
        SMALL.view(64, 1).transpose(0, 1)


def products() -> None:
    x = SMALL
    for _ in range(100):
        x = linear(x, WEIGHT)


def parts() -> None:
    for _ in range(50):
        torch.cat(SMALL.split(32, -1), -1)


def costs(device: CpuDevice, rounds: int) -> None:
    print("| 100 small operators | eager us | replayed from Python us | replayed natively us | operators left |")
    print("|:---|---:|---:|---:|---:|")
    for program in (in_place, products, parts, views_of_what_is_made, views_of_what_was_there):
        tape, graph = record("k", program, ()), device.capture("k", program)
        arms = {"eager": program, "python": tape.replay, "native": graph.run_here}
        with torch.inference_mode():
            spent = in_turns(arms, rounds * 10)
        row = " | ".join(f"{spent[name] * 1e4:.2f}" for name in arms)
        print(f"| {program.__name__.replace('_', ' ')} | {row} | {len(tape.calls)} |")


# Overlap.


class Step:
    """A small transformer-like program; `width` decides how long its operators take."""

    def __init__(self, width: int, rows: int) -> None:
        self.words = torch.zeros(rows, dtype=torch.int64)
        self._table = torch.randn(1000, width)
        self._up = [torch.randn(3 * width, width) / width**0.5 for _ in range(LAYERS)]
        self._down = [torch.randn(width, 3 * width) / (3 * width) ** 0.5 for _ in range(LAYERS)]
        self.out = torch.zeros(rows, dtype=torch.int64)

    def __call__(self) -> None:
        x = self._table.index_select(0, self.words)
        for up, down in zip(self._up, self._down, strict=True):
            a, b, c = linear(rms_norm(x, x.shape[-1:]), up).chunk(3, -1)
            mixed = torch.nn.functional.silu(a) * b + torch.roll(c, 1, 0)
            x = x + linear(torch.cat([mixed, a, b], -1), down)
        self.out.copy_((x @ self._table.T).argmax(-1))


def host_work(times: int) -> int:
    """A scheduler's kind of work: integers and dictionaries, no torch."""
    table: dict[int, int] = {}
    for number in range(times):
        table[number & 255] = table.get(number & 255, 0) + number
    return len(table)


def overlap(width: int, rows: int, rounds: int) -> None:
    step, packet = Step(width, rows), torch.zeros(rows, dtype=torch.int64)
    native, plain = CpuDevice(threads=1), CpuDevice(threads=1, use_native=False)
    graph = native.capture("step", step)

    def launch(device: CpuDevice, replay: bool) -> None:
        for _ in range(STEPS):
            device.compute.upload(step.words, packet)
            if replay:
                graph.launch(device.compute)
            else:
                device.compute.launch(step)
            fence = device.compute.record()
        fences.append(fence)

    fences: list = []
    arms = {
        "eager, stream in Python": (plain, False),
        "eager, native stream": (native, False),
        "graph, native stream": (native, True),
    }
    alone = in_turns({name: lambda arm=arm: (launch(*arm), fences.pop().wait()) for name, arm in arms.items()}, rounds)
    times = 10_000
    per_item = min(seconds(lambda: host_work(times)) for _ in range(50)) / times
    times = int(alone["graph, native stream"] / per_item)
    together = in_turns(
        {name: lambda arm=arm: (launch(*arm), host_work(times), fences.pop().wait()) for name, arm in arms.items()},
        rounds,
    )
    host = in_turns({"host": lambda: host_work(times)}, rounds)["host"]
    calls = len(record("k", step, ()).calls)
    for name in arms:
        hidden = (alone[name] + host - together[name]) / min(alone[name], host)
        figures = f"{alone[name] / STEPS * 1e3:.2f} | {host / STEPS * 1e3:.2f} | {together[name] / STEPS * 1e3:.2f}"
        print(f"| {width} x {rows}, {calls} operators | {name} | {figures} | {hidden:.2f} |")
    native.close()
    plain.close()


def main() -> None:
    checkers.connect()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    device = CpuDevice(threads=1)
    costs(device, options.rounds)
    device.close()
    print("\n| step | how it runs | alone ms | host alone ms | both ms | overlap |\n|:---|:---|---:|---:|---:|---:|")
    for width, rows in ((64, 4), (256, 4), (512, 4)):
        overlap(width, rows, options.rounds)


if __name__ == "__main__":
    main()
