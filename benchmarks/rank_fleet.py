"""Mode dp of gpu_ranks.py: several engines of one server beside as many servers among which requests are divided."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import prefill_decode
from rank_modes import fields, flags_of
from rank_table import Table

from gapless.lab.datasets import Prompt, Source, Workload, prefix_prompts
from gapless.lab.http import with_client
from gapless.lab.load import run_load
from gapless.lab.probe import fetch
from gapless.lab.records import LoadRun
from gapless.lab.stats import percentile
from gapless.lab.target import Target
from gapless.lab.top import Page

PREFIXES = 8
"""Beginnings of prompts for each engine, which are new in every round"""


class Play(NamedTuple):
    """One round of a side."""

    speed: float
    first: float
    late: float
    """[ms] TTFT p50 and p99"""
    hits: float
    """Percentage of the prompts' tokens that the prefix caches had"""


def by_prefix(prompts: Sequence[Prompt], count: int) -> list[list[Prompt]]:
    """Divide the prompts: those with one beginning go to one server, the beginnings in turn."""
    groups: dict[object, int] = {}
    found: list[list[Prompt]] = [[] for _ in range(count)]
    for prompt in prompts:
        found[groups.setdefault(prompt.content[:8], len(groups)) % count].append(prompt)
    return found


def counts(urls: Sequence[str]) -> tuple[float, float]:
    """Return the tokens found in prefix caches and the tokens looked up, of all servers."""
    pages = [Page(fetch(Target(url, "m"), "/metrics").decode()) for url in urls]
    names = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    hits, asked = (sum(page.total(name) or 0.0 for page in pages) for name in names)
    return hits, asked


def play(urls: Sequence[str], prompts: Sequence[Prompt], streams: int) -> Play:
    """Send all prompts as fast as `streams` open requests allow, divided equally among the servers."""

    async def run() -> list[LoadRun]:
        parts = zip(urls, by_prefix(prompts, len(urls)), strict=True)
        limit = -(-streams // len(urls))
        loads = [
            with_client(Target(url, "m"), partial(run_load, prompts=part, times=[0.0] * len(part), concurrency=limit))
            for url, part in parts
        ]
        return list(await asyncio.gather(*loads))

    before = counts(urls)
    runs = asyncio.run(run())
    hits, asked = (now - then for now, then in zip(counts(urls), before, strict=True))
    samples = [sample for one in runs for sample in one.samples]
    assert not (errors := [sample.error for sample in samples if sample.error]), errors[0]
    ttfts = sorted(1e3 * sample.ttft for sample in samples)
    speed = sum(sample.output_tokens for sample in samples) / max(one.duration for one in runs)
    return Play(speed, percentile(ttfts, 50), percentile(ttfts, 99), 100 * hits / max(1.0, asked))


def dp(options: Namespace) -> None:
    """Medians of the rounds after the first; the sides take turns."""
    columns = ("tokens/s", "TTFT p50, ms", "TTFT p99, ms", "found in prefix caches, %")
    table = Table(options, "model", "engines", *columns, "tokens/s, one server : servers")
    size = options.size[0]
    for count in options.ranks:
        gpus = [*dict.fromkeys(map(str, options.device_ids or range(count)))] if options.device == "cuda" else []
        with tempfile.TemporaryDirectory() as folder:
            given = fields(options, size, folder, 1) | {"max_num_seqs": options.streams}
            given |= {"kv_cache_memory_bytes": 12 << 30} if options.device == "cuda" else {}
            flags = " ".join(flags_of(given))
            many = f"--data-parallel-size {count} {flags}"
            if len(gpus) == 1:
                many += " --device-ids " + ",".join(gpus * count)
            fleet = [("fleet", prefill_decode.devices(gpus, *range(count)), many)]
            plain = [(f"server-{at}", prefill_decode.devices(gpus, at), flags) for at in range(count)]
            servers = Namespace(model=given["model"], logs=None)
            with prefill_decode.started({"one server": fleet, "servers": plain}, servers) as urls:
                found: dict[str, list[Play]] = {side: [] for side in urls}
                for turn in range(1 + options.rounds):
                    groups = PREFIXES * count
                    lengths = {
                        "prefix_len": 4 * options.prompt,
                        "input_len": options.prompt,
                        "output_len": options.output,
                    }
                    work = Workload("shared_prefix", 8 * groups, turn, prefixes=groups, zipf=0.0, **lengths)
                    prompts = prefix_prompts(Source(range(3, 2000)), work)
                    for side in [*urls][:: -1 if turn % 2 else 1]:
                        got = play(urls[side], prompts, options.streams)
                        found[side] += [got] if turn else []
        middle = {side: Play(*map(statistics.median, zip(*rounds, strict=True))) for side, rounds in found.items()}
        ratio = middle["one server"].speed / middle["servers"].speed
        pairs = [f"{one:.1f} : {two:.1f}" for one, two in zip(middle["one server"], middle["servers"], strict=True)]
        table.row(options.model or size, count, *pairs, f"{ratio:.2f}", world=count, found={"tokens/s": ratio})
