"""Ranks on one GPU: two groups of one process on streams of their own, and engines of two processes."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from adapter_files import write_adapter
from torch import Tensor

from gapless import LLM, EngineDeadError, SamplingParams
from gapless.base.errors import DeviceError
from gapless.base.share import Share
from gapless.comm import cuda
from gapless.comm.cuda import CudaGroup, HostWords
from gapless.demo import weights_dir
from gapless.device import CudaDevice
from gapless.kernels import plain
from gapless.model.config import read_model_config, resolve_model_dir
from gapless.pace.load_gate import LoadGate

Pair = list[tuple[CudaDevice, CudaGroup]]
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two ranks of this process: no handle is opened."""
    devices = [CudaDevice(), CudaDevice()]
    memory = devices[0].host_memory(4096)
    end = partial(memory[64:68].fill_, 1)
    groups = [
        CudaGroup(Share(rank, 2), device, HostWords(memory, 64, 128 * (1 + rank), end))
        for rank, device in enumerate(devices)
    ]
    for group in groups:
        group.connect([one.handles() for one in groups])
    yield list(zip(devices, groups, strict=True))
    for device, group in zip(devices, groups, strict=True):
        with suppress(DeviceError):  # of stopped ranks
            device.drain()
        group.close()
    for device in devices[::-1]:
        device.close()


def both(pair: Pair, run: Callable[[CudaGroup], Any]) -> list[Any]:
    """Launch on both streams, then wait."""
    found: list[Any] = [None, None]

    def program(rank: int, group: CudaGroup) -> None:
        found[rank] = run(group)

    torch.cuda.synchronize()
    for rank, (device, group) in enumerate(pair):
        device.compute.launch(program, rank, group)
    for device, _ in pair:
        device.compute.record().wait()
    return found


def parts_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    if dtype == torch.int64:
        return [torch.randint(-(2**62), 2**62, shape, device="cuda") for _ in range(2)]
    return [torch.randn(shape, device="cuda").mul(8).to(dtype) for _ in range(2)]


def summed(parts: list[Tensor]) -> Tensor:
    wide = torch.int64 if parts[0].dtype == torch.int64 else torch.float32
    return (parts[0].to(wide) + parts[1].to(wide)).to(parts[0].dtype)


