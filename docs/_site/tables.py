"""Tables of the manual that follow from measurements and registries: `python docs/_site/tables.py` rewrites them.

A page of docs/, or README.md, marks the place of a table with `<!-- table: NAME -->` and `<!-- end -->`. This script
makes what is between them from the JSON in docs/measurements, or from the package; a test fails when a page differs
from what it writes.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from types import UnionType
from typing import Any

DOCS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(DOCS.parent), str(DOCS.parent / "benchmarks")]

from peer_table import aims_table, ratio_table, row  # noqa: E402
from peers import merged  # noqa: E402
from rank_table import AIMS, met, worst  # noqa: E402

from gapless.base.config import NEEDS_ONE_RANK, EngineConfig  # noqa: E402
from gapless.base.params import PARAMS, Param  # noqa: E402
from gapless.base.variables import OTHERS, OWN_VARIABLES  # noqa: E402
from gapless.cli.spec import Spec, specs  # noqa: E402
from gapless.device import CudaDevice  # noqa: E402
from gapless.device.accelerators import ACCELERATORS  # noqa: E402
from gapless.pace.constants import constants  # noqa: E402

_MARKED = re.compile(r"<!-- table: (\S+) -->\n(\n?).*?<!-- end -->", re.DOTALL)
Lines = list[str]


def refreshed(page: str) -> str:
    """Return the text of a page with every marked table made again."""
    return _MARKED.sub(lambda found: _marked(found[1], found[2]), page)


def _marked(name: str, blank: str) -> str:
    """Return a table between its marks, with or without blank lines beside them, as the page has it."""
    text = "\n".join(TABLES[name]()).strip()
    return f"<!-- table: {name} -->\n{blank}{text}\n{blank}<!-- end -->"


def pages() -> Iterator[Path]:
    """Yield the pages that have a marked table."""
    for path in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]:
        if _MARKED.search(path.read_text(encoding="utf-8")):
            yield path


def _load(*names: str) -> Any:
    found = [json.loads((DOCS / "measurements" / f"{name}.json").read_text(encoding="utf-8")) for name in names]
    return found[0] if len(found) == 1 else merged(found)


def record(name: str) -> Lines:
    """A table that was measured once, under it the machine, the date and the command."""
    kept = _load(name)
    return [*_head(*kept["head"]), *(row(*cells) for cells in kept["rows"]), "", _under(kept)]


def _under(kept: Any) -> str:
    """Return the line under a table: machine, date, command."""
    return f"{kept['machine'][0].upper()}{kept['machine'][1:]}; {kept['date']}; `{kept['command']}`."


def mutation() -> Lines:
    """The protections of the engine, three in a line, each with its hazard and the seeds until it is noticed."""
    kept = _load("mutation")
    cells = [f"{name} ({hazard}; {seeds})" for name, hazard, seeds in kept["rows"]]
    third = -(-len(cells) // 3)
    lines = _head(*["protection (hazard; seeds)"] * 3)
    columns = (cells[at : at + third] for at in range(0, len(cells), third))
    lines += [row(*found) for found in itertools.zip_longest(*columns, fillvalue="")]
    return [*lines, "", _under(kept)]


def peers_newest() -> Lines:
    """Beside vLLM on a GPU, the newest run: medians of the rounds, times in milliseconds."""
    kept = _load("peers-gpu-newest")
    wanted = ("tokens/s", "TTFT p50", "TTFT p99", "ITL p99")
    lines = _head("model", "load", "tokens/s", "ratio", "TTFT p50", "TTFT p99", "ITL p99", "rounds")
    for model, load, rounds, figures in kept["loads"]:
        found = (figures.get(name) for name in wanted)
        pairs = [f"{_short(both[0])} : {_short(both[1])}" if both else "" for both in found]
        lines.append(row(model, load, pairs[0], figures["tokens/s"][2], *pairs[1:], rounds))
    return [*lines, "", _under(kept)]


def peers_served(*names: str) -> Lines:
    """Beside vLLM, and llama.cpp where it took part: medians of the rounds, times in milliseconds."""
    figures = ("median_ttft_ms", "p99_ttft_ms", "median_itl_ms", "p99_itl_ms")
    lines = _head("load", "tokens/s", "ratio", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99", "rounds")
    for measured in map(_load, names):
        for case in measured["cases"]:
            ours = case["runs"]["ours"]
            for side, peer in case["runs"].items():
                if side == "ours":
                    continue
                times = (_pair(ours, peer, itemgetter(figure)) for figure in figures)
                rate = itemgetter("output_throughput")
                load = _named(case, measured["lengths"]) + ", beside llama.cpp" * (side == "llama")
                lines.append(row(load, _pair(ours, peer, rate), _ratio(ours, peer, rate), *times, len(ours)))
    return lines


def _named(case: Any, lengths: Sequence[int]) -> str:
    kind = case.get("kind", "plain")
    sizes = f"{lengths[0]} in, {lengths[1]} out" if kind == "plain" else "mixed lengths"
    return f"open loop, {sizes}" if kind == "open" else f"{case['concurrency']} at a time, {sizes}"


def readme_peers() -> Lines:
    """The README's table: one line for each machine, load and figure, beside vLLM."""
    lines = _head("machine", "load", "gapless", "vLLM", "ratio")
    for model, load, _, figures in _load("peers-gpu-newest")["loads"]:
        for figure in _NEWEST.get((model, load), ("tokens/s",)):
            ours, peer, ratio = figures[figure]
            unit = figure if figure == "tokens/s" else f"{figure}, ms"
            lines.append(row(f"one H200, {model}", f"{load}, {unit}", _short(ours), _short(peer), ratio))
    machines = (
        ("12 Intel Xeon cores with AMX", _load("peers-amx")),
        ("two Intel Xeon cores with AMX", _load("peers-amx-two-cores")),
        ("two AMD EPYC cores", _small_on_amd()),
        ("two Intel Xeon cores, kept to AVX2", _load("peers-avx2")),
    )
    for machine, measured in machines:
        for case in sorted(measured["cases"], key=itemgetter("concurrency")):
            ours, peer = (case["runs"][side] for side in ("ours", _vllm(case)))
            for figure, unit in _CPU_FIGURES[case["concurrency"]]:
                load = f"{_named(case, measured['lengths'])}, {unit}"
                lines.append(_beside(machine, load, ours, peer, itemgetter(figure)))
    return lines


