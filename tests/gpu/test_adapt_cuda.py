"""Adapters on a GPU: the checks of tests/kernels with real sizes, and an engine whose rows have several."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from adapt_cases import (
    FewShape,
    RotatedShape,
    check_adapt,
    check_alone,
    check_few,
    check_few_alone,
    check_joined,
    check_joined_decode,
    check_rotated,
)
from adapter_files import write_adapter
from forward_cases import FAMILIES, Family, Launched, batch_of, error, models, ragged, run, written
from paged import LAYERS, Heads

from gapless import LLM, SamplingParams
from gapless.kernels.all_triton import HALF_KERNELS, TRITON_KERNELS
from gapless.kernels.few_rows import ADAPTED_ROWS
from gapless.kernels.joined_rows import JOINED_ROWS
from gapless.kernels.many_rows import MANY_ADAPTED
from gapless.model.config import read_model_config, resolve_model_dir

SHAPES = [(1024, (2048, 1024, 1024), 3072, 16), (896, (896, 128, 128), 2432, 16), (2048, (200, 100, 56), 1500, 64)]
"""Hidden size, columns of projections, middle, rank: some do not end where a tile does"""
SIZES = FAMILIES | {"large": Family("Qwen3ForCausalLM", 2048, 4224, Heads(16, 8, 128))}
LIMIT = 3 * 24**0.5 * 2**-9
"""The limit of tests/gpu/test_forward_cuda.py with 24 roundings in place of 20: an adapter adds half a rounding to each
of the eight products of two layers."""
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA, and torch sees no CUDA device"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "slots"), [(1, 1), (32, 8), (1000, 4)])
def test_it_adds_what_the_definition_says(tokens: int, slots: int, dtype: torch.dtype) -> None:
    for seed in range(2):
        check_adapt(TRITON_KERNELS, dtype, "cuda", tokens, slots, seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_is_alone(dtype: torch.dtype) -> None:
    check_alone(TRITON_KERNELS, dtype, "cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("hidden", "projections", "middle", "rank"), SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 6, 32])
def test_a_layer_of_few_rows_adds_what_the_definition_says(rows, hidden, projections, middle, rank, dtype) -> None:
    check_few(ADAPTED_ROWS, dtype, "cuda", FewShape(rows, hidden, projections, middle, rank), rows)


@pytest.mark.parametrize("rows", [2, 16, 32])
def test_a_row_of_few_is_alone(rows: int) -> None:
    check_few_alone(ADAPTED_ROWS, torch.bfloat16, "cuda", rows)


@pytest.mark.parametrize(("hidden", "projections", "middle", "rank"), SHAPES)
@pytest.mark.parametrize("rows", [33, 200])
def test_a_layer_of_many_rows_adds_what_the_definition_says(rows, hidden, projections, middle, rank) -> None:
    middle -= middle % 8  # the copy engine's lines begin at 16 bytes
    check_few(MANY_ADAPTED, torch.bfloat16, "cuda", FewShape(rows, hidden, projections, middle, rank), rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [RotatedShape(40, 16, 8, 128), RotatedShape(200, 14, 2, 64), RotatedShape(33, 8, 2, 96, 64)]
)
def test_rotation_adds_what_the_definition_says(shape: RotatedShape, dtype: torch.dtype) -> None:
    check_rotated(MANY_ADAPTED, dtype, "cuda", shape)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 2, 33, 256])
def test_a_joined_product_and_its_second_half_are_what_the_definition_says(rows: int, dtype: torch.dtype) -> None:
    check_joined(JOINED_ROWS, dtype, "cuda", FewShape(rows, 2048, (2048, 512, 512), 4096, 16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_joined_queries_keys_and_values_are_read_as_plain_torch_does(dtype: torch.dtype) -> None:
    check_joined_decode(JOINED_ROWS, dtype, "cuda", Heads(32, 8, 128), ragged(40)[:-1])


def test_a_row_of_many_is_alone() -> None:
    check_few_alone(MANY_ADAPTED, torch.bfloat16, "cuda", 64)


@pytest.mark.parametrize("family", [*FAMILIES, "large"])
@pytest.mark.parametrize("rows", [1, 3, 6, 32, 40, 256])
def test_a_step_of_rows_with_adapters_is_that_of_plain_torch(family: str, rows: int, tmp_path: Path) -> None:
    model, exact = models(SIZES[family], HALF_KERNELS, tmp_path, "cuda", adapters=4)
    assert model.adapters is not None and exact.adapters is not None
    torch.manual_seed(rows)
    for slot in range(1, 5):
        for ours, theirs in zip(model.adapters.slot(slot), exact.adapters.slot(slot), strict=True):
            theirs.normal_(0, 0.2 if theirs.shape[0] == 16 else theirs.shape[1] ** -0.5)
            ours.copy_(theirs.bfloat16())
            theirs.copy_(theirs.bfloat16())
    slots = torch.arange(rows) % 5 if rows > 1 else torch.tensor([3])
    batch = batch_of(SIZES[family].heads, ragged(rows))
    batch = batch._replace(inputs=batch.inputs._replace(adapters=slots))
    ours, theirs = batch.moved(torch.bfloat16, "cuda"), batch.moved(torch.float32, "cpu")
    with Launched() as launched:
        found = run(model, ours)
    few = {"adapted_norm": 2 * LAYERS + 1, "adapted_linear": 2 * LAYERS, "adapted_linear_add": 2 * LAYERS}
    many = {
        "adapted_norm": 2 * LAYERS + 1, "divided_linear": 2 * LAYERS, "rope_and_write": LAYERS, "silu_mul": LAYERS,
        "linear_add_beside": 2 * LAYERS,
    }  # fmt: skip
    joined = {"rope_and_write": LAYERS, "silu_mul": LAYERS, "add_rms_norm": 2 * LAYERS}
    expected = few if rows <= HALF_KERNELS.few_rows.most else joined if family == "large" else many
    assert expected.items() <= launched.names.items() and "adapt" not in launched.names
    wanted = run(exact, theirs)
    plain = run(exact, batch._replace(inputs=batch.inputs._replace(adapters=None)).moved(torch.float32, "cpu"))
    assert error(plain[0][: batch.real], wanted[0][: batch.real]) > 10 * LIMIT, "adapters change what follows"
    for got, want in zip((*found, written(ours)[0]), (*wanted, written(theirs)[0]), strict=True):
        assert error(got[: batch.real], want[: batch.real]) < LIMIT


def test_rows_of_several_adapters_have_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    config = read_model_config(resolve_model_dir("demo"))
    modules = tuple(f"{n}={write_adapter(tmp_path / n, config, seed, size=0.05)}" for seed, n in enumerate("abc"))
    prompts = [f"Question: {name} has 14 pens and buys 7 more." for name in ("Mia", "Tom", "Ada", "Bo")]
    greedy, found = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), []
    for device, depth in (("cpu", "1"), ("cuda", "1"), ("cuda", "8")):
        options = {"dtype": "float32", "depth": depth, "max_num_seqs": 4, "max_model_len": 128, "max_loras": 2}
        with LLM("demo", device=device, lora_modules=modules, **options) as llm:
            outputs = llm.generate(prompts, greedy, use_tqdm=False, adapter=["a", "", "b", "c"])
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1] == found[2]
