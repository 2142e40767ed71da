"""CUDA by AcceleratorDevice alone (`--device accelerator:cuda`): the contract, graphs, and CudaDevice's tokens."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_contract import Contract
from harness import check_at_rest, checksum_loop, run, script, sizes
from tiny_models import tiny_config
from torch import Tensor
from torch_internals import spin

from gapless import LLM, SamplingParams
from gapless.base.config import EngineConfig
from gapless.base.errors import CaptureError, DeviceError
from gapless.base.records import Request
from gapless.device import AcceleratorDevice, CudaDevice, Device, device_class, open_device
from gapless.engine.wiring import build_core
from gapless.pace.load_gate import LoadGate

GENERAL = "accelerator:cuda"
LONG_CYCLES = 1_000_000_000
"""Keeps a GPU busy for about half a second."""
TINY = tiny_config(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, head_dim=32,
    max_position_embeddings=512, eos_token_id=1,
)  # fmt: skip


def opened(name: str) -> Iterator[Device]:
    device = open_device(name)
    yield device
    device.close()
    torch.cuda.synchronize()


@pytest.fixture
def device() -> Iterator[Device]:
    yield from opened(GENERAL)


@pytest.fixture(params=["cuda", GENERAL])
def capturing(request: pytest.FixtureRequest) -> Iterator[Device]:
    if not device_class(request.param).caps.captures:
        pytest.skip(f"{request.param} captures nothing with torch {torch.__version__}")
    yield from opened(request.param)


class TestGeneralContract(Contract):
    pass


def test_the_general_class_has_none_of_cudas_fast_ways(device: Device) -> None:
    assert isinstance(device, AcceleratorDevice) and not isinstance(device, CudaDevice)
    streams = (device.compute, device.token_out, device.bulk_out, device.bulk_in)
    assert all(type(stream.raw) is torch.Stream and not hasattr(stream, "cudart") for stream in streams)
    assert len({stream.raw.stream_id for stream in streams} | {0}) == 5


def test_ring_memory_of_the_general_class_is_pinned(device: Device) -> None:
    assert all(slot.tensor.is_pinned() for slot in device.ring(slots=2, nbytes=100).slots)
    memory = device.host_memory(3 << 20)
    assert memory.is_pinned() and memory.nbytes == 3 << 20 and memory.data_ptr() % 4096 == 0 and not memory.any()


def test_memory_of_the_general_class_is_the_gpus(device: Device) -> None:
    free, total = device.memory()
    assert total == torch.cuda.mem_get_info()[1] and 0 < free <= total
    before = device.allocations()
    device.run(lambda: torch.empty(256 << 20, dtype=torch.uint8, device="cuda"))
    assert device.allocations() >= before


def test_the_host_goes_on_while_a_kernel_runs_on_a_general_stream(device: Device) -> None:
    device.compute.launch(spin, LONG_CYCLES)
    fence = device.compute.record(timed=True)
    device.token_out.after(fence)
    behind = device.token_out.record()
    device.bulk_in.record().wait()
    assert not fence.done() and not behind.done()
    behind.wait()
    assert fence.done() and fence.time() <= device.clock()


def test_a_failure_wakes_a_wait_of_the_general_class_while_a_kernel_runs(device: Device) -> None:
    device.compute.launch(spin, LONG_CYCLES)
    fence = device.compute.record()
    timer = threading.Timer(0.05, device.fail, [TimeoutError("stalled")])
    timer.start()
    with pytest.raises(DeviceError, match="stalled"):
        fence.wait()
    assert not device.compute.raw.query(), "the kernel still ran when the wait ended"
    timer.join()


FAULT = """
import sys, torch
from gapless.base.errors import DeviceError
from gapless.device import open_device
device = open_device(sys.argv[1])
table, index = torch.zeros(4, device="cuda"), torch.tensor([9], device="cuda")
device.drain()
passed = device.compute.record()
passed.wait()
device.compute.launch(lambda: table[index])
try:
    device.compute.record().wait()
