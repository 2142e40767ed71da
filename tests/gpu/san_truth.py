"""Holds the sanitizer's rules and programs against a real GPU: `PYTHONPATH=.:tests python tests/gpu/san_truth.py`.

Each form of the catalogue and each program of tests/guard/step_programs.py runs once warm, then behind products of
matrices that take some 30 ms. A call that waits for the device returns when these have ended, whatever it is; one that
only enqueues returns long before. Beside that time stand the lines that torch's sync debug mode reports, and those
that no_sync finds on this device. Needs torch and a GPU; prints a table and what disagrees, and ends with 1 where
something disagrees that is not listed in MAY_WAIT.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from guard.step_programs import PROGRAMS, Program, marked_lines
from guard.test_sync_rules import CASES, Case, World

from gapless import guard
from gapless.guard.sync_rules import RULES

BUSY_MS = 30
TRIES = 3
"""Runs of each form, of which the fastest counts: the first ones load kernels and take memory."""

MAY_WAIT = {
    "pageable-async": "a small copy is staged at once, a large one waits",
    "gapped-async": "packed first, into memory that is not pinned",
    "unpinned-download": "the driver may wait or not",
    "pinned-alloc": "a hit of the host allocator's cache does not wait",
    "record-stream": "it costs memory, not time",
    "empty-cache": "it waits where there is something to free",
    "allocator-growth": "cudaMalloc need not wait",
    "host-operand": "a device refuses it, or takes a number",
    "event-poll": "each query is short",
    "collective": "a barrier of one rank",
    "graph-capture": "capture waits where memory is freed",
    "gc-pause": "the host's own time",
}
"""Rules whose calls cost something else than a wait, or wait by circumstances; they are shown and not judged."""


class Truth(NamedTuple):
    """What one form did. `expected` is None where the rule is not judged."""

    name: str
    rule: str
    expected: bool | None
    waited: bool
    host_ms: float
    torch_lines: list[int]
    """Lines of the file that torch's sync debug mode reports; -1 for a line elsewhere."""
    found: list[str]
    """Rules that no_sync finds on this device."""
    fault: str = ""


class Load:
    """Work that keeps the device busy for at least BUSY_MS, and takes no time to queue."""

    def __init__(self) -> None:
        self._x = torch.randn(8192, 8192, device="cuda")
        self._out = torch.empty_like(self._x)
        self._times = 1
        self.ms = self._measured()
        self._times = 1 + int(BUSY_MS / self.ms)
        self.ms = self._measured()

    def queue(self) -> None:
        for _ in range(self._times):
            torch.mm(self._x, self._x, out=self._out)

    def _measured(self) -> float:
        took = 0.0
        for _ in range(2):  # the first time loads the kernel
            torch.cuda.synchronize()
            began = time.perf_counter()
            self.queue()
            torch.cuda.synchronize()
            took = (time.perf_counter() - began) * 1e3
        return took


def host_ms(step: Callable[[], Any], load: Load) -> float:
    """Return the time that a call takes on the host while the device is busy: the least of some tries."""
    times = []
    for _ in range(TRIES):
        torch.cuda.synchronize()
        load.queue()
        began = time.perf_counter()
        step()
        times.append((time.perf_counter() - began) * 1e3)
    torch.cuda.synchronize()
    return min(times)


def torch_lines(step: Callable[[], Any], file: str) -> list[int]:
    """Return the lines of a file in which torch's sync debug mode reports waits; -1 for any elsewhere."""
    lines = set()

    def seen(message: Any, *args: Any, **kwargs: Any) -> None:
        if "called a synchronizing CUDA operation" in str(message):
            frame = sys._getframe()
            while frame is not None and frame.f_code.co_filename != file:
                frame = frame.f_back
            lines.add(frame.f_lineno if frame is not None else -1)

    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = seen
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sorted(lines)


def found_rules(step: Callable[[], Any]) -> list[tuple[str, int]]:
    """Return what no_sync finds on this device: rules and lines. What memory grows by, and slow calls, are left out."""
    with guard.no_sync(mode="record", slow_ms=0) as region:
        step()
    return [(one.rule, one.user.line) for one in region.report.findings if one.rule != "allocator-growth"]


def measured(name: str, rule: str, expected: bool | None, step: Callable[[], Any], load: Load, file: str) -> Truth:
    try:
        step()
        took = host_ms(step, load)
        lines = torch_lines(step, file)
        found = found_rules(step)
    except Exception as error:  # a form that a device refuses is a result too
        torch.cuda.synchronize()
        said = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
        return Truth(name, rule, None, False, 0.0, [], [], f"refused: {said}")
    waited = took > load.ms / 2
    fault = "" if expected is None or waited == expected else f"expected {'a' if expected else 'no'} wait"
    return Truth(name, rule, expected, waited, round(took, 2), lines, sorted({rule for rule, _ in found}), fault)


