"""The engine's own launch path under no_sync, with an empty allow list: no step waits for the device."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from guarded_children import filed
from harness import captures_at_once, check_at_rest, checksum_loop, run, script, sizes, tokens_of
from sharpest import sharpest
from tiny_models import tiny_config

from gapless import guard
from gapless.base.config import EngineConfig
from gapless.base.errors import DeviceError, EngineError
from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.device import CpuDevice
from gapless.engine.process_backend import ProcessBackend
from gapless.engine.wiring import build_core
from gapless.guard.marks import DEVICE_TENSORS
from gapless.step.packet import Packer
from gapless.testing.checksum import ChecksumModel
from gapless.testing.guarded import guarded, tensors_of
from gapless.testing.sim import SimDevice

TINY = tiny_config(vocab_size=128, intermediate_size=48, head_dim=8, max_position_embeddings=256, eos_token_id=1)

SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.1, "top_k": 2000},
    {"temperature": 1.0, "logprobs": 5, "prompt_logprobs": 1},
)


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_steps_of_the_checksum_model_pass_under_no_sync(kind, depth):
    steps = captured = 0
    with guarded() as checked:
        for seed in range(4):
            shape = sizes(seed)
            jobs = script(seed, shape.max_len)
            device = CpuDevice(threads=1) if kind == "cpu" else SimDevice(seed, maps_host=seed % 2 == 0)
            loop = checksum_loop(device, shape, depth, **(captures_at_once(shape) if seed % 2 else {}))
            run(loop, jobs)
            for job in jobs:
                job.check(f"seed {seed}")
            check_at_rest(loop)
            device.close()
            steps += loop.counters.steps
            captured += loop.counters.graph_steps
    assert checked.launched >= steps > 100 and captured > 20 * device.caps.captures and checked.trouble() == []


@pytest.mark.parametrize("kind", sharpest(["cpu", "sim"]))
def test_a_dense_model_passes_with_every_way_of_sampling(tmp_path, kind):
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    alone = generate(str(tmp_path), kind)
    with guarded() as checked:
        assert generate(str(tmp_path), kind) == alone
    assert checked.launched and checked.trouble() == []


def generate(directory: str, kind: str) -> dict[int, list[int]]:
    """Prompts of many lengths in small chunks, at depth 4, with all samplers in one batch and each alone."""
    config = EngineConfig(
        model=directory, load_format="dummy", device="cpu", depth="4", max_num_seqs=6, max_model_len=128,
        max_num_batched_tokens=24, kv_cache_memory_bytes=1 << 20,
    )  # fmt: skip
    core = build_core(config, CpuDevice(threads=1) if kind == "cpu" else SimDevice(0))
    rng = np.random.default_rng(0)
    tokens: dict[int, list[int]] = {}
    for key in range(2 * len(SAMPLING)):
        prompt = rng.integers(2, 120, int(rng.integers(1, 50))).astype(np.int32)
        params = SamplingParams(**SAMPLING[key % len(SAMPLING)], max_tokens=None, min_tokens=3 * (key % 2))
        floor = len(prompt) + 3 * (key % 2)
        core.submit(Request(key, prompt, params, key * 7919, (1, 5), floor, len(prompt) + 4 + key))
        if key < len(SAMPLING):
            tokens |= tokens_of(core)
    tokens |= tokens_of(core)
    core.close()
    assert len(tokens) == 2 * len(SAMPLING)
    return tokens


@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_a_sync_in_a_model_would_be_caught(kind, monkeypatch):
    """The check can fail: one host read in a forward ends the engine, and the error says where."""
    plain = ChecksumModel.forward

    def forward(self, inputs, plan, cache):
        longest = inputs.kv_lens.max().item()
        assert longest > 0
        return plain(self, inputs, plan, cache)

    monkeypatch.setattr(ChecksumModel, "forward", forward)
    device = CpuDevice(threads=1) if kind == "cpu" else SimDevice(0)
    with guarded() as checked, pytest.raises(DeviceError) as caught:
        run(checksum_loop(device, sizes(0), 2), script(0, 48))
    device.close()
    assert isinstance(caught.value.__cause__, guard.SyncError)
    assert [f.rule for f in checked.region.report.findings] == ["host-size"]
    assert "test_engine_under_no_sync.py:" in str(caught.value)


@pytest.mark.parametrize("kind", ["cpu", "sim"])
def test_a_sync_of_the_host_that_launches_would_be_caught(kind, tmp_path, monkeypatch):
    plain = Packer.write

    def write(self, *args):
        self.tables[0].tolist()
        return plain(self, *args)

    monkeypatch.setattr(Packer, "write", write)
    device = CpuDevice(threads=1) if kind == "cpu" else SimDevice(0)
    with guarded(), pytest.raises(guard.SyncError, match=r"test_engine_under_no_sync\.py:.* host-read"):
        loop = checksum_loop(device, sizes(0), 2)
        monkeypatch.setattr(Packer, "tables", loop.launcher.executor.program.tables, raising=False)
        run(loop, script(0, 48))
    device.close()


@pytest.mark.parametrize("kind", ["cpu", "sim"])
@pytest.mark.parametrize("copy", ["upload", "download"])
def test_a_blocking_copy_of_packet_or_tokens_would_be_caught(kind, copy, monkeypatch):
    device = CpuDevice(threads=1) if kind == "cpu" else SimDevice(0)
    device.caps = device.caps._replace(maps_host=False)
    where = device.compute if copy == "upload" else device
    monkeypatch.setattr(where, copy, lambda target, source: target.copy_(source))
    with guarded() as checked, pytest.raises((DeviceError, guard.SyncError)):
        try:
            run(checksum_loop(device, sizes(0), 2), script(0, 48))
        finally:
            device.close()  # a step behind it may still be running, and has to be checked too
    rule = "upload" if copy == "upload" else "copy-to-host"
    assert rule in {finding.rule for finding in checked.region.report.findings}


@pytest.mark.process
async def test_a_sync_in_a_child_process_would_be_caught(tmp_path, findings_of_children, monkeypatch):
    """A child that reads a token on the host, by tests/children: the engine dies, and the test gets the finding."""
    if "STEPS_UNDER_GUARD" not in os.environ:
        pytest.skip("children are not checked with --guard-steps off")
    monkeypatch.setenv("STEPS_PLANTED_SYNC", "1")
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    backend = ProcessBackend(
        EngineConfig(
            model=str(tmp_path), load_format="dummy", device="cpu", max_num_seqs=2, kv_cache_memory_bytes=1 << 20
        )
    )
    with pytest.raises(EngineError, match="SyncError"):
        await backend.start(None)
    await backend.close()
    (finding,) = filed(findings_of_children)
    assert "gapless.engine.worker" in finding and "guarded_children.py" in finding and "host-size" in finding


def test_every_tensor_of_a_step_counts_as_a_device_tensor():
    device = SimDevice(0, mood="eager")
    with guarded():
        loop = checksum_loop(device, sizes(0), 1)
        run(loop, script(0, 48))
    program = loop.launcher.executor.program
    held = list(tensors_of(program))
    assert len(held) == 11 and all(tensor in DEVICE_TENSORS for tensor in held)
    device.close()