_NEWEST = {
    ("0.6B", "1 at a time, 128 in, 256 out"): ("tokens/s", "TTFT p50"),
    ("0.6B", "256 at a time, 64 in, 256 out"): ("tokens/s", "TTFT p99"),
    ("8B", "256 at a time, 128 in, 256 out"): ("tokens/s", "ITL p99"),
}
"""Figures of the newest run on a GPU that stand in the README, where they are not tokens/s alone"""
_RATE = ("output_throughput", "tokens/s")
_TTFT = ("median_ttft_ms", "TTFT, ms")
_CPU_FIGURES = {1: (_RATE, _TTFT), 8: (_RATE,), 32: (_RATE, ("p99_itl_ms", "ITL p99, ms"))}


def _small_on_amd() -> Any:
    measured = _load("peers", "peers-small-32")
    return {**measured, "cases": [case for case in measured["cases"] if case["model"] == "small"]}


def _vllm(case: Any) -> str:
    return next(side for side in case["runs"] if side.startswith("vllm"))


def _beside(machine: str, load: str, ours: Any, peer: Any, figure: Callable[[Any], float]) -> str:
    sides = (_short(statistics.median(map(figure, runs))) for runs in (ours, peer))
    return row(machine, load, *sides, _ratio(ours, peer, figure) if len(ours) > 1 else _one_round(ours, peer, figure))


def _one_round(ours: Any, peer: Any, figure: Callable[[Any], float]) -> str:
    return f"{figure(ours[0]) / figure(peer[0]):.2f} (one round)"


def depth_cuda() -> Lines:
    """Depth auto beside depth 1 in process on a GPU: medians of the rounds after the first."""
    loads: dict[str, dict[str, list[Any]]] = {}
    for run in _load("gpu_all"):
        load = run["load"]
        of = f" of {load['requests']}" if load["requests"] else ""
        name = f"{load['rows']}{of}, {load['prompt']} in, {load['output']:,} out{', mixed' * load['mixed']}"
        loads.setdefault(name, {}).setdefault(run["arm"], []).append(run)
    lines = _head("load", "arm", "tokens/s", "step, us", "host, us", "device idle", "auto / 1")
    for load, arms in loads.items():
        auto, one = arms["depth auto"], arms["depth 1"]
        ratios = sorted(a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(auto, one, strict=True))
        lines.append(row(load, "depth auto", *_step_figures(auto), ", ".join(f"{ratio:.2f}" for ratio in ratios)))
        lines.append(row("", "depth 1", *_step_figures(one), ""))
    return lines


