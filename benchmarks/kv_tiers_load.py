"""A host tier under load: copy rates, token latency beside full-rate copies, conversations, the cold first request.

`PYTHONPATH=.:benchmarks python benchmarks/kv_tiers_load.py [--device cuda] [--model 0.6B] [--part copies]...` prints a
short table for each part: begins (time of the loop's thread for each page), copies (GB/s each way alone and both at
once), tails (token intervals at rest and beside copies at full rate both ways), conversations (whose KV is three times
the device's; requests/s with a host tier and without) and cold (the first request of a new engine with tiers and
without). 0.6B is a dummy of Qwen3-0.6B's shape.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from shapes import SHAPES, make_qwen

from gapless import LLM, SamplingParams
from gapless.base.config import EngineConfig
from gapless.base.part import Hooks
from gapless.base.records import Request
from gapless.device import Stream
from gapless.engine.core import EngineCore
from gapless.engine.wiring import build_core
from gapless.offload.copies import PageCopy
from gapless.offload.host import MoveBatch, PageMove
from gapless.offload.transfers import MOST_BATCH, TransferWay

SIZE = 16
PAGES = MOST_BATCH // 4


class Pump:
    """Keeps transfers running both ways, over pages that no request holds and over slots of its own."""

    def __init__(self, core: EngineCore, both: Sequence[str] = ("bulk_out", "bulk_in")) -> None:
        transfers, loop = core.loop.parts.transfers, core.loop
        assert transfers is not None
        # Transfers that end here are none of the loop's.
        loop._hooks = Hooks.of(part for part in loop.parts.every if part is not transfers)
        pages = [loop.pools[0].take() for _ in range(PAGES)]
        self.page_bytes = transfers.slots[0][0].nbytes
        self.ways: dict[TransferWay, MoveBatch] = {}
        group = transfers.host.groups[0]
        for number, name in enumerate(both):
            moves = [PageMove(0, page, PageCopy(group, b"", number * PAGES + i)) for i, page in enumerate(pages)]
            half = moves[number * PAGES // 2 : (number + 1) * PAGES // 2] if len(both) > 1 else moves
            self.ways[getattr(transfers, name)] = MoveBatch(0, half)
        self.bytes = dict.fromkeys(both, 0)

    def look(self, begin: bool = True) -> bool:
        """Note what has ended, and begin the next ones; return whether something is on its way."""
        for name, (way, batch) in zip(self.bytes, self.ways.items(), strict=True):
            if way.underway and (ended := way.ended()) is not None:
                self.bytes[name] += len(ended[0].moves) * self.page_bytes
            if begin and not way.underway:
                way.begin(batch, time.monotonic_ns())
        return any(way.underway for way in self.ways)


class AtOnce:
    """A stream whose programs run on the thread that launches them, as those of CUDA enqueue their kernels."""

    def __init__(self, stream: Stream) -> None:
        self.record = stream.record

    def launch(self, program: Callable[..., None], *args: Any, reads: Any = (), writes: Any = ()) -> None:
        with torch.inference_mode():
            program(*args)


def begins(engine: Callable[..., EngineCore]) -> None:
    """Processor time of the loop's thread for each page that is stored and loaded, all of its accounting included."""
    core = engine()
    loop, transfers = core.loop, core.loop.parts.transfers
    assert transfers is not None
    pool, found = loop.pools[0], {"store": list[float](), "load": list[float]()}

    def moved(kind: str) -> None:
        spent = 0
        while transfers.busy:
            before = time.thread_time_ns()
            transfers.poll()
            spent += time.thread_time_ns() - before
            time.sleep(0.0005)
        found[kind].append(spent / 1e3 / PAGES)

    for turn in range(12):
        digests = [b"%d %d" % (turn, number) for number in range(PAGES)]
        for digest in digests:
            pool.publish(page := pool.take(), digest)
            pool.retire([page], 0)
        moved("store")
        pool.retire([pool.take() for _ in range(pool.available())], 0)  # others take all pages, and give them back
        transfers.host.load([(pool, digest) for digest in digests])
        moved("load")
    text = ", ".join(f"{kind} {statistics.median(each[2:]):.1f} us" for kind, each in found.items())
    print(f"begins, a page of {transfers.slots[0][0].nbytes:,} bytes: {text} of the loop's thread")
    device, words = loop.device, MOST_BATCH * 64
    tiny = torch.zeros(MOST_BATCH, 64, dtype=torch.int32, device=device.torch_device)
    slots = device.host_memory(4 * words).view(torch.int32).view(MOST_BATCH, 64)
    way = TransferWay(device, AtOnce(device.bulk_out), True, transfers.bulk_out.copy_pages, [tiny], [slots])
    for count in (1, 32, MOST_BATCH):
        moves = [PageMove(0, page, PageCopy(transfers.host.groups[0], b"", page)) for page in range(count)]
        batch, spent = MoveBatch(0, moves), list[int]()
        for _ in range(100):
            before = time.thread_time_ns()
            way.begin(batch, time.monotonic_ns())
            spent.append(time.thread_time_ns() - before)
            device.drain()
            assert way.ended()
        print(f"begins, {count} tiny pages copied by the loop's thread itself: {statistics.median(spent) / 1e3:.0f} us")
    core.close()


def copies(engine: Callable[..., EngineCore]) -> None:
    """Rates of copies by themselves, each after half a second."""
    for both in (("bulk_out",), ("bulk_in",), ("bulk_out", "bulk_in")):
        core = engine()
        pump, end = Pump(core, both), time.perf_counter() + 0.5
        while time.perf_counter() < end:
            pump.look()
        pump.bytes, begin = dict.fromkeys(both, 0), time.perf_counter()
        while time.perf_counter() < begin + 2:
            pump.look()
        took = time.perf_counter() - begin
        print("copies", ", ".join(f"{name} {count / took / 1e9:.2f} GB/s" for name, count in pump.bytes.items()))
        while pump.look(begin=False):
            time.sleep(0.001)
        core.close()


