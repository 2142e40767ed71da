"""`gapless bench`: serve, throughput, latency, startup."""

from __future__ import annotations

from collections.abc import Sequence

from gapless.cli.kinds import Kinds, dispatch


def _serve(argv: Sequence[str]) -> int:
    from gapless.cli import bench_serve

    return bench_serve.main(argv)


def _throughput(argv: Sequence[str]) -> int:
    from gapless.cli import bench_offline

    return bench_offline.main_throughput(argv)


def _latency(argv: Sequence[str]) -> int:
    from gapless.cli import bench_offline

    return bench_offline.main_latency(argv)


def _startup(argv: Sequence[str]) -> int:
    from gapless.cli import bench_offline

    return bench_offline.main_startup(argv)


KINDS: Kinds = {
    "serve": (_serve, "load on any OpenAI-compatible server"),
    "throughput": (_throughput, "how much one engine in this process does at full load"),
    "latency": (_latency, "how long one batch takes in this process"),
    "startup": (_startup, "where the time of a start goes"),
}


def main(argv: Sequence[str]) -> int:
    return dispatch(argv, "bench", "Measure.", KINDS)
