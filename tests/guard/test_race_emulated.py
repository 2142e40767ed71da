"""Plain torch.cuda programs over emulated streams: races are found although everything runs at once and in order."""

from __future__ import annotations

import threading

import pytest
import torch

from gapless import guard
from gapless.guard.emulate import emulated_cuda
from gapless.guard.patches import Patches

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here, so nothing is emulated")


PROGRAM = """
import threading, torch

compute = torch.cuda.current_stream()
side = torch.cuda.Stream(priority=-1)

def settle():
    torch.cuda.synchronize()

def a_kernel_that_fills_is_one_too(wait):
    x = torch.zeros(4, device="cuda")
    if wait:
        side.wait_stream(compute)
    with torch.cuda.stream(side):
        x.add_(1)  # RACES

def an_upload_that_does_not_wait(wait):
    host = torch.ones(4, pin_memory=True)
    x = host.to("cuda", non_blocking=True)
    if wait:
        compute.synchronize()
    host.fill_(3)  # RACES

def a_download_that_does_not_wait(wait):
    x = torch.ones(4, device="cuda")
    home = x.to("cpu", non_blocking=True)
    if wait:
        event = torch.cuda.Event()
        event.record()
        while not event.query():
            pass
    home.tolist()  # RACES

def a_thread_reads_a_download_too_soon(wait):
    home, done = torch.zeros(4, pin_memory=True), torch.cuda.Event()
    home.copy_(torch.ones(4, device="cuda"), non_blocking=True)
    done.record()
    def read():
        if wait:
            done.synchronize()
        home.numpy().sum()  # RACES
    thread = threading.Thread(target=read)
    thread.start()
    thread.join()

def a_thread_begins_on_the_default_stream(wait):
    x = torch.zeros(4, device="cuda")
    settle()
    def work():
        torch.cuda.set_stream(side if wait else None)
        x.add_(1)  # RACES
    with torch.cuda.stream(side):
        x.fill_(1)
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()

def generic_streams_and_events(wait):
    x = torch.zeros(4, device="cuda")
    stream, event = torch.Stream("cuda"), torch.Event("cuda")
    event.record()
    if wait:
        stream.wait_event(event)
    with stream:
        x.add_(1)  # RACES
    assert torch.cuda.current_stream() == compute

def memory_is_given_out_again(wait):
    x = torch.ones(4, device="cuda")
    side.wait_stream(compute)
    with torch.cuda.stream(side):
        x.add(1)
    if wait == 2:
        x.record_stream(side)
    del x
    if wait == 1:
        compute.wait_event(side.record_event())
    torch.empty(100, device="cuda")  # RACES

def memory_that_another_stream_writes_first_is_given_out_again(wait):
    x = torch.empty(4, device="cuda")
    with torch.cuda.stream(side):
        x.fill_(1)
    if wait:
        compute.wait_stream(side)
    del x
    torch.empty(100, device="cuda")  # RACES

def reading_a_list_waits(wait):
    home, x = torch.zeros(4, pin_memory=True), torch.ones(4, device="cuda")
    home.copy_(x, non_blocking=True)
    if wait:
        x.tolist()
    home.tolist()  # RACES

def a_mask_counts_its_hits_first(wait):
    home, x = torch.zeros(4, pin_memory=True), torch.ones(4, device="cuda")
    mask = torch.ones(4, dtype=torch.bool, device="cuda")
    home.copy_(x, non_blocking=True)
    x[mask] if wait else x[:2]
    home.tolist()  # RACES

def repeats_of_a_known_number_do_not_wait(wait):
    home, x = torch.zeros(4, pin_memory=True), torch.ones(4, device="cuda")
    repeats = torch.ones(4, dtype=torch.int64, device="cuda")
    home.copy_(x, non_blocking=True)
    x.repeat_interleave(repeats, output_size=None if wait else 4)
    home.tolist()  # RACES

def an_assertion_on_the_device_does_not_wait(wait):
    home, x = torch.zeros(4, pin_memory=True), torch.ones(4, device="cuda")
    home.copy_(x, non_blocking=True)
    torch._assert_async(x.all())
    if wait:
        compute.synchronize()
    home.tolist()  # RACES

def inference(wait):
    with torch.inference_mode():
        x = torch.ones(4, device="cuda").reshape(2, 2)
        if wait:
            x.sum().item()
        with torch.cuda.stream(side):
            x @ x  # RACES

def inference_on_a_list(wait):
    with torch.inference_mode():
        x = torch.ones(4, device="cuda")
        if wait:
            side.wait_stream(compute)
        with torch.cuda.stream(side):
            torch.cat([x, x])  # RACES

def what_is_only_allocated_is_not_written():
    x = torch.empty(4, device="cuda")
    with torch.cuda.stream(side):
        x.fill_(1)
        assert x.tolist() == [1] * 4 and x.cpu().sum() == 4

def freed_memory_of_another_size_is_not_taken():
    for size, other in ((4, 1000), (1 << 20, 4)):  # too small, and kept with the large ones
        x = torch.ones(size, device="cuda")
        side.wait_stream(compute)
        with torch.cuda.stream(side):
            x.add(1)
        del x
        y = torch.empty(other, device="cuda")
        settle()

for program in list(globals().values()):
    if getattr(program, "__code__", None) and program.__code__.co_argcount and program is not settle:
        program(0); settle()
        program(1); settle()
memory_is_given_out_again(2); settle()
what_is_only_allocated_is_not_written(); settle()
freed_memory_of_another_size_is_not_taken()
"""


