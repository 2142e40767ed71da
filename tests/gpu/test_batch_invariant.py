"""`--batch-invariant` on CUDA: tokens and log-probabilities equal to the bit, and a control that prints the default's.

The model has the layers of Qwen3-0.6B and random weights, whose logits are flat: near ties occur in every request.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_config

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

from invariant_cases import check_attention, check_product, operands
from invariant_runs import Outcome, differing, engine, jobs, play
from paged import Heads

from gapless.kernels import invariant_linear_triton as linear

pytestmark = [
    # Triton 3.9 says once how its next version will differ.
    pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION is unset"),
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA, and torch sees no CUDA device"),
]
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
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("columns", "depth"), [(4096, 1024), (1024, 3072), (6144, 1024), (1000, 333)])
def test_a_product_gives_a_row_the_same_bits_in_any_batch(dtype, columns, depth):
    check_product("cuda", dtype, columns, depth, [1, 2, 7, 16, 17, 32, 64, 65, 128, 256, 257, 512, 1000, 2048])


def test_blocks_of_either_height_and_who_computes_a_segment_change_no_bit(monkeypatch):
    bf16 = torch.bfloat16
    tiles = [linear.tiles_for(rows, 1024, 3072, 2, linear.has_warpgroups(torch.device("cuda"))) for rows in (1, 2048)]
    assert tiles[0] != tiles[1]
    monkeypatch.setattr(linear, "tiles_for", lambda *_: tiles[0])
    x, weight, _ = operands("cuda", bf16, 300, 1024, 3072)
    found = []
    for few in (0, 1 << 20):
        monkeypatch.setattr(linear, "FEW_BLOCKS", few)
        found += [linear.product(x, weight, None, tiles=how) for how in tiles]
    assert all(torch.equal(got, found[0]) for got in found[1:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", [Heads(16, 8, 128), Heads(14, 2, 64), Heads(4, 4, 80)], ids=str)
def test_a_query_gets_the_same_bits_in_any_chunk(heads, dtype):
    """Around the tiles, and around position 2,048, where segments become longer."""
    cuts = [[1], [100, 612, 1124], [63, 64, 65, 127, 128, 2047], [2048, 2049, 2200]]
    alone = [0, 1, 31, 63, 64, 127, 128, 300, 1000, 2047, 2048, 2049, 2299]
    check_attention("cuda", dtype, heads, 2300, cuts, alone)


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
