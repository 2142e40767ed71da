"""Adapters that are loaded, replaced and unloaded while requests run, on the demo model."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress

import pytest
from adapter_files import write_adapter
from seen_engine import SeenEngine, whole

from gapless import LLM, SamplingParams
from gapless.base.config import EngineConfig
from gapless.base.errors import ConfigError, EngineDeadError, RequestError
from gapless.base.records import PageChange
from gapless.engine.async_llm import AsyncLLM
from gapless.engine.process_backend import ProcessBackend
from gapless.engine.seam import AdapterChange
from gapless.model.adapters import WEIGHTS
from gapless.model.config import read_model_config, resolve_model_dir

PROMPT = "Question: Mia has 14 pens and buys 7 more. How many pens does Mia have?"
OPTIONS = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_model_len": 160, "max_loras": 2}
LONG = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root, config = tmp_path_factory.mktemp("root"), read_model_config(resolve_model_dir("demo"))
    for seed, name in enumerate(("one", "two", "three")):
        write_adapter(root / "here" / name, config, seed + 1, size=0.07)
    write_adapter(root / "elsewhere", config, 9)
    write_adapter(root / "here" / "large", config, 1, rank=64)
    (root / "here" / "broken").mkdir()
    for file in (root / "here" / "one").iterdir():
        (root / "here" / "broken" / file.name).write_bytes(file.read_bytes())
    (root / "here" / "broken" / WEIGHTS).write_bytes(b"no tensors")
    return root


@pytest.fixture(scope="module")
def wanted(folder):
    """The tokens of each adapter in an engine that has it from the start, and of none."""
    modules = tuple(f"{name}={folder / 'here' / name}" for name in ("one", "two", "three"))
    with LLM("demo", **OPTIONS, lora_modules=modules, enforce_eager=True) as llm:
        names = ["", "one", "two", "three"]
        outputs = llm.generate([PROMPT] * 4, LONG, use_tqdm=False, adapter=names)
    found = {name: output.outputs[0].token_ids for name, output in zip(names, outputs, strict=True)}
    assert len({tuple(tokens[:24]) for tokens in found.values()}) == 4, "each was meant to have tokens of its own"
    return found


def opened(folder, **options):
    return AsyncLLM.from_config(EngineConfig("demo", **OPTIONS, lora_dir=str(folder / "here"), **options))


async def run(llm, adapter, params=SHORT):
    async for output in llm.generate(PROMPT, params, adapter=adapter):
        last = output
    return last.outputs[0].token_ids, last.num_cached_tokens


async def test_adapters_come_and_go_while_requests_run(folder, wanted):
    async with opened(folder) as llm:
        assert llm.info.adapters == ()
        running = asyncio.create_task(run(llm, "", LONG))
        for name in ("one", "two", "three"):
            await llm.change_adapter(AdapterChange(name, name))
        assert llm.info.adapters == ("one", "two", "three")
        found = await asyncio.gather(*(run(llm, name) for name in ("one", "two", "three", "")))
        assert [tokens for tokens, _ in found] == [wanted[name][:24] for name in ("one", "two", "three", "")]
        assert (await running)[0] == wanted[""]
        await llm.change_adapter(AdapterChange("two"))
        assert llm.info.adapters == ("one", "three")
        with pytest.raises(RequestError, match="there is no adapter 'two'"):
            await run(llm, "two")


async def test_open_requests_keep_the_adapter_that_was_replaced_or_unloaded(folder, wanted):
    async with opened(folder) as llm:
        await llm.change_adapter(AdapterChange("a", "one"))
        streams = [await llm.open(PROMPT, LONG, adapter="a") for _ in range(2)]
        await streams[0].next()
        await llm.change_adapter(AdapterChange("a", "two", in_place=True))
        assert (await run(llm, "a"))[0] == wanted["two"][:24]
        await llm.change_adapter(AdapterChange("a"))
        assert [(await whole(stream))[0].token_ids for stream in streams] == [wanted["one"]] * 2


@pytest.mark.seeds
async def test_a_name_of_other_files_shares_no_pages_with_its_past(folder, wanted):
    async with opened(folder) as llm:
        await llm.change_adapter(AdapterChange("a", "one"))
        assert await run(llm, "a") == (wanted["one"][:24], 0)
        assert (await run(llm, "a"))[1] > 0
        with pytest.raises(RequestError, match="loaded with other files: set load_inplace") as refused:
            await llm.change_adapter(AdapterChange("a", "two"))
        assert refused.value.param == "lora_name" and (await run(llm, "a"))[0] == wanted["one"][:24]
        await llm.change_adapter(AdapterChange("a", "one"))  # the same files: nothing to do
        await llm.change_adapter(AdapterChange("a", "two", in_place=True))
        assert await run(llm, "a") == (wanted["two"][:24], 0)
        await llm.change_adapter(AdapterChange("b", "one"))
        tokens, cached = await run(llm, "b")
        assert tokens == wanted["one"][:24] and cached > 0, "the same files have the same KV, whatever their name"


@pytest.mark.seeds
async def test_page_events_name_the_adapter(folder):
    llm, seen = opened(folder), []
    llm.send_page_events(seen.extend)
    async with llm:
        await llm.change_adapter(AdapterChange("a", "one"))
        await asyncio.gather(run(llm, "a"), run(llm, ""))
        async with asyncio.timeout(60):
            while {event.adapter for event in seen if event.change is PageChange.STORED} != {"a", ""}:
                await asyncio.sleep(0.01)
    assert seen[0].change is PageChange.CLEARED and len({event.digests for event in seen}) == len(seen)


async def test_an_adapter_that_cannot_be_loaded_is_refused_by_name_and_changes_nothing(folder, tmp_path):
    (folder / "here" / "link").unlink(missing_ok=True)
    (folder / "here" / "link").symlink_to(folder / "elsewhere")
    cases = {
        "../elsewhere": "must lie below the directory",
        str(folder / "elsewhere"): "must lie below the directory",
        "link": "must lie below the directory",
        "nothing": "nothing: no adapter: adapter_config.json is not there",
        "large": "large/adapter_config.json: r is 64, above the limit of 16: raise --max-lora-rank",
        "broken": f"broken/{WEIGHTS}",
        "a\0b": "cannot be read: ValueError",
    }
    async with opened(folder) as llm:
        for path, words in cases.items():
            with pytest.raises(RequestError, match=words) as refused:
                await llm.change_adapter(AdapterChange("a", path))
            assert refused.value.param == "lora_path" and str(folder) not in str(refused.value)
        with pytest.raises(RequestError, match="no adapter 'a'") as refused:
            await llm.change_adapter(AdapterChange("a"))
        assert refused.value.code == "model_not_found" and llm.info.adapters == ()
    with pytest.raises(ConfigError, match="is no directory: make it, or leave lora_dir out"):
        async with AsyncLLM.from_config(EngineConfig("demo", **OPTIONS, lora_dir=str(tmp_path / "none"))):
            pass


@pytest.mark.seeds
async def test_an_engine_without_the_directory_changes_nothing(folder):
    modules = (f"one={folder / 'here' / 'one'}",)
    async with AsyncLLM.from_config(EngineConfig("demo", **OPTIONS, lora_modules=modules)) as llm:
        for change in (AdapterChange("two", "two"), AdapterChange("one")):
            with pytest.raises(RequestError, match="start it with --lora-dir"):
                await llm.change_adapter(change)
        assert llm.info.adapters == ("one",)


@pytest.mark.seeds
async def test_a_change_under_way_ends_with_the_engine(folder):
    llm = opened(folder)
    await llm.start()
    change = asyncio.create_task(llm.change_adapter(AdapterChange("a", "one")))
    await asyncio.sleep(0)
    await llm.close()
    with pytest.raises(EngineDeadError):
        await change
    with pytest.raises(EngineDeadError):
        await llm.change_adapter(AdapterChange("b", "two"))


@pytest.mark.seeds
async def test_slots_and_memory_of_an_unloaded_adapter_come_back(folder):
    engine = SeenEngine(**OPTIONS, lora_dir=str(folder / "here"))
    async with engine.llm as llm:
        for _ in range(3):
            for name in ("one", "two", "three"):
                await llm.change_adapter(AdapterChange(name, name))
                await run(llm, name, SamplingParams(temperature=0, max_tokens=2))
                await llm.change_adapter(AdapterChange(name))
        await run(llm, "", SHORT)
        loader = engine.core.loop.parts.adapters
        assert not loader.names and not loader.contents and not loader.slots.held
        assert sorted(loader.slots.unused) == [1, 2] and len(engine.core.loop.rows.slots) == 1


@pytest.mark.process
async def test_an_engine_that_follows_one_that_died_has_its_adapters_and_goes_on_with_their_requests(folder, wanted):
    # Room for seconds of an endless answer: it must be open still when the engine dies.
    options = OPTIONS | {"max_model_len": 2048, "num_gpu_blocks_override": 300}
    config = EngineConfig("demo", **options, lora_dir=str(folder / "here"))
    backend = ProcessBackend(config)
    async with AsyncLLM.from_config(config, backend) as llm:
        for name in ("one", "two"):
            await llm.change_adapter(AdapterChange(name, str(folder / "here" / name)))
        endless = SamplingParams(temperature=0, ignore_eos=True)
        params = {"": LONG, "one": LONG, "two": endless}
        streams = {name: await llm.open(PROMPT, asked, adapter=name) for name, asked in params.items()}
        for stream in streams.values():
            await stream.next()
        await llm.pause_generation(mode="keep")  # a slow machine would end the answer first
        await llm.change_adapter(AdapterChange("two", str(folder / "here" / "three"), in_place=True))
        os.kill(backend.pid, signal.SIGKILL)
        with suppress(EngineDeadError):  # the next one begins without a pause
            await llm.resume_generation()
        for name in ("", "one"):
            assert (await whole(streams[name]))[0].token_ids == wanted[name]
        with pytest.raises(EngineDeadError, match="the adapter 'two' has changed since"):
            await whole(streams["two"])
        assert set(llm.info.adapters) == {"one", "two"}
        assert (await run(llm, "two", LONG))[0] == wanted["three"]
