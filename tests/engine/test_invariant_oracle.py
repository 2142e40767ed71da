"""`--batch-invariant` on a CPU: the same tokens and the same bits, whatever else runs and however it is cut."""

from __future__ import annotations

import pytest
from invariant_runs import TINY, Job, differing, engine, jobs, play
from kernels.native_kernels import load_native
from sharpest import sharpest

from gapless.base.errors import ConfigError
from gapless.device import build
from gapless.kernels import native

WORK = jobs(12, 512, 90, 40, shared=70)


@pytest.fixture(autouse=True)
def here():
    load_native()


@pytest.fixture(scope="module", params=sharpest(["float32", "bfloat16"]))
def model(request):
    return TINY | {"dtype": request.param}


@pytest.fixture(scope="module")
def alone(model, tmp_path_factory):
    """Every request by itself, at depth 1, eagerly, its prompt in one chunk."""
    load_native()
    core = engine(
        tmp_path_factory.mktemp("alone"), "cpu", model, depth="1", enforce_eager=True, enable_prefix_caching=False,
        batch_invariant=True, threads=1, max_num_seqs=1,
    )  # fmt: skip
    found = play(core, WORK, at_once=1)
    core.close()
    assert all(len(found.tokens[job.key]) == job.output == len(found.logprobs[job.key]) for job in WORK)
    return found


@pytest.mark.parametrize("depth", sharpest(["4", "1", "2", "8"]))
def test_every_bit_is_that_of_a_request_alone_at_every_depth(model, alone, depth, tmp_path):
    """The pages hold a part of what eight requests come to; chunks have at most 48 tokens."""
    core = engine(
        tmp_path, "cpu", model, depth=depth, batch_invariant=True, max_num_seqs=8, max_num_batched_tokens=48,
        num_gpu_blocks_override=30, max_model_len=256, threads=2,
    )  # fmt: skip
    found = play(core, WORK)
    core.close()
    assert found.preemptions > 0 and found.cached > 0
    assert differing(found, alone) == []


@pytest.mark.seeds
def test_long_contexts_that_are_computed_again_keep_every_bit(model, tmp_path):
    """Past the 512 keys at which a decode row's sums are cut, tokens are met by decode and by prefill."""
    long = [Job(key, [2 + (key + i) % 500 for i in range(500)], 60, float(key)) for key in range(3)]
    options = {"max_model_len": 640, "batch_invariant": True, "enable_prefix_caching": False, "threads": 1}
    wide = engine(tmp_path, "cpu", model, depth="1", **options)
    want = play(wide, long, at_once=1)
    wide.close()
    tight = engine(
        tmp_path, "cpu", model, depth="4", num_gpu_blocks_override=68, max_num_batched_tokens=200, max_num_seqs=4,
        **options,
    )  # fmt: skip
    found = play(tight, long)
    tight.close()
    assert found.preemptions > 0
    assert differing(found, want) == []


def test_a_cpu_without_the_cpp_kernels_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(native, "load", lambda: None)
    monkeypatch.setitem(build.outcomes, native.NAME, build.Outcome(None, "no compiler", 0.0))
    with pytest.raises(ConfigError, match="needs the C\\+\\+ kernels, which are not here: no compiler"):
        engine(tmp_path, "cpu", TINY, batch_invariant=True)