def _step_figures(runs: Sequence[Any]) -> list[str]:
    rate, step, host, idle = (
        statistics.median(run[key] for run in runs) for key in ("tokens_per_s", "step_us", "host_us", "idle")
    )
    return [f"{rate:,.0f}", f"{step:,.0f}", f"{host:.0f}", f"{100 * idle:.1f} %"]


def lanes_cuda() -> Lines:
    """Tokens/s of a batch in which one row asks, divided by those of the batch without it."""
    found: dict[str, dict[int, float]] = {}
    for entry in _load("gpu_lanes")["batch"]:
        found.setdefault(entry["asks"], {})[entry["rows"]] = entry["ratio"]
    sizes = sorted({size for ratios in found.values() for size in ratios})
    lines = _head("one row asks for", *(f"{size} rows" for size in sizes))
    return lines + [row(asks, *(f"{ratios[size]:.3f}" for size in sizes)) for asks, ratios in found.items()]


def speculation_cpu() -> Lines:
    """Tokens/s with drafts, divided by those without; of tasks also without the time up to the first token."""
    lines = _head("work", "rows", "ratio", "after the first token", "steps, without : with", "drafts that were right")
    for work in _load("speculation-cpu")["works"]:
        (without, drafted), right = work["steps"], work["accepted"] / max(1, work["drafts"])
        steps = f"{without:,} : {drafted:,}"
        after = f"{work['ratio_after_first']:.2f}" if "ratio_after_first" in work else ""
        lines.append(row(work["work"], work["rows"], f"{work['ratio']:.2f}", after, steps, f"{right:.0%}"))
    return lines


def structured_cuda() -> Lines:
    """Tokens/s of a batch in which some answers have a form, divided by those of the batch without any."""
    asked = ("rows", "tokens out", "with a form")
    lines = _head(*asked, "tokens/s without", "with", "ratio", "step, us", "rows held", "to a mask, us")
    for line in (batch for batch in _load("gpu_structured")["batches"] if batch["output"] == 512):
        none, some, (low, high) = line["none"], line["some"], line["range"]
        rates = (f"{arm['tokens_per_s']:,.0f}" for arm in (none, some))
        ratio, steps = (
            f"{line['ratio']:.3f} [{low:.2f}..{high:.2f}]",
            f"{none['step_us']:,.0f} : {some['step_us']:,.0f}",
        )
        share, held, mask = f"{line['share']:.0%}", f"{some['held']:.1%}", f"{some['mask_us']:,.0f}"
        lines.append(row(line["rows"], line["output"], share, *rates, ratio, steps, held, mask))
    return lines


def prompts_cuda() -> Lines:
    """Time to the first token by length of prompt, median / longest, right after a start."""
    edges = (10, 64, 256, 1024, 4096)
    spans = list(itertools.pairwise(edges))
    lines = _head("rows beside", "engine", "missed", *(f"{low:,} to {high - 1:,} tokens" for low, high in spans))
    for run in _load("gpu_prompts"):
        times = [[ms for tokens, ms in run["ttft_ms"] if low <= tokens < high] for low, high in spans]
        cells = (f"{statistics.median(found):.1f} / {max(found):.0f}" for found in times)
        arm = {"busy": "busy", "rest": "rests"}[run["arm"]]
        lines.append(row(run["beside"], arm, f"{run['missed']} of {len(run['ttft_ms'])}", *cells))
    return lines


def host_step() -> Lines:
    """Processor time of the host for one step, microseconds: 10th percentiles of windows of 32 steps."""
    measured = _load("host-step")
    lines = _head("rows", "one step a visit, us", "chains, us", "ratio", "steps of a visit")
    for found in measured["rows"]:
        times = (f"{found[name]:.0f}" for name in ("one", "auto"))
        lines.append(row(found["rows"], *times, f"{found['ratio']:.2f}", f"{found['visit']:.1f}"))
    command = "python benchmarks/host_step.py --chains --out docs/measurements/host-step.json"
    return [*lines, "", f"{measured['processor']}; {measured['date']}; `{command}`."]


