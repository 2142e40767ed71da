"""Tables of the manual that follow from measurements: `python docs/_site/tables.py` rewrites them in docs/*.md.

A page marks the place of a table with `<!-- table: NAME -->` and `<!-- end -->`. What lies between them is made here
from the JSON in docs/measurements; a test fails when it is not what this script writes.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(DOCS.parent), str(DOCS.parent / "benchmarks")]

from peer_table import aims_table, figures_table, latency_table, ratio_table  # noqa: E402
from peers import merged  # noqa: E402

_MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
Lines = Sequence[str]


def refreshed(page: str) -> str:
    """Return the text of a page with every marked table made again."""
    return _MARKED.sub(lambda found: f"{found[1]}\n" + "\n".join(TABLES[found[2]]()).strip() + f"\n\n{found[3]}", page)


def pages() -> Iterator[Path]:
    """Yield the pages that have a marked table."""
    for path in sorted(DOCS.glob("*.md")):
        if _MARKED.search(path.read_text(encoding="utf-8")):
            yield path


def _load(*names: str) -> Any:
    found = [json.loads((DOCS / "measurements" / f"{name}.json").read_text(encoding="utf-8")) for name in names]
    return found[0] if len(found) == 1 else merged(found)


def peers_cuda() -> Lines:
    """Served beside vLLM on a GPU: medians of the rounds, times in milliseconds."""
    lines = ["| load | tokens/s | ratio | TPOT p50 | TTFT p50 | TTFT p99 | ITL p99 |", "|---|---|---|---|---|---|---|"]
    for load, sides in _load("peers-cuda").items():
        ours, peer = sides.values()
        both = [
            _pair(ours, peer, lambda run, name=name, at=at: run[f"{name}_ms"][at])
            for name, at in (("tpot", "p50"), ("ttft", "p50"), ("ttft", "p99"), ("itl", "p99"))
        ]
        rate: Callable[[Any], float] = lambda run: run["output_tok_s"]  # noqa: E731
        lines.append("| " + " | ".join((load, _pair(ours, peer, rate), _ratio(ours, peer, rate), *both)) + " |")
    return lines


def peers_amx() -> Lines:
    """Beside vLLM's CPU build on a processor with AMX: medians of the rounds, times in milliseconds."""
    figures = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
    lines = ["| load | tokens/s | ratio | TTFT p50 | TTFT p99 | ITL p50 | ITL p99 | rounds |", "|---|---|---|---|---|---|---|---|"]
    for name in ("peers-amx", "peers-amx-mixed"):
        for case in _load(name)["cases"]:
            ours, peer = case["runs"].values()
            rate, *times = (_pair(ours, peer, lambda run, figure=figure: run[figure]) for figure in figures)
            load = f"{case['concurrency']} at a time" + (", mixed lengths" if case["kind"] == "mixed" else "")
            ratio = _ratio(ours, peer, lambda run: run["output_throughput"])
            lines.append("| " + " | ".join((load, rate, ratio, *times, str(len(ours)))) + " |")
    return lines


def depth_cuda() -> Lines:
    """Depth auto beside depth 1 in process on a GPU: medians of the rounds after the first."""
    loads: dict[str, dict[str, list[Any]]] = {}
    for run in _load("gpu_all"):
        load = run["load"]
        of = f" of {load['requests']}" if load["requests"] else ""
        name = f"{load['rows']}{of}, {load['prompt']} in, {load['output']:,} out"
        loads.setdefault(name, {}).setdefault(run["arm"].removeprefix("depth "), []).append(run)
    lines = [
        "| load | depth | tokens/s | step, us | host, us | device idle | auto / 1 |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for load, arms in loads.items():
        auto, one = arms.values()
        ratios = sorted(a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(auto, one, strict=True))
        for arm, runs in arms.items():
            middle = {key: statistics.median(run[key] for run in runs) for key in ("tokens_per_s", "step_us", "host_us", "idle")}
            last = ", ".join(f"{ratio:.2f}" for ratio in ratios) if arm == "auto" else ""
            cells = (f"{middle['tokens_per_s']:,.0f}", f"{middle['step_us']:,.0f}", f"{middle['host_us']:.0f}", f"{middle['idle']:.1%}")
            lines.append("| " + " | ".join((load if arm == "auto" else "", arm, *cells, last)) + " |")
    return lines


def lanes_cuda() -> Lines:
    """Tokens/s of a batch in which one row asks, divided by those of the batch without it."""
    found: dict[str, dict[int, float]] = {}
    for entry in _load("gpu_lanes")["batch"]:
        found.setdefault(entry["asks"], {})[entry["rows"]] = entry["ratio"]
    rows = sorted({row for ratios in found.values() for row in ratios})
    lines = ["| one row asks for | " + " | ".join(f"{row} rows" for row in rows) + " |", "|---|" + "---:|" * len(rows)]
    return lines + [f"| {asks} | " + " | ".join(f"{ratios[row]:.3f}" for row in rows) + " |" for asks, ratios in found.items()]


def _pair(ours: Lines, peer: Lines, figure: Callable[[Any], float]) -> str:
    return " : ".join(_short(statistics.median(map(figure, runs))) for runs in (ours, peer))


def _ratio(ours: Lines, peer: Lines, figure: Callable[[Any], float]) -> str:
    ratios = sorted(figure(one) / figure(other) for one, other in zip(ours, peer, strict=True))
    return f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}..{ratios[-1]:.2f}]"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


TABLES: dict[str, Callable[[], Lines]] = {
    "peers-aims": lambda: aims_table(_load("peers", "peers-small-32")),
    "peers-figures": lambda: figures_table(_load("peers")),
    "peers-rows": lambda: latency_table(_load("peers-rows-32", "peers-rows-8")),
    "peers-rows-ratios": lambda: ratio_table(_load("peers-rows-32", "peers-rows-8")),
    "peers-cuda": peers_cuda,
    "peers-amx": peers_amx,
    "depth-cuda": depth_cuda,
    "lanes-cuda": lanes_cuda,
}


def main() -> None:
    """Rewrite the marked tables of every page."""
    for path in pages():
        path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