@pytest.mark.parametrize("dtype", (*FLOATS, torch.int64), ids=str)
def test_sums_on_a_gpu_are_equal_to_the_bit_in_every_size(pair: Pair, dtype: torch.dtype) -> None:
    for seed, shape in enumerate(((1, 4096), (3, 5), (32, 4096), (256, 4096), (2048, 4096), (3001, 24), (1, 8))):
        parts = parts_of(shape, dtype, seed)
        want, own = summed(parts), [part.clone() for part in parts]
        for one in both(pair, lambda group, own=own: group.add(own[group.share.rank])):
            assert torch.equal(one, want), shape


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 4096), (7, 1024), (100, 4096), (300, 4096), (64, 8192), (3, 32768)], ids=str)
def test_add_norm_on_a_gpu_equals_a_sum_and_then_a_norm(pair: Pair, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    parts, x, weight = parts_of(shape, dtype), parts_of(shape, dtype, 1)[0], torch.rand(shape[1], device="cuda") + 0.5
    want_x = x.clone()
    want = plain.KERNELS.add_rms_norm(want_x, summed(parts), weight, 1e-6)
    own = [x.clone(), x.clone()]
    found = both(pair, lambda group: group.add_norm(own[group.share.rank], parts[group.share.rank], weight, 1e-6))
    assert torch.equal(found[0], found[1]) and all(torch.equal(one, want_x) for one in own)
    assert torch.allclose(found[0].float(), want.float(), atol=1e-4, rtol=1e-2)


def test_columns_and_news_arrive_on_a_gpu(pair: Pair) -> None:
    for rows, widths in ((1, (75968, 75968)), (33, (1000, 1001)), (256, (75968, 75968))):
        parts = [torch.randn(rows, width, device="cuda").bfloat16() for width in widths]
        outs = [parts[0].new_zeros(rows, sum(widths)), parts[0].new_zeros(rows, 0)]
        both(pair, lambda group, parts=parts, outs=outs: group.gather(parts[group.share.rank], outs[group.share.rank]))
        assert torch.equal(outs[0], torch.cat(parts, 1))
        words = [torch.arange(rows * 11, dtype=torch.int32, device="cuda"), parts[0].new_zeros(rows * 11).int()]
        for one in both(pair, lambda group, words=words: group.tell(words[group.share.rank])):
            assert torch.equal(one, words[0])


def test_graphs_of_sums_replay_with_new_numbers_and_captures_take_no_memory(pair: Pair) -> None:
    """Every rank captures by itself; 200 graphs are dropped."""
    xs = [torch.zeros(4, 4096, device="cuda", dtype=torch.bfloat16) for _ in pair]

    def program(group: CudaGroup) -> None:
        for _ in range(5):
            group.add(xs[group.share.rank])

    def capture(device: CudaDevice, group: CudaGroup, number: int) -> Any:
        with group.muted():
            return device.capture(("sums", number), partial(program, group))

    for device, group in pair:
        for number in range(10):
            capture(device, group, number)
    before = torch.cuda.mem_get_info()[0]
    for device, group in pair:
        for number in range(200):
            capture(device, group, number)
    assert abs(torch.cuda.mem_get_info()[0] - before) <= 8 << 20
    graphs = [capture(device, group, -1) for device, group in pair]
    for turn in range(1, 4):
        for x in xs:
            x.fill_(turn)
        torch.cuda.synchronize()
        for _ in range(2):
            for (device, _), graph in zip(pair, graphs, strict=True):
                graph.launch(device.compute)
        for device, _ in pair:
            device.compute.record().wait()
        assert all((x == turn * 2**10).all() for x in xs)


@pytest.mark.parametrize("what", ["add", "add_large", "tell", "take"])
def test_stop_word_ends_a_wait_and_leaves_the_gpu_usable(pair: Pair, what: str) -> None:
    device, group = pair[0]
    y, out = torch.ones(2048, 4096, device="cuda").bfloat16(), torch.zeros(8, 64, device="cuda").bfloat16()
    programs: dict[str, Callable[[], object]] = {
        "add": lambda: group.add(y[:1]),
        "add_large": lambda: group.add(y),
        "tell": lambda: group.tell(torch.zeros(8, dtype=torch.int32, device="cuda")),
        "take": lambda: group.gather(y[:8, :32].contiguous(), out),
    }
    device.compute.launch(programs[what])
    fence = device.compute.record()
    time.sleep(0.2)
    assert not fence.done()
    begin = time.perf_counter()
    group.stop()
    with pytest.raises(DeviceError, match="the ranks were stopped"):
        fence.wait()
    assert time.perf_counter() - begin < 0.5
    torch.cuda.synchronize()
    assert float(torch.ones(8, device="cuda").sum()) == 8


OPTIONS: dict[str, Any] = {"device": "cuda", "max_num_seqs": 8, "max_model_len": 256, "kv_cache_memory_bytes": 64 << 20}
SHARED: dict[str, Any] = {"tensor_parallel_size": 2, "device_ids": "0,1" if torch.cuda.device_count() > 1 else "0,0"}
PROMPTS = ["Once upon a time", "Mia has 14 pens", "The city is"]


def tokens_of(**options: Any) -> list[list[int]]:
    params = [SamplingParams(temperature=t, seed=7, max_tokens=24, ignore_eos=True) for t in (0.0, 0.0, 0.9)]
    with LLM("demo", **OPTIONS, **options) as llm:
        return [list(one.outputs[0].token_ids) for one in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize("depth", ["1", "auto"])
def test_two_processes_on_one_gpu_give_the_tokens_of_one(depth: str) -> None:
    """In float32, where the split of a sum moves no choice."""
    assert tokens_of(dtype="float32", depth=depth, **SHARED) == tokens_of(dtype="float32")


def test_two_processes_on_one_gpu_compute_in_the_fast_way_of_few_rows() -> None:
    """Bits differ from one rank's: first tokens alone are certain."""
    one, two = tokens_of(dtype="bfloat16"), tokens_of(dtype="bfloat16", **SHARED)
    assert [tokens[0] for tokens in one[:2]] == [tokens[0] for tokens in two[:2]]
    assert two == tokens_of(dtype="bfloat16", depth="1", **SHARED)


@pytest.fixture(scope="module")
def divisible(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A shape whose inputs two ranks share in whole groups of int4; random weights."""
    folder = tmp_path_factory.mktemp("divisible")
    changes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = json.loads((weights_dir() / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return str(folder)


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_two_processes_on_one_gpu_score_rounded_weights_like_one(divisible: str, kind: str) -> None:
    """Sums round, and in FP8 each rank rounds its part of the inputs by itself: scores are near, tokens may differ.
    Among themselves two ranks have equal tokens at each depth."""
    options = {"tokenizer": str(weights_dir()), "load_format": "dummy", "dtype": "bfloat16", "quantization": kind}
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=5)
    found = []
    for more in ({}, SHARED, {**SHARED, "depth": "1"}):
        with LLM(divisible, **OPTIONS, **options, **more) as llm:
            found.append([one.outputs[0] for one in llm.generate(PROMPTS, params, use_tqdm=False)])
    one, two, apart = found
    assert [output.token_ids for output in two] == [output.token_ids for output in apart]
    for mine, theirs in zip(two, one, strict=True):
        near_scores(mine.logprobs[0], theirs.logprobs[0], 0.06)


def near_scores(mine: dict[int, Any], theirs: dict[int, Any], most: float) -> None:
    """Compare the scores that both have of the same position."""
    both = mine.keys() & theirs.keys()
    assert len(both) >= 3
    assert max(abs(mine[token].logprob - theirs[token].logprob) for token in both) < most


@pytest.mark.parametrize("depth", ["1", "auto"])
def test_two_processes_on_one_gpu_replay_graphs_at_each_depth(depth: str) -> None:
    options = {"dtype": "float32", "depth": depth, **SHARED}
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    with LLM("demo", **OPTIONS, **options) as llm:
        first, second = (llm.generate(PROMPTS, params, use_tqdm=False) for _ in range(2))
        steps = llm.stats().steps
    assert [one.outputs[0].token_ids for one in first] == [one.outputs[0].token_ids for one in second]
    assert steps.graph_steps > 32


@pytest.mark.parametrize("depth", ["1", "auto"])
def test_two_processes_on_one_gpu_load_pages_that_the_gpu_gave_up(depth: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank stores and loads its heads of a page; tokens are one rank's without a tier."""
    monkeypatch.setattr(LoadGate, "pays", lambda *_: True)
    greedy, found = SamplingParams(temperature=0, max_tokens=8), []
    prompts = [word + "The quick brown fox jumps over the lazy dog near the river bank. " * 10 for word in "abcd"]
    options = {"device": "cuda", "dtype": "float32", "max_model_len": 512, "num_gpu_blocks_override": 40}
    for more in ({}, {**SHARED, "depth": depth, "kv_tiers": ("host:64MiB",)}):
        with LLM("demo", **options, **more) as llm:
            found.append([llm.generate(prompt, greedy, use_tqdm=False)[0] for prompt in prompts * 2])
    tokens = [[output.outputs[0].token_ids for output in rounds] for rounds in found]
    assert tokens[0] == tokens[1]
    assert all(output.num_cached_tokens > 256 for output in found[1][4:])


@pytest.mark.parametrize("depth", ["1", "auto"])
def test_two_processes_on_one_gpu_compute_rows_with_adapters_like_one(tmp_path, depth: str) -> None:
    names = ["", "one", "two"]
    for seed, name in enumerate(names[1:]):
        write_adapter(tmp_path / name, read_model_config(resolve_model_dir("demo")), seed + 1, size=0.07)
    modules = tuple(f"{name}={tmp_path / name}" for name in names[1:])
    params, found = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True), []
    for more in ({}, {**SHARED, "depth": depth}):
        with LLM("demo", **OPTIONS, dtype="float32", lora_modules=modules, **more) as llm:
            outputs = llm.generate([PROMPTS[1]] * 6, params, use_tqdm=False, adapter=names * 2)
        found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1] and len(set(map(tuple, found[0]))) == 3


def test_a_killed_rank_on_a_gpu_is_named_and_leaves_the_gpu_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    from gapless.engine import rank_process

    started: list[Any] = []
    popen = rank_process.subprocess.Popen

    def noted(*args: Any, **options: Any) -> Any:
        started.append(popen(*args, **options))
        return started[-1]

    monkeypatch.setattr(rank_process.subprocess, "Popen", noted)
    with LLM("demo", **OPTIONS, **SHARED) as llm:
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=4))
        threading.Timer(0.5, os.kill, (started[0].pid, signal.SIGKILL)).start()
        with pytest.raises(EngineDeadError, match="rank 1 was killed by SIGKILL"):
            for _ in range(100):
                llm.generate(PROMPTS, SamplingParams(max_tokens=200, ignore_eos=True))
    assert float(torch.ones(8, device="cuda").sum()) == 8


def test_a_group_takes_one_stream_of_a_gpu(pair: Pair) -> None:
    _, group = pair[0]
    with torch.cuda.stream(torch.cuda.Stream()), pytest.raises(AssertionError, match="belongs to one stream"):
        group.add(torch.ones(1, 8, device="cuda"))


def test_the_gpus_binary_is_kept_for_the_next_start(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    driver, text = cuda.Driver(torch.device("cuda", 0)), cuda.SUMS_SOURCE.read_text(encoding="utf-8")
    times = []
    for _ in range(2):
        begin = time.perf_counter()
        driver.kernels("sums", text, {"WORLD": 2}, ("tell",))
        times.append(time.perf_counter() - begin)
    assert list(tmp_path.rglob("sums-*.cubin")) and times[1] < times[0] / 2
