"""Holds the sanitizer's rules and programs against a real GPU: `PYTHONPATH=.:tests python tests/gpu/san_truth.py`.

Each form of the catalogue and each program of tests/guard/step_programs.py runs once warm, then behind products of
matrices that take some 30 ms. A call that waits for the device returns when these have ended, whatever it is; one that
only enqueues returns long before. Beside that time stand the lines that torch's sync debug mode reports, and those
that no_sync finds on this device. Races are held against the data: memory that is written, or read, too early has other
bytes than it should. Needs torch and a GPU; prints a line for each rule and every form that disagrees or is refused
(`--all`: every form), and ends with 1 where one disagrees whose rule is not listed in MAY_WAIT.
"""

from __future__ import annotations

import argparse
import copy
import gc
import io
import json
import pickle
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from gpu import callback_forms
from gpu.operator_forms import __file__ as forms_file
from gpu.operator_forms import forms
from guard.step_programs import PROGRAMS, Program, marked_lines
from guard.test_race_waits import NEVER_WAITS, SET_UP, WAITS, names_of_lines
from guard.test_sync_rules import CASES, Case, world_on
from torch._C import DisableTorchFunction

from gapless import guard
from gapless.guard.detectors import Detectors
from gapless.guard.short_calls import Unseen
from gapless.guard.sync_rules import RULES

BUSY_MS = 30
TRIES = 3
"""Runs of each form, of which the fastest counts: the first ones load kernels and take memory."""

MAY_WAIT = {
    "pageable-async": "a small copy is staged at once, a large one waits",
    "gapped-async": "packed first, into memory that is not pinned",
    "unpinned-download": "the driver may wait or not",
    "pinned-alloc": "a hit of the host allocator's cache does not wait",
    "empty-cache": "it waits where there is something to free",
    "allocator-growth": "cudaMalloc need not wait",
    "host-operand": "a device refuses it, or takes a number",
    "event-poll": "each query is short",
    "graph-capture": "capture waits where memory is freed",
    "gc-pause": "the host's own time",
}
"""Rules whose calls cost something else than a wait, or wait by circumstances; they are shown and not judged."""


BY_VERSION = (
    "y[host_mask] = 0.0",
    "half.prod(-1).sum().backward()",
    "nn.init.trunc_normal_(torch.empty(4, 6, **D))",
)
"""Lines that torch 2.13 on a CPU and 2.11 on an H200 compute by other operators: the first two wait in 2.11 alone, the
last in 2.13 alone. They are shown and not judged."""


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
    word: str = "waits"
    """What `waited` says that it did."""


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


def catalogue(load: Load) -> list[Truth]:
    """Measure the bad and the good form of every rule of the catalogue."""
    counts: dict[str, int] = {}
    rows = []
    for case in CASES:
        number = counts[case.rule] = counts.get(case.rule, 0) + 1
        rows += [_form(case, f"{case.rule} {number} {kind}", kind, load) for kind in ("bad", "good")]
    return rows


def _form(case: Case, name: str, kind: str, load: Load) -> Truth:
    w, form = world_on("cuda", pinned=True), case.bad if kind == "bad" else case.good
    expected = None if case.rule in MAY_WAIT else kind == "bad"
    return found_too(measured(name, case.rule, expected, lambda: form(w), load, form.__code__.co_filename))


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


def found_too(row: Truth) -> Truth:
    """Hold what no_sync finds against the wait as well: something for each wait, nothing without."""
    if row.fault or row.expected is None or row.expected == bool(row.found):
        return row
    return row._replace(fault="nothing is found" if row.expected else f"found {row.found}")


def collectives(load: Load) -> list[Truth]:
    """Measure collectives of one rank over NCCL, in this process.

    A barrier waits for its kernel, and objects travel as tensors whose sizes and bytes are copied to and from the host.
    A collective of tensors only enqueues: the current stream waits for it, not the host.
    """
    if not (dist.is_available() and dist.is_nccl_available()):
        print("skipped: collectives, since this torch has no NCCL", file=sys.stderr)
        return []
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    x = torch.ones(1024, device="cuda")
    bad: dict[str, Callable[[], Any]] = {
        "barrier": lambda: dist.barrier(),  # looked up when it is called: no_sync replaces it
        "all_gather_object": lambda: dist.all_gather_object([None], {"step": 1}),
        "broadcast_object_list": lambda: dist.broadcast_object_list([{"step": 1}], 0),
        "gather_object": lambda: dist.gather_object({"step": 1}, [None], 0),
        "scatter_object_list": lambda: dist.scatter_object_list([None], [{"step": 1}], 0),
    }
    good: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(x),
        "broadcast": lambda: dist.broadcast(x, 0),
        "work.wait": lambda: dist.all_reduce(x, async_op=True).wait(),
        "future.wait": lambda: dist.all_reduce(x, async_op=True).get_future().wait(),
        "work.is_completed": lambda: dist.all_reduce(x, async_op=True).is_completed(),
    }
    try:
        rows = [measured(f"{name}, bad", "collective", True, call, load, __file__) for name, call in bad.items()]
        rows += [measured(f"{name}, good", "collective", False, call, load, __file__) for name, call in good.items()]
    finally:
        dist.destroy_process_group()
    return [found_too(row) for row in rows]


