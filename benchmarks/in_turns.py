"""Tokens/s of several engines in turns: other devices, other settings, or another copy of gapless.

`python benchmarks/in_turns.py --size 8B --arm cuda=device=cuda --arm general=device=accelerator:cuda` prints a table
for each count of rows. An arm is NAME=FIELD=VALUE,...: fields of EngineConfig, and `code=FOLDER` for another gapless.
Each arm is a process, which stays up; the rounds go through all of them, forwards and backwards. A ratio is the median
over the rounds of an arm's tokens/s by the first arm's of the same round, with the least and the largest.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MARK = "ANSWER "
COLUMNS = ("tokens_per_s", "step_us", "device_us", "host_us")


class Arm:
    """An engine in a process of its own."""

    def __init__(self, text: str, given: dict[str, Any], folder: Path) -> None:
        self.name, _, rest = text.partition("=")
        fields = dict(part.split("=", 1) for part in rest.split(",") if part)
        code = Path(fields.pop("code", ROOT)).resolve()
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(code), os.environ.get("PYTHONPATH", "")])}
        self.log = folder / f"{self.name}.txt"
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--engine", json.dumps(given | fields)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=errors, text=True, env=environment,
            )  # fmt: skip
        self.answers: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                self.answers.put(json.loads(line.removeprefix(MARK)))
        self.answers.put(None)

    def answer(self, seconds: float) -> Any:
        """Return the next answer; None if the process has ended or takes longer."""
        try:
            return self.answers.get(timeout=max(0.1, seconds))
        except queue.Empty:
            return None

    def ask(self, load: dict[str, int], seconds: float) -> Any:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps(load) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        return self.answer(seconds)

    def end(self) -> str:
        """End the process; return the last line that it logged."""
        self.process.kill()
        self.process.wait()
        lines = [line for line in self.log.read_text().splitlines() if line.strip()]
        return lines[-1] if lines else "it logged nothing"


def run_engine(given: dict[str, Any]) -> None:
    """Build an engine, and run each load of standard input."""
    from gpu_all import Load, drive

    from gapless.base.config import EngineConfig
    from gapless.engine.wiring import build_core

    begin = time.perf_counter()
    core = build_core(EngineConfig(**given))
    print(MARK + json.dumps({"start_s": time.perf_counter() - begin}), flush=True)
    for line in sys.stdin:
        load = json.loads(line)
        core.loop.log.forget()
        got = drive(core, Load(load["rows"], load["prompt"], load["output"]), load["seed"])
        for _ in range(8 if load["warm"] else 0):  # captures what the load has missed
            if core.has_work() or not core.rest():
                break
            while core.has_work():
                core.step()
        print(MARK + json.dumps(got._asdict()), flush=True)
    core.close()


def started(texts: list[str], given: dict[str, Any], folder: Path, seconds: float) -> list[Arm]:
    """Start the engines of all arms at the same time; return the arms whose engine is ready."""
    arms, end = [Arm(text, given, folder) for text in texts], time.monotonic() + seconds
    up = []
    for arm in arms:
        if ready := arm.answer(end - time.monotonic()):
            print(f"{arm.name}: started in {ready['start_s']:.1f} s", flush=True)
            up.append(arm)
        else:
            print(f"{arm.name}: did not start: {arm.end()}", flush=True)
    return up


def table(arms: list[Arm], rows: int, options: argparse.Namespace, end: float) -> list[dict[str, Any]]:
    found: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in arms}
    for turn in range(-options.warm, options.rounds):
        for arm in arms[:: -1 if turn % 2 else 1]:
            load = {"rows": rows, "prompt": options.prompt, "output": options.output, "seed": turn + 9}
            got = arm.ask(load | {"warm": turn < 0}, end - time.monotonic())
            if got is None:
                print(f"{arm.name}: no answer at {rows} rows, round {turn}: {arm.end()}", flush=True)
                arms.remove(arm)
            elif turn >= 0:
                found[arm.name].append(got)
        if not arms or time.monotonic() > end:
            break
    print(f"\n| {rows} rows | {' | '.join(COLUMNS)} | graphs | idle % | captures | by the first |\n|---|" + "---:|" * 8)
    first = next(iter(found.values()), [])
    for name, runs in found.items():
        if not runs:
            continue
        middle = [statistics.median(run[column] for run in runs) for column in COLUMNS]
        graphs, idle = (statistics.median(run[column] for run in runs) for column in ("graphs", "idle"))
        captures = sum(len(run["captures_ms"]) for run in runs)
        ratios = [one["tokens_per_s"] / other["tokens_per_s"] for one, other in zip(runs, first, strict=False)] or [0]
        cells = [name, *(f"{value:.0f}" for value in middle), f"{graphs:.2f}", f"{100 * idle:.1f}", str(captures)]
        cells.append(f"{statistics.median(ratios):.3f} [{min(ratios):.3f}..{max(ratios):.3f}]")
        print("| " + " | ".join(cells) + " |", flush=True)
    return [{"arm": name, "rows": rows, **run} for name, runs in found.items() for run in runs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arm", action="append", default=[])
    parser.add_argument("--size", help="a shape of shapes.py with random weights", default="0.6B")
    parser.add_argument("--model", help="a model with weights, instead of a size")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 32, 256])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--output", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--warm", type=int, default=2, help="rounds at the beginning that are not counted")
    parser.add_argument("--kv-mib", type=int, default=11 << 10)
    parser.add_argument("--seconds", type=float, default=500, help="limit for the whole run")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        run_engine(json.loads(options.engine))
        return
    from shapes import make_qwen

    end = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        given = {
            "model": options.model or str(make_qwen(Path(folder) / options.size, size=options.size)),
            "max_num_seqs": max(options.rows), "max_model_len": options.prompt + options.output,
            "max_num_batched_tokens": 8192, "kv_cache_memory_bytes": options.kv_mib << 20,
            "enable_prefix_caching": False,
        }  # fmt: skip
        given |= {} if options.model else {"load_format": "dummy", "dtype": "bfloat16"}
        arms = started(options.arm, given, Path(folder), options.seconds)
        results: list[dict[str, Any]] = []
        for rows in options.rows:
            results += table(arms, rows, options, end)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1))
        for arm in arms:
            arm.end()


if __name__ == "__main__":
    main()