except DeviceError as error:
    print("FOUND", isinstance(error.__cause__, RuntimeError), passed.done(), error)
device.close()
"""


@pytest.mark.parametrize("name", ["cuda", GENERAL])
def test_a_kernel_that_fails_shows_at_the_next_fence(name: str) -> None:
    """In a process of its own: after such an error CUDA does nothing more."""
    command = [sys.executable, "-c", FAULT, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2])
    found = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    assert found and found[0].startswith("FOUND True True"), done.stdout + done.stderr
    assert "device-side assert" in found[0]


# Graphs, by both classes.


def changes(x: Tensor, total: Tensor, rows: Tensor, state: Tensor) -> None:
    """A program over given buffers whose kernels add in one order."""
    y = x.index_select(0, rows).mul_(0.5).add_(1)
    total.add_((y @ x.T).softmax(-1) @ y)
    x.copy_(torch.cat([x[:, 4:], y[:, :4]], -1))
    state.mul_(3).add_(rows).remainder_(1_000_003)


def buffers() -> list[Tensor]:
    make = torch.Generator().manual_seed(5)
    x, total = (torch.randn(8, 8, generator=make) for _ in range(2))
    rows = torch.randperm(8, generator=make)
    return [tensor.cuda() for tensor in (x, total, rows, torch.arange(8))]


def test_a_replay_on_cuda_equals_its_program_bit_for_bit(capturing: Device) -> None:
    mine, theirs = buffers(), buffers()
    graph = capturing.capture("changes", changes, tuple(mine))
    capturing.drain()
    for one, other in zip(mine, buffers(), strict=True):  # warm-up runs have changed them
        one.copy_(other)
    torch.cuda.synchronize()
    for turn in range(4):
        graph.launch(capturing.compute)
        capturing.run(changes, *theirs)
        assert all(map(torch.equal, mine, theirs)), f"after {turn + 1} replays"
        for x in (mine[0], theirs[0]):
            x.mul_(0.5).add_(turn)
        torch.cuda.synchronize()


def test_a_replay_on_cuda_keeps_the_order_of_streams(capturing: Device) -> None:
    x, seen = torch.ones(1, dtype=torch.int64, device="cuda"), torch.zeros(60, dtype=torch.int64, device="cuda")
    graph = capturing.capture("steps", lambda: x.mul_(3).add_(1).remainder_(1_000_003))
    capturing.run(x.fill_, 1)
    for turn in range(60):
        graph.launch(capturing.compute)
        capturing.token_out.after(capturing.compute.record())
        capturing.token_out.launch(lambda turn=turn: seen[turn : turn + 1].copy_(x))
        capturing.compute.after(capturing.token_out.record())
    capturing.drain()
    value, expected = 1, []
    for _ in range(60):
        value = (value * 3 + 1) % 1_000_003
        expected.append(value)
    assert seen.tolist() == expected


def test_a_capture_on_cuda_that_reads_is_refused_and_the_device_goes_on(capturing: Device) -> None:
    x = torch.ones(4, device="cuda")
    with pytest.raises(CaptureError, match="host-size"):
        capturing.capture("reads", lambda: x.add_(x.sum().item()))
    with pytest.raises(CaptureError, match="planted"):
        capturing.capture("raises", planted)
    graph = capturing.capture("adds", lambda: x.add_(1))
    capturing.run(x.fill_, 1)
    graph.launch(capturing.compute)
    capturing.drain()
    assert x.tolist() == [2] * 4


def planted() -> None:
    raise ArithmeticError("planted")


def test_graphs_on_cuda_share_a_pool_that_reserved_memory_fills(capturing: Device) -> None:
    capturing.reserve(64 << 20, 64 << 20)
    before = capturing.allocations()
    x = torch.ones(1 << 20, device="cuda")
    for number in range(4):
        capturing.capture(("adds", number), lambda: x.add_((x * 2).sum() * 0))
    assert capturing.allocations() - before <= 2, "x, and at most one more"


# The engine.


@pytest.mark.usefixtures("reserved_memory")
@pytest.mark.parametrize("depth", [1, 2, 4, 8])
def test_every_depth_of_the_general_class_equals_the_direct_computation(depth: int) -> None:
    for seed in range(6):
        shape = sizes(seed)
        jobs = script(seed, shape.max_len)
        device = open_device(GENERAL)
        loop = checksum_loop(device, shape, depth)
        device.drain()
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(loop, jobs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for job in jobs:
            job.check(f"seed {seed}")
        check_at_rest(loop)
        device.close()


def generate(directory: Path, device: str, depth: str, **options: Any) -> tuple[dict[int, list[int]], int]:
    """Return the tokens of some requests, greedy and drawn, and how many steps were replays."""
    config = EngineConfig(
        model=str(directory), load_format="dummy", device=device, depth=depth, max_num_seqs=16,
        kv_cache_memory_bytes=64 << 20, **options,
    )  # fmt: skip
    core = build_core(config)
    rng = np.random.default_rng(0)
    tokens: dict[int, list[int]] = {}
    for key in range(12):
        prompt = rng.integers(2, 500, int(rng.integers(1, 60))).astype(np.int32)
        params = SamplingParams(temperature=float(key % 2), top_p=0.9, top_k=20, max_tokens=None)
        core.submit(Request(key, prompt, params, key * 7919, (1,), 0, len(prompt) + 40))
        tokens[key] = []
    while core.has_work():
        for settled in core.step()[1]:
            for key, token, _ in settled.entries():
                tokens[key].append(token)
    replays = core.stats().steps.graph_steps
    core.close()
    return tokens, replays


@pytest.mark.usefixtures("reserved_memory")
@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
def test_the_general_class_gives_the_tokens_of_cuda_device_at_every_depth(tmp_path: Path, eager: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    torch.backends.cuda.matmul.allow_tf32 = False
    reference, _ = generate(tmp_path, "cuda", "1", enforce_eager=eager)
    assert sum(map(len, reference.values())) > 200
    captures = device_class(GENERAL).caps.captures and not eager
    for depth in ("1", "4", "auto"):
        tokens, replays = generate(tmp_path, GENERAL, depth, enforce_eager=eager)
        assert tokens == reference, f"depth {depth}"
        assert (replays > 10) == captures, f"depth {depth}: {replays} replays"


def test_the_embedded_model_gives_the_same_text_by_both_classes() -> None:
    params = [SamplingParams(temperature=t, seed=7, max_tokens=32, ignore_eos=True) for t in (0.0, 0.0, 0.9)]
    prompts = ["Once upon a time", "Mia has 14 pens", "The city is"]
    found = []
    for name in ("cuda", GENERAL):
        with LLM("demo", device=name, dtype="float32", max_model_len=256, kv_cache_memory_bytes=64 << 20) as llm:
            found.append([list(one.outputs[0].token_ids) for one in llm.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1]


@pytest.mark.parametrize("depth", ["1", "auto"])
def test_the_general_class_loads_prompts_that_the_device_gave_up(depth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoadGate, "pays", lambda *_: True)
    greedy = SamplingParams(temperature=0, max_tokens=8)
    prompts = [word + "The quick brown fox jumps over the lazy dog near the river bank. " * 10 for word in "abcd"]
    options = {"device": GENERAL, "dtype": "float32", "depth": depth, "max_model_len": 512}
    found = []
    for tiers in ((), ("host:64MiB",)):
        with LLM("demo", num_gpu_blocks_override=40, kv_tiers=tiers, **options) as llm:
            rounds = [llm.generate(prompt, greedy, use_tqdm=False)[0] for prompt in prompts * 2]
        found.append([output.outputs[0].token_ids for output in rounds])
    assert found[0] == found[1]
    assert all(output.num_cached_tokens > 256 for output in rounds[4:])
