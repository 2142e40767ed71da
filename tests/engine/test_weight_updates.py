"""Weights that are replaced while an engine runs: new tokens from then on, and no page of the old weights anywhere."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time

import numpy as np
import pytest
from other_weights import NAME, checkpoint
from safetensors.numpy import load_file, save_file
from seen_engine import SeenEngine, whole

from gapless import LLM, SamplingParams
from gapless.base.config import EngineConfig
from gapless.base.errors import EngineDeadError, QueueFullError, RequestError
from gapless.base.records import PageChange
from gapless.engine import updates
from gapless.engine.async_llm import AsyncLLM
from gapless.engine.build import build_core
from gapless.engine.frontdoor import locate, open_assets
from gapless.engine.inputs import Resolver
from gapless.engine.process_backend import ProcessBackend
from gapless.model.config import resolve_model_dir

OPTIONS = {"device": "cpu", "dtype": "float32", "max_num_seqs": 4, "max_model_len": 512, "num_gpu_blocks_override": 80}
PROMPT = "The quick brown fox jumps over the lazy dog near the river bank. " * 10
SHORT = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    return checkpoint(tmp_path_factory.mktemp("weights") / "other")


def answer(llm, params=SHORT):
    output = llm.generate(PROMPT, params, use_tqdm=False)[0]
    return output.outputs[0].token_ids, output.num_cached_tokens


@pytest.fixture(scope="module")
def wanted(other):
    """The tokens of both, each in an engine that has had no other weights."""
    found = {}
    for name in ("demo", str(other)):
        with LLM(name, **OPTIONS, enforce_eager=True) as llm:
            found[name] = answer(llm, LONG)[0]
    old, new = found.values()
    assert old[:16] != new[:16], "both were meant to have tokens of their own"
    return old, new


def test_new_weights_give_their_own_tokens_and_find_no_page_of_the_old(captures_all, other, wanted):
    old, new = wanted
    with LLM("demo", **OPTIONS) as llm:
        assert answer(llm) == (old[:16], 0) and answer(llm)[1] > 256
        graphs = llm.stats().steps.graph_steps
        llm.update_weights(str(other))
        assert answer(llm) == (new[:16], 0)
        assert answer(llm)[1] > 256, "pages of the new weights are shared as usual"
        assert llm.stats().steps.graph_steps > graphs > 0, "steps were meant to be replays, of the graphs from before"
        llm.update_weights(str(resolve_model_dir("demo")))
        assert answer(llm) == (old[:16], 0)


@pytest.mark.seeds
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"batch_invariant": True}, {"enforce_eager": True}])
def test_every_layout_of_weights_is_filled_as_at_a_start(other, options):
    with LLM(str(other), **{**OPTIONS, **options}) as llm:
        expected = answer(llm)[0]
    with LLM("demo", **{**OPTIONS, **options}) as llm:
        before = answer(llm)[0]
        llm.update_weights(str(other))
        assert answer(llm)[0] == expected != before


@pytest.mark.seeds
def test_no_tier_gives_a_page_of_the_old_weights(other, wanted, tmp_path, monkeypatch):
    monkeypatch.setattr("gapless.offload.host.LOOKUP_NS", 10**10)
    tiers = ["host:64MiB", f"disk:{tmp_path}:64MiB"]
    with LLM("demo", **{**OPTIONS, "num_gpu_blocks_override": 40}, kv_tiers=tiers) as llm:
        answer(llm)
        deadline = time.monotonic() + 60
        while llm.stats().lower[0].stored < 16:
            assert time.monotonic() < deadline
            llm.generate("x", SHORT, use_tqdm=False)
        llm.update_weights(str(other))
        assert llm.stats().tier.used == 0
        assert answer(llm) == (wanted[1][:16], 0)
        assert llm.stats().tier.loaded == llm.stats().lower[0].loaded == 0


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(other, wanted, tmp_path):
    short = checkpoint(tmp_path / "short")
    tensors = load_file(short / NAME)
    last = max(name for name in tensors if name.endswith("down_proj.weight"))
    save_file({name: tensor for name, tensor in tensors.items() if name != last}, short / NAME)
    wide = checkpoint(tmp_path / "wide")
    save_file({**tensors, last: tensors[last][:, :-1].copy()}, wide / NAME)
    cut = checkpoint(tmp_path / "cut")
    (cut / NAME).write_bytes((other / NAME).read_bytes()[:-1000])
    pickled = checkpoint(tmp_path / "pickled")
    (pickled / NAME).unlink()
    (pickled / "pytorch_model.bin").write_bytes(b"no tensors")
    cases = {
        checkpoint(tmp_path / "layers", num_hidden_layers=1): "config.json: layers is 1, and the engine runs a model",
        checkpoint(tmp_path / "theta", rope_theta=123.0): "config.json: theta is",
        short: f"tensor '{last}' is missing",
        wide: f"tensor '{last}' has shape",
        cut: "truncated",
        pickled: "pickled weights are not read",
        tmp_path / "nothing": "is no directory",
    }
    with LLM("demo", **OPTIONS) as llm:
        answer(llm)
        for path, words in cases.items():
            with pytest.raises(RequestError, match=words) as refused:
                llm.update_weights(str(path))
            assert refused.value.param == "model_path"
        tokens, cached = answer(llm)
        assert tokens == wanted[0][:16] and cached > 256, "all is as it was, and so is the cache"


async def run(llm, params):
    async for output in llm.generate(PROMPT, params):
        last = output
    return last.outputs[0].token_ids


def test_a_request_that_moves_here_while_weights_are_replaced_begins_with_the_new(other, wanted):
    config, commit = locate(EngineConfig("demo", **OPTIONS, enforce_eager=True))
    core, said, found = build_core(config), [], []
    try:
        [request] = Resolver(open_assets(config, commit), core.info, 0).resolve(PROMPT, SHORT).requests
        core.update_weights(str(other), said.append)
        while not core.updates.placing:
            core.step()
        with pytest.raises(QueueFullError, match="the weights are being replaced"):
            core.submit(request._replace(key=request.key + 1, output=np.array(wanted[0][:3], np.int32)))
        core.submit(request._replace(output=np.array([], np.int32)))
        while len(found) < 16:
            found += [token for step in core.step().tokens for _, token, _ in step.entries()]
    finally:
        core.close()
    assert said == [None] and found == list(wanted[1][:16])


async def test_open_requests_end_with_the_old_weights_and_later_ones_wait_for_the_new(other, wanted):
    old, new = wanted
    seen, engine = [], SeenEngine(**OPTIONS)
    llm = engine.llm
    llm.send_page_events(seen.extend)
    async with llm:
        streams = [await llm.open(PROMPT, LONG) for _ in range(6)]  # more than there are rows
        await streams[0].next()
        update = asyncio.create_task(llm.update_weights(str(other)))
        twice = asyncio.create_task(llm.update_weights(str(other)))
        later = []
        while not (engine.core.updates.waits or update.done()):
            if len(later) < 5:  # before the engine holds what comes
                later.append(asyncio.create_task(run(llm, SHORT)))
            await asyncio.sleep(0.001)
        later.append(asyncio.create_task(run(llm, SHORT)))
        await update
        with pytest.raises(RequestError, match="another update of the weights is under way"):
            await twice
        assert [(await whole(stream))[0].token_ids for stream in streams] == [old] * 6
        assert await run(llm, SHORT) == new[:16]
        got = await asyncio.gather(*later)
        assert got[-1] == new[:16] and all(tokens in (old[:16], new[:16]) for tokens in got), "none has tokens of both"
    assert [event.change for event in seen].count(PageChange.CLEARED) == 2, "at the start, and with the new weights"


@pytest.mark.seeds
async def test_requests_that_wait_for_weights_can_be_aborted_and_are_bounded(other, wanted, monkeypatch):
    read, read_weights = threading.Event(), updates.read_weights

    def reading(*args):
        found = read_weights(*args)
        read.set()
        return found

    monkeypatch.setattr(updates, "read_weights", reading)
    engine = SeenEngine(**OPTIONS, max_num_queued_reqs=3)
    async with engine.llm as llm:
        step, changes = engine.core.step, engine.core.updates
        engine.core.step = lambda: step() if read.is_set() or not changes.under_way or read.wait(60) else None
        running = await llm.open(PROMPT, LONG)
        await running.next()
        update = asyncio.create_task(llm.update_weights(str(other)))
        while not changes.waits:
            await asyncio.sleep(0.001)
        assert not running.finished, "no step runs while the files are read"
        waiting = [await llm.open(PROMPT, SHORT, f"wait-{number}") for number in range(4)]
        await llm.abort("wait-0")
        await update
        ended = []
        for stream in waiting[1:]:
            try:
                ended.append((await whole(stream))[0].token_ids)
            except Exception as error:
                ended.append(type(error).__name__)
        assert ended.count("QueueFullError") == 1 and ended.count(wanted[1][:16]) == 2


@pytest.mark.process
async def test_a_process_that_follows_one_that_died_has_its_weights_though_no_caller_waited(wanted, tmp_path):
    bare = checkpoint(tmp_path / "bare", dtype="bfloat16", torch_dtype="bfloat16")
    for path in bare.glob("tokenizer*"):
        path.unlink()
    config = EngineConfig("demo", **{**OPTIONS, "dtype": "auto"})
    backend = ProcessBackend(config)
    async with AsyncLLM.from_config(config, backend) as llm:
        before = llm.info
        assert await run(llm, SHORT) == wanted[0][:16]
        update = asyncio.create_task(llm.update_weights(str(bare)))
        await asyncio.sleep(0)
        update.cancel()
        async with asyncio.timeout(60):
            while await run(llm, SHORT) != wanted[1][:16]:
                await asyncio.sleep(0.05)
            os.kill(backend.pid, signal.SIGKILL)
            while backend.ready():
                await asyncio.sleep(0.01)
            while not backend.ready():
                await asyncio.sleep(0.05)
        assert await run(llm, SHORT) == wanted[1][:16]
        assert llm.info._replace(startup_seconds=()) == before._replace(startup_seconds=())


@pytest.mark.process
async def test_requests_do_not_continue_with_weights_that_were_written_since(tmp_path):
    path = checkpoint(tmp_path / "model")
    config = EngineConfig(str(path), **OPTIONS, tokenizer=str(resolve_model_dir("demo")))
    backend = ProcessBackend(config)
    async with AsyncLLM.from_config(config, backend) as llm:
        stream = await llm.open("The quick brown fox", SamplingParams(temperature=0, ignore_eos=True))
        await stream.next()
        os.utime(path / "model.safetensors", ns=(1, 1))
        os.kill(backend.pid, signal.SIGKILL)
        with pytest.raises(EngineDeadError, match="the files of its weights have changed since it read them"):
            await whole(stream)
        assert (await whole(await llm.open("The quick brown fox", SHORT)))[0].finish_reason == "length"
