"""How far the load generator's readings are from the truth: a server in another process streams tokens at known
times and writes into each the moment at which it was sent; the client's reading is held against that.

    python benchmarks/load_client.py --concurrency 1 16 64 256
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from functools import partial

from gapless.lab.bench import raised_priority
from gapless.lab.datasets import Lengths, Source, random_prompts
from gapless.lab.http import with_client
from gapless.lab.load import run_load
from gapless.lab.records import LoadRun
from gapless.lab.stats import Spread
from gapless.lab.target import Target

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(value: object) -> bytes:
    data = b"data: " + (value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(data), data)


async def answer(writer: asyncio.StreamWriter, received: float, tokens: int, ttft: float, itl: float) -> None:
    """Every token at its own absolute time, so that one late token does not delay those behind it."""
    writer.write(HEAD)
    for i in range(tokens):
        due = received + ttft + i * itl
        await asyncio.sleep(due - time.monotonic())
        finish = "length" if i == tokens - 1 else None
        writer.write(chunk({"choices": [{"text": f"{time.monotonic()} ", "finish_reason": finish}]}))
    usage = {"prompt_tokens": 16, "completion_tokens": tokens}
    writer.write(chunk({"choices": [], "usage": usage}) + chunk(b"[DONE]") + b"0\r\n\r\n")


async def serve(ttft: float, itl: float) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                body = json.loads(await reader.readexactly(length))
                await answer(writer, time.monotonic(), body["max_tokens"], ttft, itl)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def delays(run: LoadRun) -> list[float]:
    """Milliseconds from the server's writing of each token to the client's reading of it."""
    found = []
    for sample in run.samples:
        sent = [float(word) for word in sample.text.split()]
        found += [1e3 * (run.began + at - stamp) for at, stamp in zip(sample.events, sent, strict=True)]
    return found


def row(name: str, values: list[float]) -> str:
    found = Spread(values, (50.0, 99.0, 100.0))
    return f"{name:<38}" + "".join(f"{value:>10.3f}" for _, value in found.percentiles)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=4, help="requests for each slot")
    parser.add_argument("--ttft", type=float, default=50.0, help="ms")
    parser.add_argument("--itl", type=float, default=10.0, help="ms")
    parser.add_argument("--priority", default="nice", choices=("none", "nice", "rt"))
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve(options.ttft / 1e3, options.itl / 1e3))
        return
    command = [sys.executable, __file__, "--serve", "--ttft", str(options.ttft), "--itl", str(options.itl)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        target = Target(f"http://127.0.0.1:{server.stdout.readline().strip()}", "m")
        with raised_priority(options.priority) as got:
            print(f"priority: {got}; milliseconds")
            for concurrency in options.concurrency:
                count = concurrency * options.rounds
                prompts = random_prompts(Source(range(1000)), count, Lengths(16), Lengths(options.tokens))
                load = partial(run_load, prompts=prompts, times=[0.0] * count, concurrency=concurrency)
                run = asyncio.run(with_client(target, load))
                assert not [s.error for s in run.samples if s.error]
                share = run.client.cpu / run.client.wall
                rate = sum(s.output_tokens for s in run.samples) / run.duration
                print(f"\nconcurrency {concurrency}: {rate:.0f} events/s, client uses {share:.0%} of a core")
                print(f"{'':<38}{'p50':>10}{'p99':>10}{'max':>10}")
                print(row("TTFT by the client", [1e3 * s.ttft for s in run.samples]))
                print(row("from the server's write to our read", delays(run)))
                print(row("send lag", [1e3 * s.lag for s in run.samples]))
                print(row("event loop delay", [1e3 * late for late in run.client.late]))
    finally:
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
