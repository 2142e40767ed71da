"""The tables of gpu_ranks.py: each figure is printed beside its aim, and the whole is kept as in docs/measurements."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Mapping
from importlib.metadata import version

import torch

from gapless.base.host import processor_says, usable_cores
from gapless.device import gpus
from gapless.device.facts import mps_runs

Key = tuple[str, int, str]
AIMS: dict[Key, str] = {
    ("sums", 2, "1 row"): "<= 3.5 us",
    ("sums", 2, "32 rows"): "<= 5 us",
    ("sums", 2, "256 rows"): "<= 16 us",
    ("late", 2, "replays ahead"): ">= 500",
    ("late", 2, "stop word to idle"): "<= 5 ms",
    ("tp", 2, "8B, 1 row"): ">= 1.7 x",
    ("tp", 2, "8B, 32 rows"): ">= 1.5 x",
    ("tp", 2, "8B, 256 rows"): ">= 1.4 x",
    ("tp", 2, "32B, 1 row"): ">= 1.7 x",
    ("tp", 2, "32B, 32 rows"): ">= 1.5 x",
    ("tp", 2, "32B, 256 rows"): ">= 1.4 x",
    ("tp", 2, "device idle"): "<= 2 %",
    ("peer", 2, "8B"): ">= 1.2 x",
    ("death", 2, "ready again"): "<= 15 s",
    ("death", 2, "failed streams"): "<= 0",
    ("pd", 2, "TTFT p99"): "<= 1 x",
    ("pd", 2, "ITL p99"): "<= 0.5 x",
    ("dp", 2, "tokens/s"): ">= 0.95 x",
    ("sums", 1, "1 row"): "<= 3.5 us",
    ("sums", 1, "32 rows"): "<= 4.5 us",
    ("sums", 1, "256 rows"): "<= 12 us",
    ("late", 1, "replays ahead"): ">= 500",
    ("late", 1, "stop word to idle"): "<= 5 ms",
    ("tp", 1, "0.6B, 1 row"): ">= 0.7 x",
    ("tp", 1, "0.6B, 32 rows"): ">= 0.7 x",
    ("tp", 1, "8B, 1 row"): ">= 0.87 x",
    ("tp", 1, "8B, 32 rows"): ">= 0.8 x",
    ("tp", 1, "device idle"): "<= 2 %",
    ("death", 1, "ready again"): "<= 15 s",
    ("death", 1, "failed streams"): "<= 0",
    ("dp", 1, "tokens/s"): ">= 0.95 x",
}
"""The aim of each figure, by the mode, the number of GPUs (1: all ranks share it) and the figure's name."""


def counted(rows: int) -> str:
    return f"{rows} row{'s' * (rows > 1)}"


def met(aim: str, found: float) -> bool:
    sign, value, *_ = aim.split()
    return found <= float(value) if sign == "<=" else found >= float(value)


def worst(aim: str, value: float, other: float | None) -> float:
    """Return the figure that is farther from the aim."""
    return value if other is None else (max if aim.startswith("<") else min)(value, other)


def gpus_used(options: Namespace, world: int) -> int:
    """Return the number of GPUs that some ranks use; 0 on processors."""
    return 0 if options.device == "cpu" else len(set((options.device_ids or [*range(world)])[:world]))


def machine(options: Namespace) -> str:
    """Return the names of the hardware, the driver and the versions of torch and Triton."""
    parts = [f"{usable_cores()} cores of {processor_says('model name')}", f"torch {torch.__version__}"]
    if options.device == "cuda":
        names = [name for name, _ in gpus()]
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(asked, capture_output=True, text=True).stdout.split()[:1]
        shared = " under MPS" if mps_runs() else ""
        parts = [f"{len(names)} {names[0]}{shared}", *(f"driver {one}" for one in driver), *parts]
        parts.append(f"Triton {version('triton')}")
    return ", ".join(parts)


class Table:
    """Rows of one mode, which are printed, and written with the machine, the date and the command if a file is named.

    A row may bring a figure that has an aim; of several such figures the record has the worst.
    """

    def __init__(self, options: Namespace, *head: str) -> None:
        self._options, self._file, self._machine = options, options.json, machine(options)
        self.head, self.rows, self.found = [*head, "aim"], list[list[str]](), dict[Key, float]()
        print(f"{options.only}: {self._machine}", flush=True)
        self._print(self.head)
        self._print(["---", *["---:"] * (len(self.head) - 1)])

    def row(self, *cells: object, world: int = 2, found: Mapping[str, float] = {}) -> None:
        """Add a row of `world` ranks; `found` has the figures that may have an aim, by their names."""
        verdicts, gpus = [], gpus_used(self._options, world)
        for what, value in found.items() if gpus > 1 or world <= 2 else ():  # more on one GPU have no aim
            key = (self._options.only, gpus, what)
            if aim := AIMS.get(key):
                verdicts.append(f"{aim}: {'met' if met(aim, value) else 'missed'}")
                self._note(key, aim, value)
        self.rows.append([*map(str, cells), ", ".join(verdicts)])
        self._print(self.rows[-1])
        self._write()

    def _note(self, key: Key, aim: str, value: float) -> None:
        self.found[key] = worst(aim, round(value, 4), self.found.get(key))

    def _print(self, cells: list[str]) -> None:
        print("| " + " | ".join(cells) + " |", flush=True)

    def _write(self) -> None:
        """Write after each row, so that a run which is stopped leaves what it has."""
        if self._file is None:
            return
        words = [word for word in sys.argv[1:] if word not in ("--json", str(self._file))]
        record = {
            "command": f"python benchmarks/gpu_ranks.py {shlex.join(words)}", "machine": self._machine,
            "date": time.strftime("%Y-%m-%d"), "head": self.head, "rows": self.rows,
            "found": [[*key, value] for key, value in self.found.items()],
        }  # fmt: skip
        listed = {name: isinstance(value, list) and name != "head" for name, value in record.items()}
        parts = [
            "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]" if listed[name] and value else json.dumps(value)
            for name, value in record.items()
        ]
        lines = [f' "{name}": {part}' for name, part in zip(record, parts, strict=True)]
        self._file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
