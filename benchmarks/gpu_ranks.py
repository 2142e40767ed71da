"""Ranks on several GPUs of one host, or on one: one question a run, with a short table.

`PYTHONPATH=.:benchmarks python benchmarks/gpu_ranks.py --only sums [--device-ids 0,1] [--json FILE]`

sums   us of a sum in a graph, with and without the norm, and of what the leader tells and gathers
late   replays that the host launches ahead of a rank that does not come, and the time from the stop word to idle
tp     tokens/s of one rank and of several, and of several at depth 1; the share of time in which the device idles
death  each rank of a server is killed under open streams: time until it is ready again, and streams that fail
peer   tokens/s of vLLM with as many ranks, in a process of its own, in turns with ours
pd     prefill and decode apart beside two mixed servers, at each prompt length: waits of users under equal load
dp     several engines of one server beside as many servers that are given equal beginnings of prompts by one rule

`--device-ids 0,0` puts all ranks on one GPU, `--device cpu` on processors (not late and peer). The aims are in
rank_table.py. Without a mode, since no code exists: stages (PP) and experts on ranks (EP).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rank_fleet import dp
from rank_modes import death, pd, peer, tp
from rank_table import Table, counted
from shapes import SHAPES

from gapless.base.errors import GaplessError
from gapless.base.share import Share
from gapless.comm.join import group_on
from gapless.comm.seam import Group
from gapless.comm.shared import Commons
from gapless.device import Device, open_device
from gapless.engine import checkers

ALONE = ("sums", "late")
"""Modes without an engine"""
ENGINES = {"tp": tp, "death": death, "peer": peer, "pd": pd, "dp": dp}
CALLS, REPLAYS, AHEAD, LATE_CALLS = 50, 20, 600, 65
VOCABULARY = 151936


class Rank(NamedTuple):
    """One rank of a run without an engine."""

    commons: Commons
    device: Device
    group: Group

    @classmethod
    def of(cls, commons: Commons, options: argparse.Namespace) -> Rank:
        ids = options.device_ids or [*range(commons.share.world)]
        device = open_device(options.device, 1, ids[commons.share.rank] if options.device == "cuda" else 0)
        return cls(commons, device, group_on(device, commons))

    def graph(self, name: object, program: Callable[[], object]) -> Any:
        with self.group.muted():
            return self.device.capture(name, program)

    def replay(self, graph: Any) -> float:
        """Return the seconds from the launch until the end is seen."""
        begin = time.perf_counter()
        graph.launch(self.device.compute)
        self.device.compute.record().wait()
        return time.perf_counter() - begin


Work = Callable[[Rank, argparse.Namespace, Table | None], None]


def ranks(options: argparse.Namespace, world: int, work: Work, table: Table) -> None:
    """Do some work as all ranks: this process leads, and has the table."""
    commons = Commons.create(world)
    command = [sys.executable, __file__, *sys.argv[1:], "--ranks", str(world), "--fd", str(commons.fd)]
    peers = [subprocess.Popen([*command, "--rank", str(n)], pass_fds=[commons.fd]) for n in range(1, world)]
    try:
        work(Rank.of(commons, options), options, table)
        assert not any([peer.wait(120) for peer in peers]), "a rank failed"
    finally:
        commons.group.stop()
        for peer in peers:
            peer.kill()


def sums(rank: Rank, options: argparse.Namespace, table: Table | None) -> None:
    group, device, share = rank.group, rank.device.torch_device, rank.group.share
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32

    def check() -> None:
        numbers = torch.arange(options.width, device=device).remainder(7).to(dtype).repeat(3, 1)
        assert torch.equal(group.add(numbers * (share.rank + 1)), numbers * (share.world * (share.world + 1) // 2))

    rank.device.run(check)
    for rows in options.rows:
        x, y = (torch.zeros(rows, options.width, dtype=dtype, device=device) for _ in range(2))
        weight = torch.ones(options.width, device=device)
        part = torch.zeros(rows, VOCABULARY // share.world, dtype=dtype, device=device)
        out = torch.zeros(rows, part.shape[1] * share.world if share.leads else 0, dtype=dtype, device=device)
        news = torch.zeros(rows, 16, dtype=torch.int32, device=device)
        works: dict[str, Callable[[], object]] = {
            f"sum of {rows} x {options.width}": lambda y=y: group.add(y),
            "sum, residual and norm": lambda x=x, y=y, weight=weight: group.add_norm(x, y, weight, 1e-6),
            f"columns of {rows} x {VOCABULARY} gathered": lambda part=part, out=out: group.gather(part, out),
            f"{rows} x 16 words to all ranks": lambda news=news: group.tell(news),
        }
        for name, once in works.items():
            graph = rank.graph((name, rows), lambda once=once: [once() for _ in range(CALLS)] and None)
            found = sorted(1e6 * rank.replay(graph) / CALLS for _ in range(3 + REPLAYS))[:-3]
            if table:
                middle = statistics.median(found)
                aimed = {counted(rows): middle} if name.startswith("sum of") and options.width == 4096 else {}
                table.row(share.world, name, f"{middle:.2f}", f"{found[0]:.2f}", world=share.world, found=aimed)


def late(rank: Rank, options: argparse.Namespace, table: Table | None) -> None:
    y = torch.zeros(1, options.width, dtype=torch.bfloat16, device=rank.device.torch_device)
    graph = rank.graph("late", lambda: [rank.group.add(y) for _ in range(LATE_CALLS)] and None)
    rank.replay(graph)  # together
    if not rank.group.share.leads:
        while not rank.commons.ring.wait(1.0):
            assert not rank.commons.stopped
        for _ in range(AHEAD):
            graph.launch(rank.device.compute)
        rank.device.compute.record().wait()
        while not rank.commons.stopped:  # a process that ends stops the ranks
            time.sleep(0.01)
        return
    launched: list[float] = []

    def launch() -> None:
        for _ in range(AHEAD):
            begin = time.perf_counter()
            graph.launch(rank.device.compute)
            launched.append(1e6 * (time.perf_counter() - begin))

    thread = threading.Thread(target=launch)
    thread.start()
    time.sleep(1.5)
    ahead = len(launched)
    rank.commons.ring.put(b"come")
    thread.join()
    rank.device.compute.record().wait()
    assert table is not None
    world = rank.group.share.world
    name = f"replays of {LATE_CALLS} sums ahead of a late rank, of {AHEAD}"
    table.row(world, name, ahead, world=world, found={"replays ahead": ahead})
    table.row(world, "us a launch, median", f"{statistics.median(launched):.1f}")
    graph.launch(rank.device.compute)  # the others do not come
    fence = rank.device.compute.record()
    time.sleep(0.3)
    assert not fence.done(), "it did not wait"
    begin = time.perf_counter()
    rank.group.stop()
    try:
        fence.wait()
    except GaplessError:
        ms = 1e3 * (time.perf_counter() - begin)
        table.row(world, "ms from the stop word to idle", f"{ms:.2f}", world=world, found={"stop word to idle": ms})


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=(*ALONE, *ENGINES), required=True)
    parser.add_argument("--json", type=Path, help="write the table there, as docs/measurements has them")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    worlds = "worlds, one after another; pd: of a side, 1 by default; dp: engines"
    parser.add_argument("--ranks", type=int, nargs="+", help=worlds)
    parser.add_argument("--device-ids", type=numbers, help="GPU of each rank of the largest world")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--size", nargs="+", choices=SHAPES, default=["8B"])
    parser.add_argument("--model", help="a model with weights, instead of a size")
    parser.add_argument("--quantization", nargs="+", default=["auto"], help="formats of weights for tp, one by one")
    parser.add_argument("--threads", type=int, default=1, help="of each rank on a CPU")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--output", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", type=int, default=64, help="open requests of death and dp")
    parser.add_argument("--peer-path", default="", help="PYTHONPATH of vLLM; default: ours")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192], help="longest prompts of pd")
    parser.add_argument("--load", type=float, default=10_000, help="prompt tokens a second of pd")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each turn of pd")
    parser.add_argument("--tier", default="12GiB", help="of the host, for each side of a pair and for what it lends")
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--fd", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.ranks = options.ranks or [1 if options.only == "pd" else 2]
    return options


def main() -> None:
    options = parsed()
    checkers.connect()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA GPU here: nothing was run")
    if options.device == "cpu" and options.only in ("late", "peer"):
        sys.exit(f"--only {options.only} needs GPUs")
    alone: dict[str, Work] = {"sums": sums, "late": late}
    if options.rank:
        commons = Commons.attach(options.fd, Share(options.rank, *options.ranks))
        alone[options.only](Rank.of(commons, options), options, None)
    elif options.only in ALONE:
        table = Table(options, "ranks", "work", *(("us, median", "least") if options.only == "sums" else ("found",)))
        for world in options.ranks:
            ranks(options, world, alone[options.only], table)
    else:
        ENGINES[options.only](options)


if __name__ == "__main__":
    main()