def world() -> World:
    x = torch.arange(6.0, device="cuda")
    return World(
        x, torch.ones(4, 3, device="cuda"), torch.tensor([1, 2], device="cuda"), x > 2, torch.tensor(2, device="cuda"),
        torch.zeros(6), torch.tensor([1, 2]), torch.zeros(12).pin_memory(), torch.zeros(6).pin_memory(),
    )  # fmt: skip


def catalogue(load: Load) -> list[Truth]:
    """Measure the bad and the good form of every rule of the catalogue."""
    counts: dict[str, int] = {}
    rows = []
    for case in CASES:
        number = counts[case.rule] = counts.get(case.rule, 0) + 1
        rows += [_form(case, f"{case.rule} {number} {kind}", kind, load) for kind in ("bad", "good")]
    return rows


def _form(case: Case, name: str, kind: str, load: Load) -> Truth:
    w, form = world(), case.bad if kind == "bad" else case.good
    expected = None if case.rule in MAY_WAIT else kind == "bad"
    return measured(name, case.rule, expected, lambda: form(w), load, form.__code__.co_filename)


def entry_points(load: Load) -> list[Truth]:
    """Measure the rules that have no form in the catalogue: entry points of torch.cuda, and full launch queues."""
    x, event, side = torch.zeros(1 << 20, device="cuda"), torch.cuda.Event(), torch.cuda.Stream()

    def capture() -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.add_(1)

    def recorded() -> torch.cuda.Event:
        event.record()
        return event

    def launches() -> None:
        for _ in range(2000):
            x[:4].add_(1)

    forms: dict[str, tuple[str, Callable[[], Any]]] = {
        "event.synchronize": ("event-wait", lambda: recorded().synchronize()),
        "event.query": ("event-poll", lambda: recorded().query()),
        "cuda.synchronize": ("stream-wait", torch.cuda.synchronize),
        "stream.synchronize": ("stream-wait", lambda: torch.cuda.current_stream().synchronize()),
        "another stream's synchronize": ("", side.synchronize),
        "wait_event": ("", lambda: side.wait_event(recorded())),
        "empty_cache": ("empty-cache", torch.cuda.empty_cache),
        "a new block of memory": ("allocator-growth", lambda: torch.empty(1 << 28, device="cuda")),
        "capture of a graph": ("graph-capture", capture),
        "2000 launches": ("slow-call", launches),
        "a full collection": ("gc-pause", gc.collect),
    }
    rows = []
    for name, (rule, call) in forms.items():
        expected = None if rule in MAY_WAIT else rule != ""
        rows.append(measured(name, rule or "none", expected, call, load, __file__))
    return rows


def programs(load: Load) -> list[Truth]:
    """Measure every program, and compare its marked lines with those that torch and no_sync find."""
    return [_program(program, load) for program in PROGRAMS]


def _program(program: Program, load: Load) -> Truth:
    marks = marked_lines(program)
    steps = program("cuda")
    next(steps)
    file = program.__code__.co_filename
    expected = any(kind != "costs" for kind in marks.values())
    judged = None if marks and not expected else expected
    row = measured(program.__name__, "program", judged, lambda: next(steps), load, file)
    if row.fault:
        return row
    faults = []
    torchs = sorted(line for line, kind in marks.items() if kind == "waits")
    if [line for line in row.torch_lines if line > 0] != torchs and expected:
        faults.append(f"torch reports lines {row.torch_lines}, marked are {torchs}")
    ours = sorted({line for _, line in found_rules(lambda: next(steps))})
    if ours != sorted(marks):
        faults.append(f"no_sync finds lines {ours}, marked are {sorted(marks)}")
    return row._replace(fault="; ".join(faults))


def is_fault(row: Truth) -> bool:
    return bool(row.fault) and not row.fault.startswith("refused")


def shown(row: Truth) -> str:
    """Return a line of the table."""
    lines, found = ",".join(map(str, row.torch_lines)) or "-", ",".join(row.found) or "-"
    parts = [
        f"{'FAULT' if is_fault(row) else '':5} {row.name:50} {row.rule:18}",
        f"{'waits' if row.waited else '-':6}{row.host_ms:8.2f} ms  torch {lines:10} no_sync {found}",
        row.fault or ("" if row.expected is not None else "(not judged)"),
    ]
    return " ".join(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="also write every row as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: torch sees no CUDA device", file=sys.stderr)
        return 0
    load = Load()
    rows = [*catalogue(load), *entry_points(load), *programs(load)]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("\n".join(shown(row) for row in rows))
    unseen = sorted(set(RULES) - {row.rule for row in rows})
    faults = [row for row in rows if is_fault(row)]
    refused = [row for row in rows if row.fault and not is_fault(row)]
    print(f"{len(rows)} forms, {len(faults)} disagree, {len(refused)} refused; rules without a form: {unseen}")
    if options.json:
        Path(options.json).write_text(json.dumps([row._asdict() for row in rows], indent=2) + "\n", encoding="utf-8")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
