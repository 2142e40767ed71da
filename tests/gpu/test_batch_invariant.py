"""`--batch-invariant` on CUDA: tokens and log-probabilities equal to the bit, and a control that prints the default's.

The model has the layers of Qwen3-0.6B and random weights, whose logits are flat: near ties occur in every request.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_models import tiny_config

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

from invariant_runs import Outcome, differing, engine, jobs, play

LAYERS_06B = tiny_config(
    vocab_size=32_768,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=4,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    rope_theta=1_000_000,
    max_position_embeddings=4096,
    dtype="bfloat16",
    eos_token_id=1,
)
WORK = jobs(64, 32768, 500, 96, shared=300)


def outcome(folder: Path, at_once: int = 0, scored: bool = True, **options) -> Outcome:
    core = engine(folder, "cuda", LAYERS_06B, max_model_len=1024, **options)
    found = play(core, WORK, at_once, scored)
    core.close()
    return found


@pytest.fixture(scope="module", autouse=True)
def unguarded(guarded_steps):
    """Other tests watch the launch path; here whole engines run over and over."""
    with guarded_steps.rest():
        yield


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Every request by itself, at depth 1, eagerly, its prompt in one chunk."""
    found = outcome(
        tmp_path_factory.mktemp("alone"), depth="1", enforce_eager=True, enable_prefix_caching=False, max_num_seqs=1,
        num_gpu_blocks_override=200, batch_invariant=True, at_once=1,
    )  # fmt: skip
    assert all(len(found.tokens[job.key]) == job.output == len(found.logprobs[job.key]) for job in WORK)
    return found


WIDE = {"max_num_seqs": 64, "num_gpu_blocks_override": 6000}
TIGHT = {"max_num_seqs": 32, "num_gpu_blocks_override": 500, "max_num_batched_tokens": 200}
"""A pool for about ten requests, so that rows are preempted; chunks of up to 200 tokens"""


@pytest.mark.parametrize(
    ("depth", "eager"), [*((depth, False) for depth in ("1", "2", "4", "8", "auto")), ("1", True), ("8", True)]
)
def test_every_depth_gives_what_a_request_gives_alone(alone, tmp_path, depth, eager):
    """With chunks, preemption and prefix hits, then with whole prompts, all rows at once and no log-probabilities."""
    options = {"depth": depth, "enforce_eager": eager, "batch_invariant": True}
    tight = outcome(tmp_path, **options, **TIGHT)
    assert tight.preemptions > 0 and tight.cached > 0
    assert differing(tight, alone) == []
    wide = outcome(tmp_path, **options, **WIDE, enable_prefix_caching=False, scored=False)
    assert wide.cached == 0
    assert differing(wide, alone) == []


def test_the_default_differs_somewhere(tmp_path, capsys):
    """A control, printed and not asserted: how many requests differ without the flag from what they give alone."""
    alone = outcome(
        tmp_path, depth="1", max_num_seqs=1, num_gpu_blocks_override=200, enable_prefix_caching=False, at_once=1
    )
    found = outcome(tmp_path, depth="auto", **TIGHT)
    tokens = sum(found.tokens[job.key] != alone.tokens[job.key] for job in WORK)
    with capsys.disabled():
        print(
            f"\nwithout --batch-invariant {len(differing(found, alone))} of {len(WORK)} requests differ in bits from "
            f"what they give alone, {tokens} of them in tokens"
        )
