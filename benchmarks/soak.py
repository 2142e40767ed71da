"""Watches the memory of an engine's process under short streams, most of which their clients break off.

    PYTHONPATH=.:benchmarks python benchmarks/soak.py --streams 30000
    PYTHONPATH=.:benchmarks python benchmarks/soak.py --streams 30000 dtype='"bfloat16"'

The engine runs in a process of its own, as `gapless serve` starts it. Prompts have 4 to --longest tokens, most of them
few, and outputs 1 to 16; the readers of --broken of the streams close them after some of their tokens. Other settings
of the engine are NAME=VALUE. Prints its PSS in MB every --every streams: all of it, what malloc keeps in its main heap
and in arenas of threads, and the rest. The last line says how much it grew after the first --settled streams.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from typing import Any, NamedTuple

from gapless.base.config import DEMO_MODEL
from gapless.base.params import SamplingParams
from gapless.engine.async_llm import AsyncLLM
from gapless.engine.frontdoor import locate, make_config
from gapless.engine.process_backend import ProcessBackend

LONGEST_OUTPUT = 16
ARENA = 64 << 20
"""Bytes that glibc reserves for a heap of a thread's arena, and its alignment"""


class Memory(NamedTuple):
    """MB of one process."""

    all: float
    heap: float
    """malloc's main heap"""
    arenas: float
    """malloc's heaps of threads"""

    def __str__(self) -> str:
        rest = self.all - self.heap - self.arenas
        return f"{self.all:8.1f} MB: heap {self.heap:7.1f}, arenas {self.arenas:7.1f}, rest {rest:7.1f}"


def memory_of(pid: int) -> Memory:
    total = heap = arenas = 0.0
    start, kind = 0, ""
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head, *rest = line.split()
        if not head.endswith(":"):
            start, name = int(head.split("-")[0], 16), rest[4] if len(rest) > 4 else ""
            kind = name or ("arena" if start % ARENA == 0 else "")
        elif head == "Pss:":
            size = int(rest[0]) / 1024
            total += size
            heap += size * (kind == "[heap]")
            arenas += size * (kind == "arena")
    return Memory(total, heap, arenas)


class Streams:
    """Draws streams, and reads them one by one."""

    def __init__(self, llm: AsyncLLM, args: argparse.Namespace) -> None:
        self._llm, self._args, self._rng = llm, args, random.Random(args.seed)
        self._left = 0

    async def run(self, count: int) -> None:
        """Read `count` streams, as many at a time as the arguments say."""
        self._left = count
        await asyncio.gather(*[self._reader() for _ in range(self._args.concurrency)])

    async def _reader(self) -> None:
        while self._left:
            self._left -= 1
            await self._read()

    async def _read(self) -> None:
        rng, args = self._rng, self._args
        length = min(4 + int(rng.expovariate(1 / args.typical)), args.longest)
        prompt = [rng.randrange(self._llm.info.vocab_size) for _ in range(length)]
        tokens = rng.randint(1, LONGEST_OUTPUT)
        wanted = rng.randint(1, tokens) if rng.random() < args.broken else tokens + 1
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=rng.choice((0.0, 1.0)))
        stream = await self._llm.open(prompt, params)
        try:
            while not stream.finished and wanted > 0:
                wanted -= len(await stream.next())
        finally:
            stream.close()


async def soak(args: argparse.Namespace, settings: dict[str, Any]) -> list[tuple[int, Memory]]:
    config, _ = locate(make_config(settings.pop("model", DEMO_MODEL), settings))
    backend = ProcessBackend(config)
    async with AsyncLLM.from_config(config, backend) as llm:
        assert backend.pid is not None
        streams = Streams(llm, args)
        found = [(0, memory_of(backend.pid))]
        print(f"{0:>7} streams: {found[-1][1]}", flush=True)
        for begun in range(0, args.streams, args.every):
            begin = time.monotonic()
            await streams.run(min(args.every, args.streams - begun))
            found.append((min(begun + args.every, args.streams), memory_of(backend.pid)))
            print(f"{found[-1][0]:>7} streams: {found[-1][1]}, {time.monotonic() - begin:.1f} s", flush=True)
        await asyncio.sleep(1.1)  # until the next numbers come
        stats = llm.stats()
        print(f"{stats.steps} steps, of which {stats.graph_steps} were replayed")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=30_000)
    parser.add_argument("--every", type=int, default=1_000)
    parser.add_argument("--settled", type=int, default=5_000)
    parser.add_argument("--concurrency", type=int, default=48)
    parser.add_argument("--broken", type=float, default=0.7, help="the part that readers close")
    parser.add_argument("--typical", type=float, default=40, help="mean tokens of a prompt")
    parser.add_argument("--longest", type=int, default=400, help="most tokens of a prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("settings", nargs="*", help="of the engine, as max_num_seqs=64")
    args = parser.parse_args()
    settings = {name: json.loads(value) for name, _, value in (one.partition("=") for one in args.settings)}
    found = asyncio.run(soak(args, {"device": "cpu", **settings}))
    settled = next(memory for count, memory in found if count >= min(args.settled, args.streams))
    print(f"grew by {found[-1][1].all - settled.all:.1f} MB after the first {args.settled} streams")


if __name__ == "__main__":
    main()