def unseen_reads(load: Load) -> list[Truth]:
    """Measure a read of which torch's debug mode alone knows, as an extension makes it: past all modes of Python."""
    x = torch.ones(1024, device="cuda")

    def past_modes(read: bool) -> None:
        with DisableTorchFunction(), Unseen():
            total = x.sum()
            if read:
                total.item()

    rows = [
        measured("a read past the modes, bad", "device-sync", True, lambda: past_modes(True), load, __file__),
        measured("a sum past the modes, good", "device-sync", False, lambda: past_modes(False), load, __file__),
    ]
    rows += [measured(name, *form, load, callback_forms.__file__) for name, form in callback_forms.forms().items()]
    return [found_too(row) for row in rows]


def races(load: Load) -> list[Truth]:
    """Hold races over pinned memory that numpy writes and reads against what the bytes are in the end."""
    rows = []
    works = {"written by numpy": filled_again, "read by numpy": read_early}
    works |= {f"read by {name}": partial(taken_early, read) for name, read in OTHER_READS.items()}
    for name, work in works.items():
        for fenced in (False, True):
            torch.cuda.synchronize()
            wrong = work(load, fenced)
            with guard.no_race("record", track="all") as checker:
                work(load, fenced)
                torch.cuda.synchronize()
            found = sorted({race.rule for race in checker.races})
            full = f"pinned memory {name} {'after' if fenced else 'without'} its fence"
            rows.append(_judged(full, "race", not fenced, wrong, found, "wrong data"))
    return rows


def _judged(name: str, rule: str, expected: bool, did: bool, found: list[str], word: str) -> Truth:
    fault = "" if did == expected else f"expected {'' if expected else 'no '}{word}"
    return found_too(Truth(name, rule, expected, did, 0.0, [], found, fault, word))


def filled_again(load: Load | None, fenced: bool) -> bool:
    """Fill a staging buffer again after a copy from it was enqueued; return whether the copy took the new bytes."""
    staging, target = torch.zeros(4096).pin_memory(), torch.empty(4096, device="cuda")
    array, done = staging.numpy(), torch.cuda.Event()
    array[:] = 1
    if load is not None:
        load.queue()
    target.copy_(staging, non_blocking=True)
    done.record()
    if fenced:
        done.synchronize()
    array[:] = 2
    return bool((target.cpu() != 1).any())


def read_early(load: Load | None, fenced: bool) -> bool:
    """Read a download by numpy; return whether it was read before it had arrived."""
    source, target = torch.ones(4096, device="cuda"), torch.zeros(4096).pin_memory()
    array, done = target.numpy(), torch.cuda.Event()
    if load is not None:
        load.queue()
    target.copy_(source, non_blocking=True)
    done.record()
    if fenced:
        done.synchronize()
    early = bool((array[:] != 1).any())
    torch.cuda.synchronize()
    return early


def _saved(tensor: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(tensor, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file, weights_only=True)
    return loaded


OTHER_READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "torch.save": _saved,
    "pickle": lambda tensor: pickle.loads(pickle.dumps(tensor)),
    "copy.deepcopy": copy.deepcopy,
    "bytes": lambda tensor: torch.frombuffer(bytearray(bytes(tensor.numpy())), dtype=torch.float32),
    "a buffer": lambda tensor: torch.frombuffer(bytearray(b"".join([tensor.numpy()])), dtype=torch.float32),
    "numpy.array": lambda tensor: torch.from_numpy(np.array(tensor)),
    "storage": lambda tensor: torch.tensor(tensor.untyped_storage().tolist()).to(torch.uint8).view(torch.float32),
}
"""Ways to read a tensor on the host without an operator; each returns a copy of it."""


def taken_early(read: Callable[[torch.Tensor], torch.Tensor], load: Load | None, fenced: bool) -> bool:
    """Read a download in one of these ways; return whether it was read before it had arrived."""
    source, target = torch.ones(256, device="cuda"), torch.zeros(256).pin_memory()
    done = torch.cuda.Event()
    if load is not None:
        load.queue()
    target.copy_(source, non_blocking=True)
    done.record()
    if fenced:
        done.synchronize()
    early = bool((read(target) != 1).any())
    torch.cuda.synchronize()
    return early


def whole_programs() -> list[Truth]:
    """Hold two things that the detectors take for granted: a captured operator does not run, and a compiled function
    runs uncompiled, operator by operator."""
    x, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    x.add_(0)
    torch.cuda.synchronize()
    with guard.no_race("record", track="all") as checker:
        with torch.cuda.graph(graph):
            x.add_(1)
        torch.cuda.synchronize()
        ran = bool(x.any())
        graph.replay()
        torch.cuda.synchronize()
    found = [race.rule for race in checker.races]
    rows = [
        _judged("an operator under capture", "capture", False, ran, found, "runs at once"),
        _judged("an operator of a replay", "capture", False, not x.all(), found, "does not run"),
    ]
    for name, function, expected in (("reads", _reads, True), ("adds", _adds, False)):
        graphs: list[Any] = []

        def backend(module: Any, inputs: Any, made: list[Any] = graphs) -> Any:
            made.append(module)
            return module.forward

        with Detectors(["sync"]) as detectors:
            torch.compile(function, backend=backend)(x)
        found = [e.finding.rule for e in detectors.findings() if e.finding.rule in ("host-read", "device-sync")]
        row = Truth(
            f"a compiled function that {name}", "compiled", expected, bool(graphs), 0.0, [], found, "", "compiled"
        )
        rows.append(row._replace(fault="it was compiled") if graphs else found_too(row))
    return rows


