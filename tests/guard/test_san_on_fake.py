"""The detectors on a real asynchronous device that is neither CPU nor CUDA: the fake accelerator of gapless.testing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from fake_accelerator import child_environment
from test_kinds import HERE, header, marked

from gapless import guard
from gapless.guard import backends, present
from gapless.guard.detectors import Detectors
from gapless.testing import fake

pytestmark = pytest.mark.fake

KINDS = [
    "callbacks/clamped_function",
    "callbacks/named_tensor",
    "callbacks/nan_mode",
    "callbacks/quantized_weight",
    "orders/polled_results",
    "orders/served_result",
    "orders/woken_by_flag",
    "pinned/moved_by_to",
    "pinned/staging_per_step",
    "reads/block_digest",
    "reads/logprobs_to_worker",
    "reads/page_frames",
    "reads/weight_shards",
    "shape_by_copy",
    "waits/lists_copied",
    "waits/offloaded_storage",
    "waits/query_ignored",
    "waits/recorded_storage",
    "waits/resized_storage",
    "waits/resized_tensor",
]
"""The pairs of kinds that make sense on any device, and whose operators the fake has."""

SPELLINGS = (
    (r"torch\.cuda\.stream\(([^()]*(?:\(\))?)\)", r"\1"),
    (r"torch\.cuda\.Stream\(\)", 'torch.Stream("fake")'),
    (r"torch\.cuda\.Event\(\w*(?:=True)?\)", 'torch.Event("fake")'),
    (r"torch\.cuda\.(current_stream|synchronize)", r"torch.accelerator.\1"),
    (r"(\w[\w.]*)\.is_cuda", r'(\1.device.type == "fake")'),
    (r"\.cuda\(\)", '.to("fake")'),
    (r'"cuda(:0)?"', '"fake"'),
)
"""What programs spell for CUDA, and the same for any device."""


@pytest.fixture(autouse=True)
def device(monkeypatch) -> Iterator[None]:
    fake.load()
    monkeypatch.setattr(present, "CHOSEN", [])
    yield
    fake.delays(None)
    torch.accelerator.synchronize()


def respelled(name: str, folder: Path) -> Path:
    """Write a program of tests/guard/kinds for the fake; its lines stay where they are."""
    text = (HERE / name).read_text(encoding="utf-8")
    for pattern, instead in SPELLINGS:
        text = re.sub(pattern, instead, text)
    program = folder / Path(name).name
    program.write_text(text, encoding="utf-8")
    return program


@pytest.mark.parametrize("name", KINDS)
def test_a_pair_of_programs_has_its_findings_on_the_fake(name, san_file, tmp_path):
    fake.delays(1, 0, lazy=True)  # streams do nothing before the host waits, or has asked some times
    for part in ("bad", "good"):
        program = HERE / f"{name}_{part}.py"
        path = respelled(f"{name}_{part}.py", tmp_path)
        _, report, out = san_file(path, "--device", "fake", args=tuple(header(program, "args").split()))
        assert not report["incomplete"], out.err
        found = {(one["line"], one["rule"]) for one in report["findings"]}
        assert found == marked(program), out.err


class Form(NamedTuple):
    """A call, and how it came out."""

    name: str
    waited: bool
    rules: list[str]


class World:
    """What the forms use."""

    def __init__(self) -> None:
        fake_ = {"device": "fake"}
        self.x = torch.arange(1.0, 7.0, **fake_)
        self.table = torch.ones(4, 3, **fake_)
        self.index = torch.tensor([1, 2], **fake_)
        self.mask = self.x > 2
        self.two = torch.tensor(2, **fake_)
        self.host = torch.arange(6.0)
        self.pinned = torch.zeros(6, pin_memory=True)
        self.gapped = torch.zeros(12, pin_memory=True)[::2]
        self.stream = torch.Stream("fake")
        self.event, self.late = torch.Event("fake"), torch.Event("fake")


def read_by(function: Callable[[Any], Any]) -> Callable[[World], Any]:
    return lambda w: function(w.two)


def copied(source: str, target: str, non_blocking: bool) -> Callable[[World], Any]:
    return lambda w: getattr(w, target).copy_(getattr(w, source), non_blocking=non_blocking)


def assigned(w: World, index: Any, value: Any) -> None:
    w.x[index] = value


def on_side(w: World) -> None:
    w.stream.wait_stream(torch.accelerator.current_stream())
    with w.stream:
        w.x.add_(1)


FORMS: dict[str, Callable[[World], Any]] = {
    # Reads.
    **{f"{function.__name__}(t)": read_by(function) for function in (int, float, bool, str, repr, complex)},
    "item": lambda w: w.x[0].item(),
    "tolist": lambda w: w.x.tolist(),
    "max().item()": lambda w: w.x.max().item(),
    "equal": lambda w: torch.equal(w.x, w.x + 1),
    "allclose": lambda w: torch.allclose(w.x, w.x + 1),
    "is_nonzero": lambda w: torch.is_nonzero(w.two),
    "a slice bound": lambda w: w.x[: w.two],
    "range": lambda w: range(w.two),
    "a list's index": lambda w: [1, 2, 3][w.two],
    # Copies.
    "cpu": lambda w: w.x.cpu(),
    'to("cpu")': lambda w: w.x.to("cpu"),
    'to("cpu"), another type': lambda w: w.x.to("cpu", torch.float64),
    "type of the CPU": lambda w: w.x.type(torch.FloatTensor),
    "to(fake)": lambda w: w.host.to("fake"),
    "to(device, dtype)": lambda w: w.host.to("fake", torch.float16),
    "to(fake) of pinned memory, blocking": lambda w: w.pinned.to("fake"),
    "to(fake) of pinned memory": lambda w: w.pinned.to("fake", non_blocking=True),
    "a copy to the host": copied("x", "host", False),
    "a copy from the host": copied("host", "x", False),
    "a copy to pinned memory, blocking": copied("x", "pinned", False),
    "a copy to pinned memory": copied("x", "pinned", True),
    "a copy from pinned memory": copied("pinned", "x", True),
    "a copy to pageable memory": copied("x", "host", True),
    "a copy from pageable memory": copied("host", "x", True),
    "a copy from memory with gaps": copied("gapped", "x", True),
    "a copy on the device": lambda w: w.x.copy_(w.x + 1),
    # New tensors.
    "tensor of a list": lambda w: torch.tensor([1, 2], device="fake"),
    "as_tensor of a list": lambda w: torch.as_tensor([1, 2], device="fake"),
    "new_tensor": lambda w: w.x.new_tensor([1.0, 2.0]),
    "zeros": lambda w: torch.zeros(4, device="fake"),
    "full": lambda w: torch.full((4,), 2.0, device="fake"),
    "arange": lambda w: torch.arange(4, device="fake"),
    "empty_like": lambda w: torch.empty_like(w.x),
    "new_zeros": lambda w: w.x.new_zeros(3),
    # Indexing.
    "x[list]": lambda w: w.x[[1, 2]],
    "x[host index]": lambda w: w.x[torch.tensor([1, 2])],
    "x[index]": lambda w: w.x[w.index],
    "x[mask]": lambda w: w.x[w.mask],
    "x[1:3]": lambda w: w.x[1:3].add(1),
    "x[1] = number": lambda w: assigned(w, 1, 0.5),
    "x[1:2] = number": lambda w: assigned(w, slice(1, 2), 0.5),
    "x[index] = number": lambda w: assigned(w, w.index, 0.5),
    "x[mask] = number": lambda w: assigned(w, w.mask, 0.5),
    "masked_fill_": lambda w: w.x.masked_fill_(w.mask, 0.5),
    "index_fill_": lambda w: w.x.index_fill_(0, w.index, 0.5),
    "where": lambda w: torch.where(w.mask, w.x, -w.x),
    "index_select": lambda w: w.table.index_select(0, w.index),
    # Sizes that the data decides.
    "nonzero": lambda w: w.x.nonzero(),
    "where(mask)": lambda w: torch.where(w.mask),
    "masked_select": lambda w: w.x.masked_select(w.mask),
    "unique": lambda w: w.x.unique(),
    "bincount": lambda w: w.index.bincount(),
    "repeat_interleave": lambda w: w.x[:2].repeat_interleave(w.index),
    "repeat_interleave, sized": lambda w: w.x[:2].repeat_interleave(w.index, output_size=3),
    # Arithmetic.
    "add": lambda w: w.x + 1,
    "matmul": lambda w: w.table @ w.table.T,
    "sum": lambda w: w.x.sum(),
    "softmax": lambda w: w.x.softmax(0),
    "sort": lambda w: w.x.sort(),
    "topk": lambda w: w.x.topk(2),
    "cumsum": lambda w: w.x.cumsum(0),
    "fill_": lambda w: w.x.fill_(1),
    # Streams, events and the device.
    "Event.synchronize": lambda w: w.late.synchronize(),
    "Event.query": lambda w: w.late.query(),
    "Event.record": lambda w: w.event.record(),
    "Event.wait": lambda w: w.late.wait(w.stream),
    "Stream.synchronize": lambda w: torch.accelerator.current_stream().synchronize(),
    "Stream.wait_stream": on_side,
    "accelerator.synchronize": lambda w: torch.accelerator.synchronize(),
    "fake.synchronize": lambda w: torch.fake.synchronize(),
    "accelerator.empty_cache": lambda w: torch.accelerator.empty_cache(),
}


def measured(name: str, call: Callable[[World], Any]) -> Form:
    """Return whether the host waits in a call, and what no_sync says of it."""
    world = World()
    call(world)  # what a first call sets up is no part of it
    torch.accelerator.synchronize()
    fake.hold(True)
    try:
        world.table.add_(1)
        world.late.record()
        call(world)
        waited = world.late.query()
    finally:
        fake.hold(False)
        torch.accelerator.synchronize()
    with guard.no_sync(mode="record", slow_ms=0) as region:
        call(world)
    torch.accelerator.synchronize()
    return Form(name, waited, [one.rule for one in region.report.findings if one.rule != "allocator-growth"])


OTHERWISE = {
    "x[mask] = number": "its index_put_ needs no number of hits, as that of a GPU does",
    "repeat_interleave, sized": "it has one kernel, which counts",
    "a copy from memory with gaps": "its copies read memory with gaps as it is",
}
"""Forms in which the fake differs from the devices that the rules are made for, in the one way or the other."""


@pytest.mark.parametrize("name", FORMS)
def test_a_call_is_a_finding_exactly_if_the_host_waits_in_it(name):
    form = measured(name, FORMS[name])
    assert (bool(form.rules) == form.waited) is (name not in OTHERWISE), form


@pytest.mark.parametrize("index", [[0, 2], np.array([0, 2]), ([0, 2], slice(1))], ids=["list", "array", "tuple"])
def test_an_index_of_host_data_is_one_finding(index):
    world = World()
    with guard.no_sync(mode="record", slow_ms=0) as region:
        world.x[index] if not isinstance(index, tuple) else world.table[index]
        assigned(world, [0, 2], 0.5)
    assert [finding.rule for finding in region.report.findings] == ["index-by-host"] * 2


def test_the_table_has_calls_of_both_kinds():
    found = [measured(name, FORMS[name]).waited for name in ("add", "item", "cpu", "a copy to pinned memory")]
    assert found == [False, True, True, False]


PROGRAM = """
import multiprocessing
import torch

