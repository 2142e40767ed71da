"""Rows of the class staging: a host buffer written again while the device still has to read it."""

from __future__ import annotations

import json

import torch
from harness import checksum_loop, model_loop, script, sizes
from scenes import (
    ManyScores,
    Passed,
    broken,
    collect,
    crowd,
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
from gapless.device.ring import Ring
from gapless.engine import core
from gapless.loop.build import Sizes
from gapless.step.launcher import Launcher
from gapless.step.packet import Packer
from gapless.testing.sim import SimDevice, SimStream

SEEDS = range(6)
TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 97, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def test_row_001_a_packet_slot_is_not_written_before_its_upload():
    """Pinned input tensors were rewritten while their copy to the device was pending. Here a packet slot comes back
    behind the fence of the step that reads it, and with too few slots the launch is declined and counted."""

    def scene():
        return [crowd(seed, tweak=short_packets) for seed in SEEDS]

    assert sum(loop.counters.declined_ring for loop in scene()) > 0

    def at_once(ring, slot, fence):
        retire(ring, slot, Passed())

    retire = Ring.retire
    with broken(Ring, "retire", at_once):
        scene()


def test_row_002_sampling_settings_travel_under_the_same_fence():
    """The guard covered the input tensors but not the sampling tensors. Here everything that goes to the device in a
    step is in one slot behind one fence: requests with settings of their own keep them under constant admission."""

    def sampled(device, many, depth, tweak):
        loop = model_loop(ManyScores(97, 32), device, Sizes(3, 32, 25, 4, 6, 64), depth)
        tweak(loop)
        return collect(loop, many)

    def asked(key):
        params = {"temperature": 0.2 + key % 4 / 4, "top_k": (0, 1, 5)[key % 3], "top_p": (1.0, 0.7)[key % 2]}
        return request(key, tokens(key, 3), 2 + key % 5, seed=key, **params)

    many = [asked(key) for key in range(24)]
    alone = {one.key: sampled(SimDevice(0, "eager"), [one], 1, lambda loop: None)[one.key] for one in many}

    def scene():
        for seed in SEEDS:
            assert sampled(SimDevice(seed, "lazy"), many, 8, short_packets) == alone

    scene()
    retire, older = Ring.retire, {}

    def too_narrow(ring, slot, fence):
        retire(ring, slot, older.get(ring, Passed()))
        older[ring] = fence

    with broken(Ring, "retire", too_narrow):
        scene()


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


def test_row_008_a_step_without_tokens_is_waited_for_like_any_other():
    """Steps of an encoder gave no tokens, were taken as done without a wait, and their buffers were reused. Here a step
    of a long prompt that samples nothing has a fence and an outbox header like every step."""

    def scene():
        for seed in SEEDS:
            rows, budget = ((2, 4), (1, 1))[seed % 2]  # a budget of one token too
            loop = checksum_loop(SimDevice(seed, "lazy", maps_host=seed < 2), Sizes(rows, 96, 49, 4, budget, 8), 8)
            short_packets(loop)
            play(loop, [job(key, tokens(key, 80 // (3 - rows)), 4) for key in range(3)])
            silent = sum(record.decode_rows == 0 and record.chunk_tokens > 0 for record in loop.records)
            assert silent > 30

    scene()

    def without_a_wait(launcher, plan, requests):
        flight = launch(launcher, plan, requests)
        silent = not plan.decode and not any(chunk.last for chunk in plan.chunks)
        return flight._replace(on_host=flight.started) if silent else flight

    launch = Launcher.launch
    with broken(Launcher, "launch", without_a_wait):
        scene()


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


def test_lifetime_L3_the_plan_of_a_step_is_its_own():
    """A planner's pinned buffer was rewritten by the next plan() while the device still read it. Here plan() is given a
    value that travels with its launch, so the host may decide eight steps ahead of the forward."""

    def scene(mood, depth):
        for seed in SEEDS:
            shape = sizes(seed)
            play(checksum_loop(SimDevice(seed, mood), shape, depth), script(seed, shape.max_len))

    scene("lazy", 8)
    with one_batch_for_all():
        scene("eager", 1)
        with must_fail():
            scene("lazy", 8)
