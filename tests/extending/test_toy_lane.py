"""A lane in one file outside the package, through the whole engine."""

from __future__ import annotations

import pytest
from extending.toys.lane import NudgeKey, NudgeLane
from harness import VOCAB, Job, checksum_loop, run
from step.step_harness import request

from gapless import LLM, SamplingParams
from gapless.base.errors import RequestError
from gapless.device import CpuDevice
from gapless.kernels import native, plain
from gapless.loop.spec import Sizes
from gapless.step import lanes


@pytest.fixture(autouse=True)
def nudges(monkeypatch):
    monkeypatch.setattr(lanes, "LANES", (NudgeLane(), *lanes.LANES))


def tokens_of(kernels, depth, asks):
    """Tokens of four greedy rows, of which the second asks, and the graphs of its lane."""
    device = CpuDevice(threads=1)
    loop = checksum_loop(device, Sizes(4, 32, 17, 8, 32, queue=4), depth, kernels=kernels)
    loop.capture()
    jobs = []
    for key in range(4):
        extra = {"extra_args": asks} if key == 1 else {}
        jobs.append(Job(request(key=key, tokens=(key, 7), max_len=24, temperature=0.0, **extra), 0, None))
    run(loop, jobs, check=False)
    device.close()
    return [job.tokens for job in jobs], {key for key in loop.launcher.graphs.known if isinstance(key, NudgeKey)}


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("kernels", [plain.KERNELS, native.load()], ids=["plain", "native"])
def test_a_nudged_row_gets_its_token_and_its_neighbours_keep_theirs(kernels, depth):
    before, graphs = tokens_of(kernels, depth, {})
    after, captured = tokens_of(kernels, depth, {"nudge": 1e6, "nudge_token": VOCAB - 2})
    assert after[1] == [VOCAB - 2] * len(after[1]) and len(after[1]) == 22
    assert after[:1] + after[2:] == before[:1] + before[2:] and before[1] != after[1]
    assert captured == graphs == {NudgeKey(1), NudgeKey(4)}, "captured at start, and none was missed"


@pytest.mark.parametrize("options", [{}, {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}])
def test_a_request_of_the_engine_is_nudged_with_drafts_and_without(options):
    asked = [SamplingParams(temperature=0, max_tokens=9, ignore_eos=True, extra_args=extra) for extra in
             (None, {"nudge": 1e3, "nudge_token": 42}, {"nudge": 0.0})]  # fmt: skip
    with LLM("demo", device="cpu", max_model_len=64, **options) as llm:
        plain_, nudged, same = (one.outputs[0].token_ids for one in llm.generate(["One, two,"] * 3, asked))
        assert list(nudged) == [42] * 9 and plain_ == same != nudged
        with pytest.raises(RequestError, match="extra_args: there is no 'nugde'; known: nudge, nudge_token"):
            llm.generate("One", SamplingParams(extra_args={"nugde": 1.0}))
