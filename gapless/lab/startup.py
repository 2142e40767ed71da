"""Measures the phases of a start, each in a fresh process, from its creation until the engine is ready.

`python -m gapless.lab.startup` is that process: engine arguments as JSON on its standard input, times on its output.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from gapless.base.config import DEMO_MODEL
from gapless.base.errors import ConfigError, EngineError, GaplessError, UserError

OTHER = "other"
TIMEOUT = 3600.0


class Start(NamedTuple):
    """One start: (what, seconds) in order, and the whole, from the creation of the process until it is ready."""

    phases: tuple[tuple[str, float], ...]
    total: float


def measure_start(options: Mapping[str, Any]) -> Start:
    """Start an engine in a fresh process and let it end. Raises ConfigError or EngineError with its last words."""
    begin = time.time()
    command = [sys.executable, "-m", "gapless.lab.startup"]
    child = subprocess.run(
        command, input=json.dumps({"begin": begin, "options": options}), capture_output=True, text=True, timeout=TIMEOUT
    )
    lines = child.stdout.splitlines()
    if child.returncode or not lines:
        words = (child.stderr.strip().splitlines() or ["it said nothing"])[-1]
        kind = ConfigError if child.returncode == 2 else EngineError
        raise kind(f"the engine did not start: {words}")
    reported = json.loads(lines[-1])
    phases = tuple((str(what), float(seconds)) for what, seconds in reported["phases"])
    rest = reported["total"] - sum(seconds for _, seconds in phases)
    return Start((*phases, (OTHER, rest)), float(reported["total"]))


def measure_starts(options: Mapping[str, Any], count: int, advance: Callable[[int], None]) -> list[Start]:
    starts = []
    for done in range(count):
        starts.append(measure_start(options))
        advance(done + 1)
    return starts


def table(starts: Sequence[Start]) -> list[str]:
    """A row a phase: the first start (its files may be read from the disk), and the median of the others."""
    names = list(dict.fromkeys(what for start in starts for what, _ in start.phases))
    rows = [(what, [dict(start.phases).get(what, 0.0) for start in starts]) for what in names]
    rows.append(("ready", [start.total for start in starts]))
    whole = _middle(rows[-1][1])
    lines = [f"{'phase':<28}{'first s':>10}{'then s':>10}{'min':>10}{'max':>10}{'share':>8}"]
    for what, seconds in rows:
        later = seconds[1:] or seconds
        lines.append(
            f"{what:<28}{seconds[0]:>10.3f}{_middle(seconds):>10.3f}{min(later):>10.3f}{max(later):>10.3f}"
            f"{_middle(seconds) / whole if whole else 0.0:>8.0%}"
        )
    return lines


def _middle(seconds: Sequence[float]) -> float:
    return statistics.median(seconds[1:] or seconds)


def startup_json(starts: Sequence[Start]) -> dict[str, Any]:
    totals = [start.total for start in starts]
    return {
        "startup_times": totals,
        "avg_startup_time": statistics.fmean(totals),
        "phases": [dict(start.phases) for start in starts],
    }


def _child() -> int:
    """Times by the wall clock: its parent took the first one."""
    asked = json.load(sys.stdin)
    entered = time.time()
    from gapless.engine.arguments import make_config
    from gapless.engine.build import build_core
    from gapless.engine.frontdoor import locate, open_assets
    from gapless.engine.llm import LLM

    imported = time.time()
    try:
        config, commit = locate(make_config(asked["options"].pop("model", DEMO_MODEL), asked["options"]))
        front = open_assets(config, commit)
        opened = time.time()
        with LLM(config.model, core=build_core(config), front=front) as llm:
            ready = time.time()
            phases = [("interpreter", entered - asked["begin"]), ("imports", imported - entered)]
            phases += [("tokenizer and template", opened - imported), *llm.info.startup_seconds]
    except GaplessError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    print(json.dumps({"phases": phases, "total": ready - asked["begin"]}))
    return 0


if __name__ == "__main__":
    sys.exit(_child())