def child():
    print(torch.ones(2, device="fake").sum().item(), flush=True)

if __name__ == "__main__":
    torch.fake.delays(3)
    x, pinned = torch.ones(4, device="fake"), torch.zeros(4, pin_memory=True)
    pinned.copy_(x, non_blocking=True)
    done = torch.accelerator.current_stream().record_event()
    print(x.sum().item(), flush=True)
    done.synchronize()
    print(pinned.tolist(), flush=True)
    other = multiprocessing.get_context("spawn").Process(target=child)
    other.start()
    other.join()
"""


@pytest.mark.process
def test_san_runs_a_program_on_the_fake_and_its_children_in_processes_of_their_own(tmp_path):
    program, out = tmp_path / "program.py", tmp_path / "report.json"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "gapless.cli.main", "san", "--device", "fake", "--json", str(out), "--"]
    done = subprocess.run(
        [*command, "python", str(program)], cwd=tmp_path, env=child_environment(PYTHONPATH=os.pathsep.join(sys.path)),
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    report = json.loads(out.read_text())
    found = {(one["line"], one["rule"]) for one in report["findings"]}
    assert (done.returncode, found) == (1, {(6, "host-size"), (13, "host-size"), (14, "event-wait")}), done.stderr
    assert done.stdout == "4.0\n[1.0, 1.0, 1.0, 1.0]\n2.0\n" and report["watched"]["device_tensors"]


def test_san_emulates_no_cuda_where_torch_has_an_accelerator(san_source):
    named = "import torch\nx = torch.ones(2, device='cuda' if torch.cuda.is_available() else 'fake')\nx.tolist()\n"
    _, report, out = san_source(named)
    assert "it is emulated" not in out.err and [one["line"] for one in report["findings"]] == [3], out.err


TESTS = """
import subprocess, sys

