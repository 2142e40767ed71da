"""The dense families against transformers, in float32, over hostile paging."""

from __future__ import annotations

import random

import pytest
import torch
from model_harness import EVERY, reference, reference_logits
from paging_driver import Driver, Sequence, load, prompt, relative_error
from sharpest import sharpest
from torch.utils._python_dispatch import TorchDispatchMode

from gapless.kernels import attention
from gapless.model.attention import plan_attention
from gapless.model.seam import BatchShape

LENGTHS = (1, 2, 15, 16, 17, 33, 257, 2000)
TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=EVERY)
def pair(request, tmp_path_factory):
    """A model of transformers and ours, loaded from its files."""
    theirs = reference(request.param)
    directory = tmp_path_factory.mktemp(request.param)
    theirs.save_pretrained(directory)
    return theirs, load(directory)


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    directory = tmp_path_factory.mktemp("qwen3")
    reference("qwen3").save_pretrained(directory)
    return load(directory)


def pieces(tokens: list[int], numbers: random.Random, longest: int) -> list[list[int]]:
    """Uneven chunks of 1 to `longest` tokens."""
    cut, out = 0, []
    while cut < len(tokens):
        size = numbers.randrange(1, longest + 1)
        out.append(tokens[cut : cut + size])
        cut += size
    return out


@pytest.mark.parametrize("length", LENGTHS)
def test_logits_of_one_chunk_equal_transformers(pair, length):
    theirs, model = pair
    tokens = prompt(length)
    [got] = Driver(model).step(chunks=[(Sequence(), tokens)])
    assert relative_error(got, reference_logits(theirs, tokens)) < TOLERANCE


