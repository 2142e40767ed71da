"""`gapless bench`: serve, throughput, latency, startup."""

from __future__ import annotations

from collections.abc import Sequence

from gapless.cli.kinds import Table, dispatch, usage

BENCH_KINDS: Table = {
    "serve": ("load on any OpenAI-compatible server", "bench_serve"),
    "throughput": ("how much one engine in this process does at full load", "bench_offline:main_throughput"),
    "latency": ("how long one batch takes in this process", "bench_offline:main_latency"),
    "startup": ("where the time of a start goes", "bench_offline:main_startup"),
}


def main(argv: Sequence[str]) -> int:
    return dispatch(argv, "bench", usage("bench", "Measure.", BENCH_KINDS), BENCH_KINDS)
