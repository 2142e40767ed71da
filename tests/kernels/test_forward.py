"""Whole decode steps against plain torch in float32, on every path that a batch's size chooses."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial

import pytest
import torch
from forward_cases import FAMILIES, Batch, Family, Launched, batch_of, error, models, ragged, run, written
from implementations import BF16, F32, runs
from model.paging_driver import Driver, Sequence, prompt
from paged import LAYERS, Heads

pytest.importorskip("triton", reason="needs triton: it is installed on Linux only")

from triton.compiler import compiler
from triton.runtime.jit import JITFunction

from gapless.device import facts
from gapless.kernels import library_triton, linear
from gapless.kernels.all_triton import HALF_KERNELS, INVARIANT_KERNELS
from gapless.kernels.few_rows_triton import MOST_FEW_ROWS
from gapless.model import adapters

on_cuda = partial(runs, on=("cuda",))
ROWS = (1, 3, 6, 32, 40, 130)
LIMIT = 3 * 20**0.5 * 2**-9
"""The largest relative difference of a row. A rounding to bfloat16 moves a number by up to 2**-9 of its size, up or
down. A step of two layers has about twenty roundings in sequence, and weights and softmax are assumed to multiply their
error by up to three: plain torch in bfloat16 is at 0.016. A row of 700 entries that misses one is at 0.04."""
FEW = Counter(angles=1, normed_linear=2 * LAYERS, rotated_decode=LAYERS, linear_add=2 * LAYERS, rms_norm=1)
ANY = Counter(
    angles=1, rms_norm=1, add_rms_norm=2 * LAYERS, rope_and_write=LAYERS, decode_attention=LAYERS, activate=LAYERS
)  # fmt: skip
"""Operators that a step launches: their names say which path it took."""
SMALLER = {"sm_86": ((8, 6), 99 << 10), "sm_120": ((12, 0), 99 << 10)}
"""GPUs that this one can stand in for: compute capability, and bytes of shared memory that a block may have."""


def path(rows: int) -> Counter[str]:
    """What a step of `rows` rows should launch on this GPU."""
    if rows <= MOST_FEW_ROWS:
        return FEW + Counter(one_row_linear=int(rows == 1))
    return ANY


SMALL = {
    "qwen3": Family("Qwen3ForCausalLM", 64, 96, Heads(4, 2, 16)),
    "llama": Family("LlamaForCausalLM", 48, 80, Heads(4, 1, 16), biased=True),
    "large": Family("Qwen3ForCausalLM", 2048, 4224, Heads(16, 8, 128)),
}
ADAPTED_LIMIT = 3 * 24**0.5 * 2**-9
"""With 24 roundings in place of 20: an adapter adds half a rounding to each of the eight products of two layers."""
EVERY = [(name, rows) for name in FAMILIES for rows in ROWS]


@pytest.fixture
def forget():
    """Facts about the GPU are asked again, now and after the test, and kernels loaded again."""

    def all_of_it() -> None:
        library_triton.arch.cache_clear()
        modules = [module for name, module in sys.modules.items() if name.startswith("gapless.kernels")]
        for kernel in [value for module in modules for value in vars(module).values()]:
            if isinstance(kernel, JITFunction):
                kernel.device_caches.clear()

    yield all_of_it
    all_of_it()


@pytest.fixture
def stand_for(monkeypatch, forget):
    """This GPU, taken for another one: Triton refuses kernels that need more shared memory than that one has."""

    def take(gpu: str) -> None:
        capability, shared = SMALLER[gpu]
        monkeypatch.setattr(facts, "capability", lambda device: capability)
        monkeypatch.setattr(facts, "shared_memory", lambda device: shared)
        monkeypatch.setattr(compiler, "max_shared_mem", lambda device: shared)
        forget()

    return take


def check(family, rows, folder):
    """Hidden states, logits, the keys and values written, and that nothing else is."""
    model, exact = models(family, HALF_KERNELS, folder, "cuda")
    batch = batch_of(family.heads, ragged(rows))
    ours, theirs = batch.moved(torch.bfloat16, "cuda"), batch.moved(torch.float32, "cpu")
    with Launched() as launched:
        found = run(model, ours)
    assert launched.names == path(rows)
    for got, want in zip(found, run(exact, theirs), strict=True):
        assert error(got[: batch.real], want[: batch.real]) < LIMIT
    (put, rest), (wanted, _) = written(ours), written(theirs)
    assert error(put, wanted) < LIMIT
    _, before = written(batch)
    torch.testing.assert_close(rest, before, rtol=0, atol=0, equal_nan=True)


@runs(
    "name, rows, launched", on=("interpreter",),
    interpreter=[
        ("llama", 3, "linear_add"), ("qwen3", 1, "one_row_linear"), ("llama", 6, "rotated_decode"),
        ("qwen3", 40, "add_rms_norm"),
    ], keep=2,
)  # fmt: skip
def test_a_small_step_is_that_of_plain_torch(implementation, name, rows, launched, tmp_path, monkeypatch):
    # Kernels read weights as they are on a GPU: not in the layout that torch packs for a CPU.
    monkeypatch.setattr(linear, "packs", lambda weight: False)
    family = SMALL[name]
    model, exact = models(family, HALF_KERNELS, tmp_path, "cpu", F32)
    batch = batch_of(family.heads, [min(length, 90) for length in ragged(rows)])
    ours, theirs = (batch.moved(F32, "cpu") for _ in range(2))
    with Launched() as seen:
        found = run(model, ours)
    assert seen.names[launched]
    for got, want in zip(found, run(exact, theirs), strict=True):
        assert error(got[: batch.real], want[: batch.real]) < 1e-5
    (put, rest), (wanted, before) = written(ours), written(theirs)
    assert error(put, wanted) < 1e-5
    torch.testing.assert_close(rest, before, rtol=0, atol=0, equal_nan=True)


@runs(
    "rows, launched", on=("interpreter",), keep=2,
    interpreter=[(6, "adapted_linear_add"), (40, "add_rms_norm"), (1, "adapted_linear")],
)  # fmt: skip
def test_a_small_step_of_rows_with_adapters_is_that_of_plain_torch(
    implementation, rows, launched, tmp_path, monkeypatch
):
    """Few rows by adapters in their kernels, others by tables below the matrices: never by products of their own."""
    monkeypatch.setattr(linear, "packs", lambda weight: False)
    monkeypatch.setattr(adapters, "MOST_BELOW", 100)
    seen, apart = adapted_step(SMALL["qwen3"], rows, tmp_path, "cpu", F32)
    assert seen[launched] and "adapt" not in seen and apart < 1e-5


@on_cuda("name, rows", EVERY)
def test_a_step_is_that_of_plain_torch(implementation, name, rows, tmp_path):
    check(FAMILIES[name], rows, tmp_path)


@on_cuda("name, rows", [(name, rows) for name in (*FAMILIES, "large") for rows in (1, 3, 6, 32, 40, 256)])
def test_a_step_of_rows_with_adapters_is_that_of_plain_torch(implementation, name, rows, tmp_path):
    family = SMALL[name] if name == "large" else FAMILIES[name]
    launched, apart = adapted_step(family, rows, tmp_path, "cuda", BF16)
    few = {"adapted_norm": 2 * LAYERS + 1, "adapted_linear": 2 * LAYERS, "adapted_linear_add": 2 * LAYERS}
    joined = {"rope_and_write": LAYERS, "activate": LAYERS, "add_rms_norm": 2 * LAYERS}
    wanted = few if rows <= MOST_FEW_ROWS else joined
    assert wanted.items() <= launched.items() and "adapt" not in launched and apart < ADAPTED_LIMIT


def adapted_step(family, rows, folder, device, dtype):
    """What a step launches whose rows have four adapters and none, and its difference from plain torch."""
    model, exact = models(family, HALF_KERNELS, folder, device, dtype, adapters=4)
    assert model.adapters is not None and exact.adapters is not None
    torch.manual_seed(rows)
    for slot in range(1, 5):
        for ours, theirs in zip(model.adapters.slot(slot), exact.adapters.slot(slot), strict=True):
            theirs.normal_(0, 0.2 if theirs.shape[0] == 16 else theirs.shape[1] ** -0.5)
            theirs.copy_(theirs.to(dtype))
            ours.copy_(theirs)
    slots = torch.arange(rows) % 5 if rows > 1 else torch.tensor([3])
    batch = batch_of(family.heads, [min(length, 90) for length in ragged(rows)] if dtype is F32 else ragged(rows))
    batch = batch._replace(inputs=batch.inputs._replace(adapters=slots))
    ours, theirs = batch.moved(dtype, device), batch.moved(F32, "cpu")
    with Launched() as launched:
        found = run(model, ours)
    wanted = run(exact, theirs)
    plain = run(exact, batch._replace(inputs=batch.inputs._replace(adapters=None)).moved(F32, "cpu"))
    assert error(plain[0][: batch.real], wanted[0][: batch.real]) > 10 * ADAPTED_LIMIT, "adapters change what follows"
    pairs = zip((*found, written(ours)[0]), (*wanted, written(theirs)[0]), strict=True)
    return launched.names, max(error(got[: batch.real], want[: batch.real]) for got, want in pairs)


def mixed(model, device):
    """Logits of chunks, and of decode rows beside a continued chunk over several tiles and a chunk of one token."""
    driver, first, second, third = Driver(model, 100, device=torch.device(device)), Sequence(), Sequence(), Sequence()
    found = driver.step(chunks=[(first, prompt(50)), (second, prompt(17))])
    found += driver.step(decode=[(second, 3)], chunks=[(first, prompt(400)), (third, prompt(1))], inert=2, slack=5)
    return torch.cat(found)


@on_cuda("name", FAMILIES)
def test_steps_with_chunks_are_those_of_plain_torch(implementation, name, tmp_path):
    model, exact = models(FAMILIES[name], HALF_KERNELS, tmp_path, "cuda")
    with Launched() as launched:
        found = mixed(model, "cuda")
    assert launched.names["prefill_attention"] == 2 * LAYERS and launched.names["decode_attention"] == LAYERS
    assert error(found, mixed(exact, "cpu")) < LIMIT


@on_cuda("gpu, rows", [(gpu, rows) for gpu in SMALLER for rows in ROWS])
def test_a_step_on_a_gpu_of_smaller_blocks_equals_the_reference(implementation, gpu, rows, tmp_path, stand_for):
    """What is chosen there, run here."""
    stand_for(gpu)
    check(FAMILIES["qwen3"], rows, tmp_path)


@on_cuda()
def test_tiles_of_larger_blocks_are_refused_on_a_smaller_gpu(implementation, tmp_path, monkeypatch, forget):
    """The control of the test above: there the tiles for larger blocks do not load."""
    monkeypatch.setattr(facts, "shared_memory", lambda device: 227 << 10)
    monkeypatch.setattr(compiler, "max_shared_mem", lambda device: 99 << 10)
    forget()
    with pytest.raises(compiler.OutOfResources):
        check(FAMILIES["qwen3"], 32, tmp_path)


@on_cuda("name, rows", EVERY)
def test_a_captured_step_is_the_eager_one(implementation, name, rows, tmp_path):
    """In a graph, kernels that begin early stand right behind those whose results they wait for."""
    family = FAMILIES[name]
    model, _ = models(family, HALF_KERNELS, tmp_path, "cuda")
    batch = batch_of(family.heads, ragged(rows)).moved(torch.bfloat16, "cuda")
    want = run(model, batch)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run(model, batch)
    for _ in range(5):
        for part in found:
            part.zero_()
        graph.replay()
        for got, wanted in zip(found, want, strict=True):
            assert torch.equal(got[: batch.real], wanted[: batch.real])


def others_changed(batch: Batch, kept: int) -> Batch:
    """The batch with other tokens, keys and values after the first `kept` rows, NaN in the last; lengths stay."""
    inputs, cache = batch.inputs, batch.cache.data.clone()
    pages = [-(-length // cache.shape[3]) for length in inputs.kv_lens.tolist()]
    for row in range(kept, batch.real):
        table = inputs.page_table[inputs.rows[row], : pages[row]].long()
        cache[table] *= torch.nan if row == batch.real - 1 else 3
    ids = inputs.ids.clone()
    ids[kept:] = ids[kept:].flip(0) + 1
    return batch._replace(inputs=inputs._replace(ids=ids % 512), cache=batch.cache._replace(data=cache))


@on_cuda("name, rows", [(name, rows) for name, rows in EVERY if rows > 1])
def test_tokens_and_keys_of_neighbours_change_no_bit(implementation, name, rows, tmp_path):
    family = FAMILIES[name]
    model, _ = models(family, HALF_KERNELS, tmp_path, "cuda")
    kept, batch = rows // 3, batch_of(family.heads, ragged(rows))
    found = [run(model, one.moved(torch.bfloat16, "cuda")) for one in (batch, others_changed(batch, kept))]
    for got, want in zip(*found, strict=True):
        assert torch.equal(got[:kept], want[:kept]) and not torch.equal(got[kept:], want[kept:])


@on_cuda("name, rows, full", [(name, *pair) for name in FAMILIES for pair in ((3, 4), (5, 8), (9, 16), (17, 32))])
def test_few_rows_do_not_depend_on_their_number_up_to_a_power_of_two(implementation, name, rows, full, tmp_path):
    """With one split a row, as if the page table is short."""
    family = FAMILIES[name]
    model, _ = models(family, HALF_KERNELS, tmp_path, "cuda")
    lengths = [2 + 13 * row for row in range(full)]
    whole = batch_of(family.heads, lengths).moved(torch.bfloat16, "cuda")
    assert torch.equal(run(model, whole.rows(0, rows))[0], run(model, whole)[0][:rows])


@on_cuda("gpu", [None, *SMALLER])
def test_batch_invariant_rows_are_those_of_each_alone(implementation, gpu, tmp_path, stand_for):
    """Without few rows' kernels, and whatever the lengths of the others."""
    family = FAMILIES["qwen3"]
    if gpu is not None:
        stand_for(gpu)
    model, _ = models(family, INVARIANT_KERNELS, tmp_path, "cuda")
    batch = batch_of(family.heads, ragged(40)).moved(torch.bfloat16, "cuda")
    want = run(model, batch)
    for row in (0, 1, 5):
        for got, wanted in zip(run(model, batch.rows(row, row + 1)), want, strict=True):
            assert torch.equal(got[0], wanted[row])