@pytest.mark.parametrize("length", LENGTHS[1:])
def test_logits_of_uneven_chunks_equal_transformers(pair, length):
    theirs, model = pair
    tokens, driver, sequence = prompt(length, 1), Driver(model, seed=length), Sequence()
    chunks = pieces(tokens, driver.random, max(2, length // 5))
    got = torch.cat([driver.step(chunks=[(sequence, chunk)])[0] for chunk in chunks])
    assert relative_error(got, reference_logits(theirs, tokens)) < TOLERANCE


def test_a_long_chunk_after_a_short_one_spans_query_tiles(pair):
    theirs, model = pair
    tokens, driver, sequence = prompt(1600), Driver(model), Sequence()
    assert len(tokens) - 10 > 3 * attention.QUERY_TILE
    got = torch.cat([driver.step(chunks=[(sequence, part)])[0] for part in (tokens[:10], tokens[10:])])
    assert relative_error(got, reference_logits(theirs, tokens)) < TOLERANCE


@pytest.mark.parametrize("length", (17, 64, 257))
def test_logits_after_a_cached_prefix_equal_transformers(pair, length):
    """A second row reuses the first one's full pages and runs only what follows."""
    theirs, model = pair
    tokens, driver, first = prompt(length, 2), Driver(model), Sequence()
    driver.step(chunks=[(first, tokens)])
    shared = (length - 1) // driver.page_size
    tail = prompt(20, 3)
    second = Sequence(tokens[: shared * driver.page_size], first.pages[:shared])
    [got] = driver.step(chunks=[(second, tail)])
    want = reference_logits(theirs, [*tokens[: shared * driver.page_size], *tail])
    assert relative_error(got, want[-len(tail) :]) < TOLERANCE
    [again] = driver.step(decode=[(first, 5)])
    assert relative_error(again, reference_logits(theirs, [*tokens, 5])[-1:]) < TOLERANCE


@pytest.mark.parametrize(("page_size", "gather"), sharpest([(16, 3000), (5, 1 << 26), (1, 1 << 26), (16, 1 << 26)], 2))
def test_logits_of_mixed_batches_equal_transformers(pair, page_size, gather, monkeypatch):
    """Decode rows, fresh and continued chunks and inert rows together; every logit of every sequence is checked."""
    monkeypatch.setattr(attention, "GATHER_ELEMENTS", gather)
    theirs, model = pair
    driver = Driver(model, pages=1600 // page_size, page_size=page_size, seed=page_size)
    running = [Sequence() for _ in range(5)]
    todo = [prompt(length, 4) for length in (3, 70, 33, 150, 1)]
    parts: list[list[torch.Tensor]] = [[] for _ in running]
    waiting = [pieces(tokens[: 2 * len(tokens) // 3], driver.random, 40) for tokens in todo]
    while any(len(s.tokens) < len(t) for s, t in zip(running, todo, strict=True)):
        unfinished = [i for i, s in enumerate(running) if len(s.tokens) < len(todo[i])]
        chosen = driver.random.sample(unfinished, driver.random.randrange(1, len(unfinished) + 1))
        fill = [i for i in chosen if waiting[i]]
        decode = [i for i in chosen if not waiting[i]]
        got = driver.step(
            decode=[(running[i], todo[i][len(running[i].tokens)]) for i in decode],
            chunks=[(running[i], waiting[i].pop(0)) for i in fill],
            inert=driver.random.randrange(3),
            slack=driver.random.randrange(9),
        )
        for i, logits in zip([*decode, *fill], got, strict=True):
            parts[i].append(logits)
    for tokens, found in zip(todo, parts, strict=True):
        assert relative_error(torch.cat(found), reference_logits(theirs, tokens)) < TOLERANCE


def test_a_sharded_checkpoint_gives_the_logits_of_a_single_file(tmp_path):
    theirs = reference("qwen2", tie_word_embeddings=False)
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    tokens = prompt(50)
    [got] = Driver(load(tmp_path)).step(chunks=[(Sequence(), tokens)])
    assert relative_error(got, reference_logits(theirs, tokens)) < TOLERANCE


@pytest.mark.parametrize("family", ("llama", "qwen2", "qwen3"))
@pytest.mark.parametrize(("dtype", "limit"), ((torch.bfloat16, 0.05), (torch.float16, 0.008)))
def test_half_precision_is_as_close_as_that_of_transformers(family, dtype, limit, tmp_path):
    """About as far from float32 as transformers is in the same dtype; the checkpoint's dtype is followed."""
    exact = reference(family)
    half = reference(family).to(dtype)
    half.save_pretrained(tmp_path)
    exact.load_state_dict({name: value.float() for name, value in half.state_dict().items()})
    tokens, sequence, model = prompt(120), Sequence(), load(tmp_path)
    assert model.dtype == dtype
    driver = Driver(model)
    got = driver.step(chunks=[(sequence, tokens[:50])]) + driver.step(chunks=[(sequence, tokens[50:100])])
    got += [driver.step(decode=[(sequence, token)])[0] for token in tokens[100:]]
    want = reference_logits(exact, tokens)
    error, theirs = relative_error(torch.cat(got), want), relative_error(reference_logits(half, tokens), want)
    assert error < max(limit, 2 * theirs)


def test_a_dtype_that_is_asked_for_is_cast_to_on_load(tmp_path):
    reference("llama").save_pretrained(tmp_path)
    model = load(tmp_path, dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert model.new_cache(3, 4, torch.device("cpu")).data.dtype == torch.bfloat16


def test_a_poisoned_row_spoils_no_other(ours):
    """NaN in one row's KV reaches that row alone: padding of other rows never reads it."""
    lengths = (3, 40, 17)
    results = []
    for poison in (False, True):
        driver, rows = Driver(ours), [Sequence() for _ in lengths]
        driver.step(chunks=[(row, prompt(length)) for row, length in zip(rows, lengths, strict=True)])
        if poison:
            driver.cache.data[rows[1].pages] = torch.nan
        results.append(driver.step(decode=[(row, 9) for row in rows], inert=2, slack=30))
    clean, poisoned = results
    assert torch.equal(clean[0], poisoned[0])
    assert torch.equal(clean[2], poisoned[2])
    assert torch.isnan(poisoned[1]).all()


def test_the_hosts_bound_hardly_shows(ours):
    """Running ahead widens the bound; the logits of a row move by rounding at most."""
    results = []
    for slack in (0, 1, 7, 64, 500):
        driver, row = Driver(ours), Sequence()
        driver.step(chunks=[(row, prompt(37))])
        results.append(driver.step(decode=[(row, 5)], slack=slack)[0])
    assert all(relative_error(other, results[0]) < 1e-6 for other in results[1:])


def test_only_the_slots_of_the_step_are_written(ours):
    driver, sequence = Driver(ours, pages=12), Sequence()
    driver.step(chunks=[(sequence, prompt(21))])
    written = ~torch.isnan(driver.cache.data).all(dim=(1, 2, 4, 5))
    expected = torch.zeros_like(written)
    expected[sequence.pages[0]] = True
    expected[sequence.pages[1], :5] = True
    assert torch.equal(written, expected)


class NoHostRead(TorchDispatchMode):
    """Raises on what would make a host wait for a device, or give it a shape that depends on data."""

    BANNED = ("_local_scalar_dense", "item", "nonzero", "nonzero_static", "masked_select", "is_nonzero", "equal")
    BANNED += ("_unique2", "unique_dim", "unique_consecutive", "repeat_interleave", "bincount", "_assert_async")

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.seen.add(name)
        if name in self.BANNED:
            raise AssertionError(f"host read: {func}")
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), (
                "a boolean index has a data-dependent shape"
            )
        return func(*args, **(kwargs or {}))


def test_forward_reads_nothing_on_the_host(ours):
    driver, first, second = Driver(ours), Sequence(), Sequence()
    driver.step(chunks=[(first, prompt(20)), (second, prompt(30))])
    shape, inputs = driver.batch([(first, 1)], [(second, prompt(600)), (Sequence(), prompt(9))], inert=1, slack=4)
    with NoHostRead() as watch:
        ours.logits(ours.forward(inputs, ours.plan(shape), driver.cache))
    assert {"index_put_", "index_select"} <= watch.seen
    with pytest.raises(AssertionError, match="host read"), NoHostRead():
        inputs.kv_lens.max().item()


def test_plan_is_host_integers():
    plan = plan_attention(BatchShape(decode=5, chunks=((0, 7), (16, 3)), bound=100))
    assert plan == (5, 100, ((5, 5, 0, 7), (6, 12, 16, 3)))
    assert plan_attention(BatchShape(0, (), 0)) == (0, 0, ())


def test_page_bytes_are_the_caches(ours):
    cache = ours.new_cache(7, 16, torch.device("cpu"))
    assert cache.data.nbytes == 7 * ours.page_bytes(16)
    assert (cache.pages, cache.page_size) == (7, 16)


def test_no_rows_to_sample_is_fine(ours):
    assert ours.logits(torch.empty(0, ours.spec.hidden_size)).shape == (0, ours.vocab_size)
