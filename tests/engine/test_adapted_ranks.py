"""Adapters and new weights of an engine of several ranks: each has its share, and the tokens are one rank's."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from adapter_files import write_adapter
from other_weights import checkpoint

from gapless import LLM, SamplingParams
from gapless.base.config import EngineConfig
from gapless.base.errors import RequestError
from gapless.engine.adapters import FollowingAdapters
from gapless.engine.async_llm import AsyncLLM
from gapless.engine.seam import AdapterChange
from gapless.memory.slots import NO_SLOT
from gapless.model.config import read_model_config, resolve_model_dir
from gapless.step.adapters import AdapterContents
from gapless.step.orders import AdapterOrder

pytestmark = pytest.mark.process
PROMPT = "Question: Mia has 14 pens and buys 7 more. How many pens does Mia have?"
OPTIONS = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_model_len": 160, "max_loras": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root, config = tmp_path_factory.mktemp("adapters"), read_model_config(resolve_model_dir("demo"))
    for seed, name in enumerate(NAMES):
        write_adapter(root / name, config, seed + 1, size=0.07, rank=(8, 16, 5)[seed])
    return root


@pytest.fixture(scope="module")
def wanted(folder):
    found = played(folder)
    assert len(set(map(tuple, found.values()))) == 4, "each was meant to have tokens of its own"
    return found


def played(folder, **options):
    """Tokens by adapter, each of 12 requests at once; there are fewer slots than adapters."""
    modules = tuple(f"{name}={folder / name}" for name in NAMES)
    asked = ["", *NAMES] * 3
    with LLM("demo", **OPTIONS, lora_modules=modules, **options) as llm:
        outputs = llm.generate([PROMPT] * len(asked), GREEDY, use_tqdm=False, adapter=asked)
    found = [output.outputs[0].token_ids for output in outputs]
    assert found[:4] == found[4:8] == found[8:]
    return dict(zip(asked, found, strict=False))


@pytest.mark.parametrize("depth", ("auto", "1"))
def test_two_ranks_with_adapters_give_the_tokens_of_one(folder, wanted, depth):
    assert played(folder, tensor_parallel_size=2, depth=depth) == wanted


def test_adapters_of_the_start_are_read_before_a_following_rank_obeys():
    """A read pins memory, for which steps on the device would wait."""
    files = SimpleNamespace(named=lambda: {"one": AdapterContents([], "digest")})
    FollowingAdapters(files).obey(AdapterOrder("digest", "directory", NO_SLOT))  # what reads is not there


async def test_two_ranks_take_adapters_that_are_loaded_replaced_and_unloaded(folder, wanted):
    config = EngineConfig("demo", **OPTIONS, lora_dir=str(folder), tensor_parallel_size=2)

    async def tokens(llm):
        async for output in llm.generate(PROMPT, GREEDY, adapter="x"):
            last = output
        return last.outputs[0].token_ids

    async with AsyncLLM.from_config(config) as llm:
        for name in NAMES:
            await llm.change_adapter(AdapterChange("x", name, in_place=True))
            assert await tokens(llm) == wanted[name]
        await llm.change_adapter(AdapterChange("x"))
        await llm.change_adapter(AdapterChange("x", "one"))
        assert await tokens(llm) == wanted["one"]


@pytest.mark.parametrize("kind", ("auto", "fp8"))
def test_two_ranks_take_new_weights_and_refuse_wrong_ones(tmp_path, kind):
    """Scales of 8-bit KV are measured by a forward of all ranks."""
    other, options = checkpoint(tmp_path / "other", 3), OPTIONS | {"kv_cache_dtype": kind}
    wrong = checkpoint(tmp_path / "wrong", 3, intermediate_size=12)
    with LLM(str(other), **options, tokenizer=str(resolve_model_dir("demo"))) as llm:
        wanted = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    with LLM("demo", **options, tensor_parallel_size=2) as llm:
        before = llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        with pytest.raises(RequestError, match="width is 12"):
            llm.update_weights(str(wrong))
        assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == before
        llm.update_weights(str(other))
        assert llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids == wanted != before
