"""An engine on a device whose memory it fills: steps of plain kernels have the memory that they take."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from gapless import LLM, SamplingParams

llm = LLM("demo", device="fake", enforce_eager=True, max_num_seqs=32, max_num_batched_tokens=96, max_model_len=1024)
prompts = [[5] * 900] + [[row, 2] for row in range(31)]
params = SamplingParams(max_tokens=40, ignore_eos=True)
outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
assert [len(one.outputs[0].token_ids) for one in outputs] == [40] * 32
print(torch.accelerator.memory_stats()["reserved_bytes.all.peak"])
"""


@pytest.mark.process
def test_many_rows_beside_a_long_one_fit_when_memory_is_tight():
    total = 52 << 20
    env = {**os.environ, "GAPLESS_FAKE_BYTES": str(total), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env.pop("STEPS_UNDER_GUARD", None)  # a tight engine reserves little ahead: its steps take memory from the driver
    found = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr[-2000:]
    assert 0.8 * total < int(found.stdout.split()[-1]) <= total