def _head(*names: str) -> list[str]:
    return [row(*names), "|" + "---|" * len(names)]


def _pair(ours: Sequence[Any], peer: Sequence[Any], figure: Callable[[Any], float]) -> str:
    return " : ".join(_short(statistics.median(map(figure, runs))) for runs in (ours, peer))


def _ratio(ours: Sequence[Any], peer: Sequence[Any], figure: Callable[[Any], float]) -> str:
    ratios = sorted(figure(one) / figure(other) for one, other in zip(ours, peer, strict=True))
    return f"{statistics.median(ratios):.2f} [{ratios[0]:.2f}..{ratios[-1]:.2f}]"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def sampling(params: Sequence[Param] = PARAMS) -> Lines:
    """The parameters of a request, with their ranges."""
    lines = ["| name | type | range | default | meaning |", "|---|---|---|---|---|"]
    return lines + [f"| {' | '.join(_cells(entry))} |" for entry in params]


def models() -> Lines:
    """The architectures that tests run, by native family or the Transformers backend, and the refused ones."""
    sys.path[:0] = [str(DOCS.parent / "tests")]
    from model.transformers_rows import REFUSED, SERVED, class_name  # its rows need transformers

    from gapless.model.families import MODEL_FAMILIES

    with_mtp = ("MiMo", "Qwen")  # families with checkpoints that have such layers
    drafts = {name: "every method" if name.startswith(with_mtp) else "all but MTP" for name in MODEL_FAMILIES}
    native = {name: ("native", "yes", drafts[name]) for name in MODEL_FAMILIES}
    found = {class_name(row): ("transformers", "no", "histories and forms") for row in SERVED.values()} | native
    refused = {class_name(row): (f"refused: {why}", "", "") for row, why in REFUSED.values()}
    lines = _head("architecture", "computed by", "LoRA", "drafts")
    every = [*sorted(found.items()), *sorted((name, cells) for name, cells in refused.items() if name not in found)]
    return [*lines, *(row(f"`{name}`", *cells) for name, cells in every)]


def _cells(entry: Param) -> tuple[str, ...]:
    kind = entry.kind if isinstance(entry.kind, UnionType) else entry.kind.__name__
    kinds = re.sub(r"[a-z_.]+\.(?=[A-Z])", "", str(kind)).replace(" | None", "").replace(" | ", " or ")
    limits = "" if entry.low is None else f"{'above ' * entry.open_low}{_shown(entry.low)} to {_shown(entry.high)}"
    return f"`{entry.name}`", kinds, limits, _shown(entry.default), entry.doc


def _shown(value: object) -> str:
    known: dict[object, str] = {
        None: "none", 2**31 - 1: "2^31 - 1", 2**63 - 1: "2^63 - 1", -(2**63): "-2^63",
    }  # fmt: skip
    return known.get(value) or str(value).lower()


def engine_arguments() -> Lines:
    """The fields of EngineConfig, which LLM and AsyncLLM take as keyword arguments."""
    lines = _head("argument", "type", "default", "meaning")
    return lines + [
        row(f"`{spec.field}`", _type(spec), _default(spec), spec.help.replace("|", "\\|"))
        for spec in specs(EngineConfig)
    ]


def _type(spec: Spec) -> str:
    return " or ".join(f"`{choice}`" for choice in spec.choices) or f"{'list of ' * spec.many}{spec.kind.__name__}"


def _default(spec: Spec) -> str:
    return "" if spec.default in (None, ()) else f"`{spec.default!r}`".replace("'", '"')


def environment(known: Mapping[str, str]) -> Lines:
    """Return a table of the environment variables that set no flag."""
    return [*_head("variable", "effect"), *(row(f"`{name}`", effect) for name, effect in known.items())]


def tuning_constants() -> Lines:
    """The tuning constants, by module."""
    lines = _head("module", "constant", "value", "unit", "reason")
    for module, found in itertools.groupby(constants(), key=lambda one: one.module):
        for number, one in enumerate(found):
            first = "" if number else f"`{module}`"
            lines.append(row(first, f"`{one.name}`", f"`{one.value}`", one.unit, one.reason))
    return lines