@pytest.fixture
def san(san_source):
    def started(source: str, *flags: str):
        code, _, out = san_source(source, "--detect", "race", "--device-tensors", "cuda", *flags)
        return code, out.err

    return started


def test_a_program_under_san_is_reported_where_it_races(san):
    code, report = san(PROGRAM)
    marked = [n for n, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# RACES")]
    found = [int(line.split("program.py:")[1].split(":")[0]) for line in report.splitlines() if ": race: " in line]
    assert code == 1 and sorted(found) == marked, report
    assert f"{len(marked)} reports at {len(marked)} sites" in report
    assert "stream cuda:0 default reuses the memory of" in report
    assert "call record_stream on it for cuda:0" in report and ".wait_event(event) before it" in report


TRAINING = """
import torch
model = torch.nn.Sequential(torch.nn.Embedding(50, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 50)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
loader, compute = torch.cuda.Stream(), torch.cuda.current_stream()
ring = [torch.zeros(2, 6, dtype=torch.long).pin_memory() for _ in range(2)]
copied = [torch.cuda.Event() for _ in ring]
losses = torch.zeros(6, device="cuda")

def fetch(step):
    slot = step % 2
    copied[slot].synchronize()
    ring[slot].random_(0, 50)
    with torch.cuda.stream(loader):
        batch = ring[slot].to("cuda", non_blocking=True)
        copied[slot].record()
    return batch

batch = fetch(0)
for step in range(6):
    compute.wait_stream(loader)
    batch.record_stream(compute)
    x, batch = batch, fetch(step + 1)
    loss = torch.nn.functional.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    losses[step : step + 1].copy_(loss.detach())
home = torch.zeros(6, pin_memory=True)
loader.wait_stream(compute)
with torch.cuda.stream(loader):
    home.copy_(losses, non_blocking=True)
loader.synchronize()
assert home.isfinite().all()
"""


@pytest.mark.parametrize(
    "without",
    [
        "", "copied[slot].synchronize()", "compute.wait_stream(loader)", "batch.record_stream(compute)",
        "loader.wait_stream(compute)", "loader.synchronize()",
    ],
)  # fmt: skip
def test_a_training_loop_that_loads_ahead(san, without):
    assert without in TRAINING
    code, report = san(TRAINING.replace(without, "pass") if without else TRAINING)
    assert (code, " race: " in report) == ((1, True) if without else (0, False)), report


def test_both_regions_of_a_program_report(san):
    source = """
import torch
from gapless import guard
with guard.no_sync(mode="record"), guard.no_race(track="all"):
    x = torch.zeros(4, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        x.add_(1)
"""
    code, report = san(source, "--regions")
    assert code == 1 and "program.py:7: race" in report, report


def test_programs_of_our_own_devices_act_as_their_streams(san):
    source = """
import torch
from gapless import guard
from gapless.testing.sim import SimDevice
device = SimDevice(seed=1)
x = guard.device_tensor(torch.zeros(4))
device.compute.launch(lambda: x.add_(1))
{fence}
device.token_out.launch(lambda: x.mul_(2))
device.drain()
device.close()
"""
    code, report = san(source.format(fence=""))
    assert code == 1 and "stream token_out, program <lambda>, writes" in report, report
    assert san(source.format(fence="device.token_out.after(device.compute.record())"))[0] == 0


def test_as_tensor_on_a_device_is_a_copy():
    with emulated_cuda(), guard.no_sync(mode="record"):
        host = torch.zeros(3)
        for made in (torch.as_tensor(host, device="cuda"), torch.as_tensor(host.numpy(), device="cuda")):
            made.fill_(1)
            assert made.is_cuda and not host.is_cuda and host.tolist() == [0, 0, 0]


def test_emulated_streams_are_equal_by_identity():
    with emulated_cuda():
        one, other = torch.cuda.Stream(), torch.cuda.Stream(priority=-1)
        default = torch.cuda.default_stream()
        assert len({one, other, default}) == 3 and one == torch.cuda.Stream(stream_id=one.stream_id)
        assert (default.cuda_stream, other.priority, one.device.type) == (0, -1, "cuda")
        assert torch.cuda.current_stream() == default
        with torch.cuda.stream(one), other:
            with torch.cuda.stream(None), torch.cuda.device(0):
                assert torch.cuda.current_stream() == other
            seen = []
            thread = threading.Thread(target=lambda: seen.append(torch.cuda.current_stream()))
            thread.start()
            thread.join()
            assert seen == [default]
        torch.cuda.set_stream(one)
    with emulated_cuda():
        assert torch.cuda.current_stream() == default


def test_events_are_timed_only_when_asked_for():
    with emulated_cuda():
        start, end, plain = (torch.cuda.Event(enable_timing=timed) for timed in (True, True, False))
        with pytest.raises(RuntimeError, match="be recorded"):
            start.elapsed_time(end)
        for event in (start, end, plain):
            event.record()
        assert start.elapsed_time(end) >= 0
        with pytest.raises(RuntimeError, match="enable_timing"):
            start.elapsed_time(plain)


def test_stand_ins_around_each_other_are_all_called():
    class Owner:
        def call(self) -> str:
            return "call"

    patches = Patches()
    for name in ("inner", "outer"):
        patches.stand_in(Owner, "call", lambda original, owner, name=name: f"{name} {original(owner)}")
    assert Owner().call() == "outer inner call"
    patches.close()
    assert Owner().call() == "call"