import pytest
import torch
import work

from gapless.testing import fake


@pytest.fixture(autouse=True)
def device():
    fake.load()


def test_it():
    work.reads(torch.ones(2, device="fake"))


def test_child():
    subprocess.run([sys.executable, "child.py"], check=True)
"""
CHILD = """
import torch
from gapless.testing import fake

fake.load()
torch.ones(2, device="fake").sum().item()
"""


@pytest.mark.process
def test_pytest_watches_the_fake_and_children_if_it_is_named_and_refuses_it_beside_cuda(tmp_path):
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "child.py").write_text(CHILD)
    (tmp_path / "work.py").write_text("def reads(x):\n    return x.tolist()\n")
    command = [sys.executable, "-m", "pytest", "-p", "gapless.guard.pytest_plugin", "-p", "no:cacheprovider", "-q"]
    env = child_environment(PYTHONPATH=os.pathsep.join(sys.path), PYTEST_DISABLE_PLUGIN_AUTOLOAD="1")
    for name in ("CI", "PYTEST_XDIST_WORKER"):
        env.pop(name, None)
    found = []
    for more in (["--gapless-san-device", "fake"], []):
        done = subprocess.run(
            [*command, "--gapless-san", *more], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200,
            check=False,
        )  # fmt: skip
        found.append(done.stdout + done.stderr)
    assert "1 x work.py:2: host-read" in found[0] and "1 x child.py:6: host-size" in found[0], found[0]
    assert (
        "torch.fake beside an emulated CUDA: give --device fake, or --gapless-san-device fake to pytest" in found[1]
    ), found[1]


def test_a_backend_that_the_program_registers_is_named_as_not_watched(monkeypatch, capsys):
    monkeypatch.delattr(torch, "fake")
    with Detectors(["sync"]):
        torch._register_device_module("fake", fake)
    assert "torch.fake was registered by the program, and is not watched" in capsys.readouterr().err


def test_classes_of_torch_are_as_before_after_a_region():
    owners = (torch.Stream, torch.Event, torch.accelerator, torch.fake)
    before = [{name: value for name, value in vars(owner).items() if callable(value)} for owner in owners]
    with guard.no_sync(mode="record"), guard.no_race("record", track="all"):
        torch.ones(2, device="fake").sum()
        assert torch.Stream.synchronize is not before[0]["synchronize"]
    after = [{name: value for name, value in vars(owner).items() if callable(value)} for owner in owners]
    assert after == before


def test_an_event_of_a_dead_id_has_no_clock_of_the_one_before():
    with guard.no_race("record", track="all") as checker:
        stream = torch.Stream("fake")
        x = torch.zeros(4, device="fake")
        stream.wait_stream(torch.accelerator.current_stream())
        for _ in range(3000):
            event = torch.Event("fake")
            event.record(stream)
            del event
        with stream:
            x.add_(1)
        fresh = torch.Event("fake")
        fresh.synchronize()  # never recorded: it orders nothing
        x.add_(1)
    assert [one.rule for one in checker.races] == ["race"]


def test_the_advice_for_a_race_names_calls_of_torch_s_streams():
    with guard.no_race("record", track="all") as checker:
        side, x = torch.Stream("fake"), torch.ones(4, device="fake")
        with side:
            x + 1
    torch.accelerator.synchronize()
    (found,) = checker.races
    assert re.search(r"fake:0 \S+\.wait_event\(event\) before it", found.finding().text()), found


class GraphWithoutPool:
    """A graph as Gaudi's bridge has it (graphs.py): no `pool`, and a `replay` with an argument."""

    def __init__(self) -> None:
        self.graph = fake.Graph()

    def replay(self, asynchronous=False) -> None:
        self.graph.replay()


@pytest.mark.parametrize("how", [{}, {"asynchronous": True}])
def test_a_graph_without_a_pool_is_replayed_under_no_race(how, monkeypatch):
    monkeypatch.setattr(fake, "HPUGraph", GraphWithoutPool, raising=False)
    monkeypatch.setitem(backends.KINDS_OF_DEVICES, "fake", backends.backend("fake")._replace(graphs=("HPUGraph",)))
    made, side, x = GraphWithoutPool(), torch.Stream("fake"), torch.ones(4, device="fake")
    torch.accelerator.synchronize()
    with side:
        made.graph.capture_begin()
        x.add_(1)
        made.graph.capture_end()
    with guard.no_race("record", track="all") as checker, side:
        made.replay(**how)
        made.replay(**how)
    torch.accelerator.synchronize()
    assert x.tolist() == [3] * 4 and not checker.races