def _reads(x: torch.Tensor) -> float:
    return float((x + 1).mean().item())


def _adds(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def lines_that_wait(load: Load) -> list[Truth]:
    """Measure the lines of which test_race_waits.py holds that they wait, or do not."""
    names, rows = names_of_lines(), []
    exec(SET_UP, names)
    for expected, lines in ((False, NEVER_WAITS), (True, WAITS)):
        for line in lines:
            code = compile(line, line, "exec")
            judged = None if line in BY_VERSION else expected
            rows.append(measured(line, "waits", judged, lambda code=code: exec(code, names), load, __file__))
    return rows


def memory_and_graphs(load: Load) -> list[Truth]:
    """Hold what the detector of races takes for granted of queries, freed memory and graphs."""
    x, event, side = torch.ones(1 << 20, device="cuda"), torch.cuda.Event(), torch.cuda.Stream()
    torch.cuda.synchronize()
    load.queue()
    event.record()
    passed = event.query() or torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    freed, at = torch.ones(1 << 20, device="cuda"), [0, 0, 0]
    at[0] = freed.data_ptr()
    freed.untyped_storage().resize_(0)
    other = torch.empty(1 << 20, device="cuda")
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for number, graph in enumerate(graphs):
        with torch.cuda.graph(graph, pool=graphs[0].pool() if number else None):
            made = x * 2
            at[1 + number] = made.data_ptr()
            x.add_(made.sum() * 0)
            del made
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        load.queue()
        graphs[0].replay()
    began = time.perf_counter()
    graphs[0].replay()
    torch.cuda.current_stream().synchronize()
    took = (time.perf_counter() - began) * 1e3
    torch.cuda.synchronize()
    claims = {
        "a query while the device is busy is true": (False, passed),
        "the memory of a resized storage is given out again": (True, other.data_ptr() == at[0]),
        "graphs of one pool use the same memory": (True, at[1] == at[2]),
        "a replay follows the last replay of its graph on another stream": (True, took > load.ms / 2),
    }
    return [
        Truth(name, "memory", expected, did, 0.0, [], [], "" if did == expected else f"it is {did}", "is so")
        for name, (expected, did) in claims.items()
    ]


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
        f"{row.word if row.waited else '-':6}{row.host_ms:8.2f} ms  torch {lines:10} no_sync {found}",
        row.fault or ("" if row.expected is not None else "(not judged)"),
    ]
    return " ".join(parts)


def by_rule(rows: list[Truth]) -> list[str]:
    """Return a line for each rule: its forms, and how many of the bad and of the good ones did as expected."""
    lines = [f"{'rule':20}{'forms':>6}{'bad':>10}{'good':>10}{'not judged':>12}{'refused':>9}{'disagree':>10}"]
    for rule in sorted({row.rule for row in rows}):
        mine = [row for row in rows if row.rule == rule]
        refused = [row for row in mine if row.fault and not is_fault(row)]
        parts = []
        for kind in (True, False):
            judged = [row for row in mine if row.expected is kind and row not in refused]
            parts.append(f"{sum(not row.fault for row in judged)} of {len(judged)}")
        others, faults = sum(row.expected is None and row not in refused for row in mine), sum(map(is_fault, mine))
        lines.append(f"{rule:20}{len(mine):6}{parts[0]:>10}{parts[1]:>10}{others:12}{len(refused):9}{faults:10}")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="print every form, not only those that disagree")
    parser.add_argument("--json", metavar="FILE", help="also write every row as JSON")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("skipped: torch sees no CUDA device", file=sys.stderr)
        return 0
    load = Load()
    rows = [*catalogue(load), *entry_points(load), *unseen_reads(load), *programs(load), *races(load)]
    rows += [measured(name, "operators", waits, call, load, forms_file) for name, (waits, call) in forms().items()]
    rows += [*whole_programs(), *collectives(load), *lines_that_wait(load), *memory_and_graphs(load)]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("\n".join(by_rule(rows)))
    print("\n".join(shown(row) for row in rows if options.all or row.fault))
    unseen = sorted(set(RULES) - {row.rule for row in rows})
    faults = [row for row in rows if is_fault(row)]
    refused = [row for row in rows if row.fault and not is_fault(row)]
    print(f"{len(rows)} forms, {len(faults)} disagree, {len(refused)} refused; rules without a form: {unseen}")
    if options.json:
        Path(options.json).write_text(json.dumps([row._asdict() for row in rows], indent=2) + "\n", encoding="utf-8")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