def recorded_clients() -> Lines:
    """The clients whose requests are kept, and the routes that they ask."""
    lines = _head("recorded", "version", "routes")
    for path in sorted((DOCS.parent / "tests" / "clients" / "recorded").glob("*.json")):
        kept = json.loads(path.read_text(encoding="utf-8"))
        exchanges = [one for step in kept.get("steps", ()) for one in step["exchanges"]] or kept["exchanges"]
        routes = sorted({f"`{one['path'].partition('?')[0]}`" for one in exchanges if one["status"] == 200})
        lines.append(row(kept["requirement"].partition("==")[0], kept["version"], ", ".join(routes)))
    return lines


def accelerators() -> Lines:
    """Return the table of accelerators: the capabilities of each record, and the missing ones."""
    lines = _head("`--device`", "torch's type", "kernels", "captures", "streams", "has run", "missing")
    for record in (CudaDevice, *ACCELERATORS.values()):
        captures, run = ("no", "yes")[record.caps.captures], ("never", "yes")[record.has_run]
        streams, missing = "one" if record.one_queue else "four", "<br>".join(record.missing)
        lines.append(row(f"`{record.kind}`", record.torch_type, record.caps.kernels, captures, streams, run, missing))
    return lines


RECORDS = (
    "adapters", "front-cost", "kills", "kv-tiers", "load-client", "prefill-decode", "prompt-lookup", "race-faults",
    "sanitizer-program",
)  # fmt: skip
"""Tables that were measured once, by the names of their files in docs/measurements"""


RANKS = sorted(path.stem for path in (DOCS / "measurements").glob("ranks-*.json"))
"""Records of benchmarks/gpu_ranks.py"""


def rank_aims(several: bool) -> Lines:
    """Each question about ranks on one GPU, or on several, with its aims, and the worst figures that were found."""
    found: dict[tuple[str, int, str], float] = {}
    for *asked, value in (line for name in RANKS for line in _load(name)["found"]):
        key = (str(asked[0]), int(asked[1]), str(asked[2]))
        found[key] = worst(AIMS[key], value, found.get(key))
    lines = _head("`--only`", "GPUs", "aims", "found")
    chosen = [key for key in AIMS if (key[1] > 1) == several]
    for (mode, gpus), keys in itertools.groupby(chosen, key=itemgetter(0, 1)):
        aims, ran = [], []
        for key in keys:
            aims.append(f"{key[2]} {AIMS[key]}".replace("<=", "≤").replace(">=", "≥"))
            if key in found:
                ran.append(f"{key[2]} {found[key]:.3g}: {'met' if met(AIMS[key], found[key]) else 'missed'}")
        lines.append(row(f"`{mode}`", gpus, "; ".join(aims), "; ".join(ran) or "never run"))
    return lines


def refused_of_ranks() -> Lines:
    """The settings that several ranks do not serve."""
    return [*_head("refused", "because"), *(row(f"`{name}`", why) for name, _, why in NEEDS_ONE_RANK)]


TABLES: dict[str, Callable[[], Lines]] = {
    "peers-aims": lambda: aims_table(_load("peers", "peers-small-32")),
    "peers-rows-ratios": lambda: ratio_table(_load("peers-rows-32", "peers-rows-8")),
    "peers-avx2": lambda: peers_served("peers-avx2"),
    "peers-newest": peers_newest,
    "peers-gpu": lambda: peers_served("peers-gpu", "peers-gpu-256"),
    "peers-amx": lambda: peers_served("peers-amx", "peers-amx-mixed"),
    "peers-amx-two": lambda: peers_served("peers-amx-two-cores"),
    "readme-peers": readme_peers,
    "depth-cuda": depth_cuda,
    "prompts-cuda": prompts_cuda,
    "host-step": host_step,
    "structured-cuda": structured_cuda,
    "speculation-cpu": speculation_cpu,
    "lanes-cuda": lanes_cuda,
    "sampling": sampling,
    "engine-arguments": engine_arguments,
    "recorded-clients": recorded_clients,
    "environment-ours": lambda: environment(OWN_VARIABLES),
    "environment-others": lambda: environment(OTHERS),
    "models": models,
    "mutation": mutation,
    "constants": tuning_constants,
    "refused-of-ranks": refused_of_ranks,
    "accelerators": accelerators,
    "ranks-shared": lambda: rank_aims(several=False),
    "ranks-several": lambda: rank_aims(several=True),
    **{name: partial(record, name) for name in (*RECORDS, *RANKS)},
}


def main() -> None:
    """Rewrite the marked tables of every page."""
    for path in pages():
        path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
