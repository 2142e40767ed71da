"""Rows that read pages which another row writes in the same step: the tokens are those of rows that share nothing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import tiny_config

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from native_kernels import load_native

from gapless.base.config import EngineConfig
from gapless.base.params import SamplingParams
from gapless.base.records import Request
from gapless.device import CpuDevice
from gapless.kernels import plain
from gapless.loop.spec import Sizes
from gapless.model.loader import load_model
from gapless.testing.loops import loop_of

SHAPE = Sizes(rows=8, max_len=64, pages=80, page_size=8, step_tokens=128, queue=64)
CONFIG = tiny_config()


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_rows_that_share_pages_within_one_step_sample_the_same_tokens(kernels, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    config = EngineConfig(model=str(tmp_path), load_format="dummy", dtype="float32")
    operations = plain.KERNELS if kernels == "torch" else load_native()
    model = load_model(config, torch.device("cpu"), operations)
    common = np.random.default_rng(3).integers(0, 97, 41).astype(np.int32)
    prompts = [common, common, *(np.append(common[:cut], [cut]).astype(np.int32) for cut in (40, 33, 17, 9)), common]

    def run(sharing: bool, depth: int) -> tuple[dict[int, list[int]], int]:
        device = CpuDevice(threads=1)
        loop = loop_of(device, model, SHAPE, depth, prefix_caching=sharing, kernels=operations)
        params = SamplingParams(temperature=0.0, max_tokens=None)
        for key, prompt in enumerate(prompts):
            loop.submit(Request(key, prompt, params, 0, (), 0, len(prompt) + 12))
        turns = [loop.turn()]
        assert len(loop.planner.waiting) == 0, "all in one step"
        shared = loop.counters.prefix_hits
        while loop.has_work():
            turns.append(loop.turn())
        found: dict[int, list[int]] = {key: [] for key in range(len(prompts))}
        for settled in (tokens for turn in turns for tokens in turn.tokens):
            for key, token, _ in settled.entries():
                found[key].append(token)
        device.close()
        return found, shared

    alone, nothing = run(False, 2)
    assert nothing == 0 and len(alone[0]) == 12
    for depth in (2, 4):
        together, shared = run(True, depth)
        assert together == alone and shared == 40 + 40 + 32 + 16 + 8 + 40
