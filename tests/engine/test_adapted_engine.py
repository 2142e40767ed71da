"""The demo model with adapters: tokens are those of merged weights, at any depth, beside any other rows."""

from __future__ import annotations

import shutil

import pytest
from adapter_files import additions, write_adapter
from safetensors.torch import load_file, save_file

from gapless import LLM, SamplingParams
from gapless.base.config import EngineConfig
from gapless.base.errors import CheckpointError, RequestError
from gapless.base.files import SINGLE
from gapless.engine.wiring import build_core
from gapless.model.config import read_model_config, resolve_model_dir

NAMES = ("", "a", "b", "c")
PROMPTS = [f"Question: {name} has 14 pens and buys 7 more. How many pens does {name} have?" for name in ("Mia", "Tom")]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
OPTIONS = {"device": "cpu", "dtype": "float32", "max_num_seqs": 8, "max_model_len": 128}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder, config = tmp_path_factory.mktemp("adapters"), read_model_config(resolve_model_dir("demo"))
    ranks = {"a": 8, "b": 16, "c": 4}
    return {name: write_adapter(folder / name, config, rank, rank=rank, size=0.05) for name, rank in ranks.items()}


@pytest.fixture(scope="module")
def wanted(paths, tmp_path_factory):
    """The tokens of the model that each adapter is merged into, for each prompt."""
    demo, found = resolve_model_dir("demo"), {}
    for name in NAMES:
        directory = tmp_path_factory.mktemp("merged")
        shutil.copytree(demo, directory, dirs_exist_ok=True)
        weights = load_file(demo / SINGLE)
        for tensor, added in additions(paths[name]).items() if name else ():
            weights[tensor] = weights[tensor].float() + added
        save_file(weights, directory / SINGLE)
        with LLM(str(directory), **OPTIONS, enforce_eager=True) as llm:
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        found[name] = [output.outputs[0].token_ids for output in outputs]
    assert len({str(tokens) for tokens in found.values()}) == len(NAMES), "the adapters were meant to change tokens"
    return found


def engine(paths, **options):
    return LLM("demo", lora_modules=tuple(f"{name}={path}" for name, path in paths.items()), **OPTIONS | options)


def tokens(llm, adapters):
    """Each prompt with each adapter, all at once."""
    asked = [(prompt, adapter) for adapter in adapters for prompt in PROMPTS]
    outputs = llm.generate([p for p, _ in asked], GREEDY, use_tqdm=False, adapter=[a for _, a in asked])
    found = iter(output.outputs[0].token_ids for output in outputs)
    return {adapter: [next(found) for _ in PROMPTS] for adapter in adapters}


@pytest.mark.seeds
@pytest.mark.parametrize("depth", ["1", "4", "auto"])
def test_rows_of_several_adapters_have_the_tokens_of_merged_weights(captures_all, paths, wanted, depth):
    with engine(paths, depth=depth) as llm:
        assert tokens(llm, NAMES) == wanted
        before = llm.stats().steps.graph_steps
        assert tokens(llm, NAMES) == wanted
        assert llm.stats().steps.graph_steps > before, "steps with adapters were meant to be replays"
        for adapter in NAMES:
            found = [llm.generate("pens " * 40, GREEDY, use_tqdm=False, adapter=adapter)[0] for _ in range(2)]
            assert found[0].num_cached_tokens == 0 < found[1].num_cached_tokens, "prefixes of an adapter are its own"
        with pytest.raises(RequestError, match="there is no adapter 'd'; those of this engine: a, b, c"):
            llm.generate(PROMPTS[0], GREEDY, adapter="d")
        with pytest.raises(RequestError, match="2 prompts need as many adapters, got 1"):
            llm.generate(PROMPTS, GREEDY, adapter=["a"])


def test_a_directory_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no adapter: adapter_config"):
        engine({"d": tmp_path})


@pytest.mark.seeds
def test_more_adapters_than_slots_take_turns(paths, wanted):
    with engine(paths, max_loras=1, max_num_seqs=3) as llm:
        for _ in range(2):
            assert tokens(llm, NAMES) == wanted


@pytest.mark.seeds
def test_preempted_rows_go_on_with_their_adapter(paths, wanted):
    with engine(paths, num_gpu_blocks_override=13, max_loras=2) as llm:
        assert tokens(llm, NAMES) == wanted
        assert llm.stats().queue.preemptions


@pytest.mark.seeds
def test_steps_of_rows_without_adapters_are_those_of_an_engine_without(captures_all, paths, wanted):
    modules = tuple(f"{name}={path}" for name, path in paths.items())
    found = []
    for lora_modules in ((), modules):
        core = build_core(EngineConfig("demo", **OPTIONS, lora_modules=lora_modules))
        known = {key for key in core.loop.launcher.graphs.known if not getattr(key, "adapters", False)}
        found.append((known, len(core.loop.launcher.graphs.known)))
        core.close()
    (plain, fewer), (ours, more) = found
    assert ours == plain and more > fewer
    with engine(paths) as llm:
        assert tokens(llm, [""])[""] == wanted[""]
        assert not llm.stats().steps.captures_refused
