"""Rows of the class staging: a host buffer written again while the device still has to read it."""

from __future__ import annotations

import json

import pytest
import torch
from harness import checksum_loop
from scenes import (
    broken,
    collect,
    job,
    must_fail,
    one_batch_for_all,
    play,
    request,
    short_packets,
    tokens,
)

from gapless import guard
from gapless.base.config import EngineConfig
from gapless.engine import core
from gapless.loop.build import Sizes
from gapless.step.packet import Packer
from gapless.testing.sim import SimDevice, SimStream

pytestmark = pytest.mark.unguarded

SEEDS = range(6)
TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def test_row_005_a_warm_up_request_joins_the_protocol():
    """Idle ranks ran dummy steps that wrote the shared pinned buffers outside the protocol. Here a warm-up is a request
    like any other: one in the middle of eight steps in flight changes no tokens."""
    shape = Sizes(4, 40, 41, 4, 8, 64)

    def scene(warm_up):
        for seed in SEEDS:
            loop = checksum_loop(SimDevice(seed, "lazy"), shape, 8)
            short_packets(loop)
            jobs = [job(key, tokens(key, 9), 20) for key in range(3)]
            for one in jobs:
                loop.submit(one.request)
            settled = [item for _ in range(20) for item in warm(loop, warm_up)]
            while loop.has_work():
                settled += loop.turn().tokens
            for one in jobs:
                mine = [t for s in settled for k, t, _ in s.entries()
                        if k == one.request.key]  # fmt: skip
                assert mine == one.expected()

    def warm(loop, warm_up):
        found = loop.turn().tokens
        warm_up(loop)
        return found

    def as_a_request(loop):
        if core.WARM_UP_KEY not in loop.planner.by_key:
            loop.submit(request(core.WARM_UP_KEY, [0] * 8, 1, temperature=0.5, top_k=5))

    def outside(loop):
        slot = loop.launcher.executor.packets.slots[0]
        slot.array[:] = 0

    scene(as_a_request)
    with must_fail():
        scene(outside)


def test_row_006_the_fences_of_a_step_do_not_depend_on_the_depth():
    """The event that guards staging was made only when asynchronous scheduling was on, but another feature overlapped
    too. Here depth is a number: a step at depth 1 enqueues exactly what a step at depth 8 does, fences included."""

    def operations(depth):
        device = SimDevice(0, "eager")
        play(checksum_loop(device, Sizes(2, 32, 17, 4, 8, 8), depth), [job(1, tokens(1, 20), 8)])
        streams = {name for name, _, _ in device.trace}
        return {name: [what for stream, _, what in device.trace if stream == name] for name in streams}

    reference = operations(1)
    assert reference["token_out"][:2] == ["after compute", "Executor.copy_lines"]
    assert operations(2) == operations(8) == reference

    def only_when_asynchronous(stream, fence):
        if len(stream.queue) > 1:
            after(stream, fence)

    after = SimStream.after
    with broken(SimStream, "after", only_when_asynchronous):
        assert operations(2) == operations(8) == operations(1) == reference


@pytest.mark.seeds
def test_row_010_attention_metadata_belongs_to_its_step(tmp_path):
    """An attention backend kept its metadata in pinned buffers that the next steps rewrote. Here the host's part is a
    frozen record made for each step, and lengths and page tables come from device tables."""

    (tmp_path / "config.json").write_text(json.dumps(TINY))
    asked = [request(key, tokens(key, 5 + 9 * key), 9) for key in range(4)]

    def generate(seed, depth, mood):
        config = EngineConfig(
            model=str(tmp_path), load_format="dummy", dtype="float32", depth=str(depth), max_num_seqs=3,
            max_num_batched_tokens=12, max_model_len=64, num_gpu_blocks_override=24, block_size=8, device="cpu",
        )  # fmt: skip
        return collect(core.build_core(config, SimDevice(seed, mood)).loop, asked)

    reference = generate(0, 1, "eager")

    def scene():
        assert generate(1, 8, "lazy") == reference

    scene()
    with one_batch_for_all():
        assert generate(1, 1, "eager") == reference, "harmless while no step is behind"
        with must_fail():
            scene()


def test_row_011_the_device_side_buffer_is_refilled_in_stream_order():
    """The one input buffer on the device was overwritten for the next chunk before the current one was read. Here the
    upload is the first operation of its own step's program, so it cannot overtake the step in front of it."""

    def scene(tweak=lambda loop: None):
        for seed in SEEDS:
            loop = checksum_loop(SimDevice(seed, "lazy"), Sizes(3, 64, 65, 4, 7, 8), 8)
            tweak(loop)
            play(loop, [job(key, tokens(key, 40), 6) for key in range(4)])

    scene()
    write = Packer.write

    def by_the_host(loop):
        loop.device.upload = loop.device.compute.upload = lambda target, source: None

        def write_through(plan, shape, requests, words, *rest):
            write(loop.launcher.leader.packer, plan, shape, requests, words, *rest)
            slot = guard.pinned_tensor(torch.from_numpy(words[: shape.words]))
            loop.launcher.executor.buffers.words[: shape.words].copy_(slot, non_blocking=True)

        loop.launcher.leader.packer.write = write_through

    with must_fail():
        scene(by_the_host)