def tails(engine: Callable[..., EngineCore], rows: int, tokens: int) -> None:
    """Intervals between steps of decoding rows, at rest and beside copies, taking turns."""
    core = engine()
    pump, found = Pump(core), {"at rest": list[float](), "copying": list[float]()}
    greedy, bytes_before = SamplingParams(temperature=0, ignore_eos=True, max_tokens=None), 0
    seconds = 0.0
    for turn in range(6):
        kind = "copying" if turn % 2 else "at rest"
        for row in range(rows):
            ids = np.random.default_rng(row).integers(3, 200, 32).astype(np.int32)
            core.submit(Request(1000 * turn + row, ids, greedy, 0, (), 0, 32 + tokens))
        last, began = 0.0, time.perf_counter()
        while core.loop.requests:
            if kind == "copying":
                pump.look()
            settled = core.step().tokens
            now = time.perf_counter()
            if settled and last and turn > 1:
                found[kind] += [(now - last) / len(settled)] * len(settled)
            last = now if settled else last
        while core.has_work():
            core.step()
        seconds += (time.perf_counter() - began) * (kind == "copying")
        while pump.look(begin=False):
            time.sleep(0.001)
    for kind, intervals in found.items():
        p50, p99, p999 = (1e6 * float(np.percentile(intervals, point)) for point in (50, 99, 99.9))
        print(f"tails {kind}: p50 {p50:.0f} us, p99 {p99:.0f} us, p99.9 {p999:.0f} us, {len(intervals)} steps")
    moved = (sum(pump.bytes.values()) - bytes_before) / seconds / 1e9
    print(f"tails copying: {moved:.2f} GB/s both ways together, {rows} rows")
    core.close()


def conversations(model: str, options: dict[str, Any], length: int, host: str) -> None:
    """Turns of conversations, all of them one after another, whose KV is three times what the device holds."""
    count, turns = 12, 4
    greedy = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    options = options | {"num_gpu_blocks_override": count * length // SIZE // 3 + 1, "max_model_len": length}
    rates = {}
    for name, tiers in (("none", ()), ("host", (f"host:{host}",))):
        draw = random.Random(1)
        with LLM(model, kv_tiers=tiers, **options) as llm:
            known = [[draw.randrange(3, 200) for _ in range(length - 64 * turns)] for _ in range(count)]
            for turn in range(turns):
                if turn == 1:  # the first turn computes all there is
                    began = time.perf_counter()
                for number in range(count):
                    known[number] += [draw.randrange(3, 200) for _ in range(32)]
                    (output,) = llm.generate({"prompt_token_ids": known[number]}, greedy, use_tqdm=False)
                    known[number] += output.outputs[0].token_ids
            rates[name] = count * (turns - 1) / (time.perf_counter() - began)
            loaded, stored = (tier := llm.stats().tier).loaded, tier.stored
    text = ", ".join(f"{name} {rate:.2f} requests/s" for name, rate in rates.items())
    print(
        f"conversations of {length} tokens, three times the device's KV: {text} "
        f"({rates['host'] / rates['none']:.2f} x; {loaded} pages loaded, {stored} stored)"
    )


def cold(model: str, options: dict[str, Any], length: int, host: str) -> None:
    """The first request of a new engine."""
    found: dict[str, list[float]] = {"none": [], "host": []}
    options = options | {"num_gpu_blocks_override": length // SIZE + 8}
    for count in range(8):
        name = ("none", "host", "host", "none")[count % 4]
        tiers = (f"host:{host}",) if name == "host" else ()
        with LLM(model, kv_tiers=tiers, max_model_len=length, **options) as llm:
            prompt = {"prompt_token_ids": [3 + place % 190 for place in range(length - 8)]}
            began = time.perf_counter()
            llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
            found[name].append(time.perf_counter() - began)
    none, tiered = (statistics.median(times) for times in found.values())
    print(f"cold first request of {length - 8} tokens: {1e3 * none:.1f} ms, with a tier {1e3 * tiered:.1f} ms ", end="")
    print(f"({tiered / none:.3f}; {' '.join(f'{1e3 * one:.1f}' for times in found.values() for one in times)})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--part", action="append", choices=("begins", "copies", "tails", "conversations", "cold"))
    parser.add_argument("--host", default="1GiB", help="the host tier")
    parser.add_argument("--tokens", type=int, default=448, help="of a conversation, and of the first request")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--steps", type=int, default=400, help="of each turn of `tails`")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        options: dict[str, Any] = {"device": args.device}
        model = args.model
        if model in SHAPES:
            path = make_qwen(Path(directory) / model, max(4096, args.tokens), model)
            model, options["load_format"] = str(path), "dummy"

        def engine() -> EngineCore:
            longest = 64 + args.steps
            pages = args.rows * (longest // SIZE + 2) + PAGES + 8
            kv = {"max_model_len": longest, "max_num_seqs": args.rows, "num_gpu_blocks_override": pages}
            return build_core(EngineConfig(model, **options, **kv, kv_tiers=(f"host:{args.host}",)))

        for part in args.part or ("begins", "copies", "tails", "conversations", "cold"):
            if part == "tails":
                tails(engine, args.rows, args.steps)
            elif part in ("begins", "copies"):
                (begins if part == "begins" else copies)(engine)
            else:
                (conversations if part == "conversations" else cold)(model, options, args.tokens, args.host)


if __name__ == "__main__":
    main()
