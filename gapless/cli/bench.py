"""`gapless bench`: serve, throughput, latency, startup."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from gapless.cli.errors import USAGE, UsageError


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


KINDS: dict[str, tuple[Callable[[Sequence[str]], int], str]] = {
    "serve": (_serve, "load on any OpenAI-compatible server"),
    "throughput": (_throughput, "how much one engine in this process does at full load"),
    "latency": (_latency, "how long one batch takes in this process"),
    "startup": (_startup, "where the time of a start goes"),
}


def usage() -> str:
    rows = "\n".join(f"  {name:<12}{text}" for name, (_, text) in KINDS.items())
    return (
        f"usage: gapless bench KIND [...]\n\nMeasure.\n\n{rows}\n\n  gapless bench KIND --help    the flags of a kind"
    )


def main(argv: Sequence[str]) -> int:
    name = argv[0] if argv else ""
    if name in ("-h", "--help", "help"):
        print(usage())
        return 0
    if not name:
        print(usage(), file=sys.stderr)
        return USAGE
    if name not in KINDS:
        raise UsageError(f"gapless bench knows {', '.join(KINDS)}; got {name!r}")
    return KINDS[name][0](argv[1:])
